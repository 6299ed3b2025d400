"""Start-up checks of --enable-decode-nsa-kv-offload: what is refused, by which words, and what is not touched."""

import copy
import dataclasses
import json
import os
import tempfile
import unittest
from pathlib import Path
from unittest import mock

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")

from sglang.srt.arg_groups import nsa_kv_offload_hook as hook
from sglang.srt.environ import envs
from sglang.srt.mem_cache.sparsity.nsa_offload.config import (
    NSAKVOffloadConfig,
    registers_host_memory,
)
from sglang.srt.plugins import load_plugins
from sglang.srt.server_args import ServerArgs, prepare_server_args
from sglang.test.test_utils import CustomTestCase

FLAG, CONFIG = "--enable-decode-nsa-kv-offload", "--decode-nsa-kv-offload-config"
TOP_K = 64
MODEL = {
    "architectures": ["DeepseekV32ForCausalLM"],
    "model_type": "deepseek_v32",
    "torch_dtype": "bfloat16",
    "vocab_size": 128,
    "hidden_size": 256,
    "intermediate_size": 256,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "q_lora_rank": 128,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "index_head_dim": 128,
    "index_n_heads": 8,
    "index_topk": TOP_K,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "max_position_embeddings": 8192,
    "rope_theta": 10000.0,
}
SPECULATION = {
    "speculative_algorithm": "EAGLE",
    "speculative_num_steps": 3,
    "speculative_eagle_topk": 1,
    "speculative_num_draft_tokens": 4,
}
# Arguments of each conflict, by the setting its message names.
CONFLICTING = {
    "--enable-hisparse": {"enable_hisparse": True},
    "--disaggregation-mode prefill": {"disaggregation_mode": "prefill"},
    "--enable-hierarchical-cache": {"enable_hierarchical_cache": True},
    "--enable-lmcache": {"enable_lmcache": True},
    "--disaggregation-transfer-backend other than mooncake, nixl or fake": {
        "disaggregation_mode": "decode",
        "disaggregation_transfer_backend": "ascend",
    },
    "--disaggregation-decode-enable-offload-kvcache": {
        "disaggregation_decode_enable_offload_kvcache": True
    },
    "the radix cache (on by default)": {"disable_radix_cache": False},
    "--speculative-algorithm other than EAGLE or NEXTN": {"speculative_algorithm": "NGRAM"},
    "--speculative-eagle-topk above 1": {**SPECULATION, "speculative_eagle_topk": 2},
    "--speculative-num-steps above 4": {**SPECULATION, "speculative_num_steps": 5},
    "--speculative-adaptive": {**SPECULATION, "speculative_adaptive": True},
    "--speculative-algorithm without the overlap scheduler (spec v1)": {
        **SPECULATION,
        "disable_overlap_schedule": True,
    },
    "--disaggregation-transfer-backend nixl with --speculative-algorithm": {
        **SPECULATION,
        "disaggregation_mode": "decode",
        "disaggregation_transfer_backend": "nixl",
    },
    "--speculative-draft-model-path": {
        **SPECULATION,
        "speculative_draft_model_path": "/models/another",
    },
    "--enable-mixed-chunk": {"enable_mixed_chunk": True},
    "--enable-two-batch-overlap": {"enable_two_batch_overlap": True},
    "--enable-torch-compile": {"enable_torch_compile": True},
    "--enable-pdmux": {"enable_pdmux": True},
    "--enable-memory-saver": {"enable_memory_saver": True},
    "--enable-streaming-session": {"enable_streaming_session": True},
    "--enable-nsa-prefill-context-parallel": {"enable_nsa_prefill_context_parallel": True},
    "--pp-size above 1": {"pp_size": 2},
}


def changed(args, fields):
    """A copy with other fields, without the adjustments that construction makes."""
    result = copy.copy(args)
    for name, value in fields.items():
        assert hasattr(result, name), name
        setattr(result, name, value)
    return result


class FlagTestCase(CustomTestCase):
    @classmethod
    def setUpClass(cls):
        load_plugins()
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.models = Path(folder.name)
        cls.model = cls.write_model("dsa", MODEL)

    @classmethod
    def write_model(cls, name, config):
        (cls.models / name).mkdir()
        (cls.models / name / "config.json").write_text(json.dumps(config))
        return str(cls.models / name)

    def server_args(self, **fields):
        """Server arguments with the flag and what it asks for; changed by ``fields``."""
        settings = {
            "model_path": self.model,
            "attention_backend": "nsa",
            "skip_tokenizer_init": True,
            "enable_decode_nsa_kv_offload": True,
            "disable_radix_cache": True,
            **fields,
        }
        if not torch.cuda.is_available():
            settings.setdefault("device", "cpu")
        return ServerArgs(**settings)

    def refused(self, args, *words):
        """The message with which the arguments are refused, which names the flag and ``words``."""
        with self.assertRaises(ValueError) as caught:
            args.check_server_args()
        for word in (FLAG if CONFIG not in words else CONFIG, *words):
            self.assertIn(word, str(caught.exception))
        return str(caught.exception)


class TestAccepted(FlagTestCase):
    def test_both_dtypes_and_their_backends(self):
        for dtype, backend in (("fp8_e4m3", "flashmla_kv"), ("bfloat16", "flashmla_sparse")):
            with self.subTest(dtype):
                args = self.server_args(kv_cache_dtype=dtype)
                args.check_server_args()
                self.assertEqual(args.nsa_prefill_backend, backend)
                self.assertEqual(args.nsa_decode_backend, backend)

    def test_decode_node_keeps_its_own_cache_setting(self):
        args = self.server_args(disaggregation_mode="decode", disable_radix_cache=False)
        hook.validate_nsa_kv_offload(args)

    def test_speculation_by_the_checkpoint_s_own_layer(self):
        model = self.write_model("nextn", {**MODEL, "num_nextn_predict_layers": 1})
        for algorithm in ("EAGLE", "NEXTN"):
            fields = {**SPECULATION, "speculative_algorithm": algorithm, "model_path": model}
            args = self.server_args(**fields, kv_cache_dtype="fp8_e4m3")
            args.check_server_args()
            self.assertEqual(NSAKVOffloadConfig.from_server_args(args).window_size, 4 * TOP_K)
            args.decode_nsa_kv_offload_config = json.dumps({"window_size": 3 * TOP_K})
            self.refused(args, CONFIG, "window_size=192", "at least 256", "each of the 4 tokens")
            with envs.SGLANG_ENABLE_OVERLAP_PLAN_STREAM.override(True):
                self.refused(args, "SGLANG_ENABLE_OVERLAP_PLAN_STREAM=0")

    def test_command_line(self):
        argv = ["--model-path", self.model, "--attention-backend", "nsa", "--skip-tokenizer-init"]
        argv += ["--disable-radix-cache", FLAG, CONFIG, '{"window_size": 192}']
        argv += [] if torch.cuda.is_available() else ["--device", "cpu"]
        args = prepare_server_args(argv)
        self.assertTrue(args.enable_decode_nsa_kv_offload)
        self.assertEqual(NSAKVOffloadConfig.from_server_args(args).window_size, 192)


class TestOff(FlagTestCase):
    def test_defaults_of_the_two_arguments(self):
        args = self.server_args(enable_decode_nsa_kv_offload=False)
        self.assertFalse(args.enable_decode_nsa_kv_offload)
        self.assertIsNone(args.decode_nsa_kv_offload_config)

    def test_every_other_argument_as_without_the_feature(self):
        """The hooks do nothing with the flag off: the same arguments with and without them."""
        for extra in ({}, {"kv_cache_dtype": "bfloat16"}, {"nsa_decode_backend": "fa3"}):
            fields = {"enable_decode_nsa_kv_offload": False, "random_seed": 1, **extra}
            with_hooks = self.server_args(**fields)
            with_hooks.check_server_args()
            module = "sglang.srt.server_args"
            with (
                mock.patch(f"{module}.apply_nsa_kv_offload_defaults"),
                mock.patch(f"{module}.validate_nsa_kv_offload"),
            ):
                without = self.server_args(**fields)
                without.check_server_args()
            volatile = ("port", "nccl_port", "dist_init_addr")
            for field in dataclasses.fields(ServerArgs):
                if field.name not in volatile:
                    self.assertEqual(
                        getattr(with_hooks, field.name), getattr(without, field.name), field.name
                    )

    def test_conflicting_settings_stay_legal(self):
        args = self.server_args(enable_decode_nsa_kv_offload=False)
        for fields in CONFLICTING.values():
            hook.validate_nsa_kv_offload(changed(args, fields))

    def test_configuration_without_the_flag(self):
        args = self.server_args(
            enable_decode_nsa_kv_offload=False, decode_nsa_kv_offload_config="{}"
        )
        self.refused(args, CONFIG, FLAG, "pass both")


class TestConflicts(FlagTestCase):
    def test_table_is_covered(self):
        self.assertEqual({c.setting for c in hook.CONFLICTS}, set(CONFLICTING))

    def test_each(self):
        args = self.server_args()
        args.check_server_args()
        for conflict in hook.CONFLICTS:
            with self.subTest(conflict.setting):
                self.assertFalse(conflict.holds(args))
                with self.assertRaises(ValueError) as caught:
                    hook.validate_nsa_kv_offload(changed(args, CONFLICTING[conflict.setting]))
                text = str(caught.exception)
                for word in (FLAG, conflict.setting, conflict.reason, conflict.recipe):
                    self.assertIn(word, text)

    def test_settings_that_sglang_itself_accepts_are_refused_at_start(self):
        """The same by the way a server takes: construct, then check."""
        for setting in (
            "--enable-hisparse",
            "--enable-hierarchical-cache",
            "the radix cache (on by default)",
            "--enable-mixed-chunk",
            "--enable-streaming-session",
        ):
            with self.subTest(setting):
                fields = dict(CONFLICTING[setting])
                if setting == "--enable-hierarchical-cache":
                    fields["disable_radix_cache"] = False
                try:
                    args = self.server_args(**fields)
                    args.check_server_args()
                except ValueError as error:
                    self.assertIn(setting.split(" (")[0], str(error))
                else:
                    self.fail("not refused")


class TestModelAndBackends(FlagTestCase):
    def test_model_without_sparse_attention(self):
        config = {k: v for k, v in MODEL.items() if not k.startswith("index_")}
        config.update(architectures=["DeepseekV3ForCausalLM"], model_type="deepseek_v3")
        args = changed(
            self.server_args(), {"model_path": self.write_model("dense", config)}
        )
        args.__dict__.pop("model_config", None)  # cached
        self.refused(args, "DeepseekV3ForCausalLM", args.model_path, "sparse attention")

    def test_backends_of_the_other_layout(self):
        for phase in ("prefill", "decode"):
            for backend in ("fa3", "tilelang", "trtllm", "flashmla_sparse"):
                with self.subTest(phase=phase, backend=backend):
                    args = self.server_args(kv_cache_dtype="fp8_e4m3")
                    setattr(args, f"nsa_{phase}_backend", backend)
                    self.refused(args, f"--nsa-{phase}-backend", "flashmla_kv", backend)

    def test_fp8_backend_on_bf16_rows(self):
        args = self.server_args(kv_cache_dtype="bfloat16", nsa_decode_backend="flashmla_kv")
        self.refused(args, "--nsa-decode-backend", "flashmla_sparse", "flashmla_kv", "bfloat16")

    def test_user_backend_is_kept_to_be_refused(self):
        args = self.server_args(kv_cache_dtype="fp8_e4m3", nsa_decode_backend="fa3")
        self.assertEqual(args.nsa_decode_backend, "fa3")
        self.assertEqual(args.nsa_prefill_backend, "flashmla_kv")

    def test_attention_backend(self):
        args = self.server_args()
        args.attention_backend = "fa3"
        self.refused(args, "--attention-backend nsa", "fa3")

    def test_attention_backend_of_one_phase(self):
        args = self.server_args()
        args.decode_attention_backend = "fa3"
        self.refused(args, "--attention-backend nsa", "fa3 for decode")

    def test_kv_dtype(self):
        args = self.server_args()
        args.kv_cache_dtype = "fp8_e5m2"
        self.refused(args, "--kv-cache-dtype", "fp8_e5m2")

    def test_unfused_topk(self):
        with envs.SGLANG_NSA_FUSE_TOPK.override(False):
            self.refused(self.server_args(), "SGLANG_NSA_FUSE_TOPK=1")


class TestConfig(FlagTestCase):
    FAULTS = {
        "{window_size: 64}": ("not JSON",),
        "[64]": ("not a JSON object",),
        "null": ("not a JSON object",),
        '{"window": 64}': ("'window'", "window_size", "host_ratio"),
        '{"window_size": 0}': ("window_size=0", "above 0"),
        '{"window_size": -64}': ("window_size=-64", "above 0"),
        '{"window_size": 64.0}': ("window_size=64.0", "integer"),
        '{"window_size": true}': ("window_size=True", "integer"),
        '{"window_size": "64"}': ("window_size='64'", "integer"),
        '{"window_size": null}': ("window_size=None", "integer"),
        '{"window_size": 32}': ("window_size=32", "under 64", "the model's top-k;"),
        '{"window_size": 100}': ("window_size=100", "multiple of 64", "128"),
        '{"window_size": 32768}': ("32832", "32768", "16-bit"),
        '{"write_back_ring": 32}': ("write_back_ring=32", "under 64"),
        '{"write_back_ring": 65}': ("write_back_ring=65", "multiple of 64", "128"),
        '{"write_back_ring": 1.5}': ("write_back_ring=1.5", "integer"),
        '{"host_size_gb": 0}': ("host_size_gb=0", "above 0"),
        '{"retract_size_gb": -1}': ("retract_size_gb=-1", "0, or a finite number above 0"),
        '{"retract_size_gb": "0"}': ("retract_size_gb='0'", "0, or a finite number"),
        '{"host_size_gb": -1}': ("host_size_gb=-1", "above 0"),
        '{"host_size_gb": "1"}': ("host_size_gb='1'", "number"),
        '{"host_size_gb": NaN}': ("host_size_gb=nan", "number"),
        '{"host_size_gb": Infinity}': ("host_size_gb=inf", "finite number"),
        '{"host_memory": "pined"}': ("host_memory='pined'", "'managed'", "'pinned'"),
        '{"host_memory": 1}': ("host_memory=1", "'managed'"),
        '{"host_ratio": 0}': ("host_ratio=0", "above 0"),
        '{"host_ratio": 0.5, "host_size_gb": 9}': ("host_size_gb=9", "host_ratio=0.5", "one of them"),
        '{"host_ratio": 1.01}': ("host_ratio=1.01", "at most 1.0"),
        '{"host_ratio": false}': ("host_ratio=False", "number"),
    }

    def test_each_fault(self):
        args = self.server_args()
        for text, words in self.FAULTS.items():
            with self.subTest(text):
                args.decode_nsa_kv_offload_config = text
                self.refused(args, CONFIG, *words)

    def test_defaults(self):
        for text in (None, "{}", '{"host_size_gb": null, "host_ratio": null}'):
            config = NSAKVOffloadConfig.from_json(text, TOP_K)
            self.assertEqual(config, NSAKVOffloadConfig(2 * TOP_K, 64, None, 1.0))
            self.assertEqual(config.window_slots, 2 * TOP_K + 64)

    def test_all_keys(self):
        values = {"window_size": 192, "write_back_ring": 128, "retract_size_gb": 0, "host_memory": "pinned"}
        for size, other in (({"host_size_gb": 0.5}, {"host_ratio": 1.0}), ({"host_ratio": 0.25}, {"host_size_gb": None})):
            config = NSAKVOffloadConfig.from_json(json.dumps({**values, **size}), TOP_K)
            self.assertEqual(dataclasses.asdict(config), {**values, **size, **other})
        with self.assertRaises(dataclasses.FrozenInstanceError):
            config.window_size = 64

    def test_memory_that_a_network_card_does_not_take(self):
        """Pinned memory where a transfer engine registers the pool, and nothing else may be asked for."""
        managed, pinned = '{"host_memory": "managed"}', '{"host_memory": "pinned"}'
        decode_node = {"disaggregation_mode": "decode"}
        for backend in ("mooncake", "nixl", "fake", None):
            fields = {**decode_node, "disaggregation_transfer_backend": backend} if backend else {}
            with self.subTest(backend=backend):
                args = self.server_args(decode_nsa_kv_offload_config=managed, **fields)
                self.assertEqual(registers_host_memory(args), backend in ("mooncake", "nixl"))
                if registers_host_memory(args):
                    self.refused(args, CONFIG, "host_memory='managed'", f"backend {backend}", "'pinned'")
                else:
                    hook.validate_nsa_kv_offload(args)
                args.decode_nsa_kv_offload_config = pinned
                hook.validate_nsa_kv_offload(args)

    def test_largest_window(self):
        text = '{"window_size": 32704}'
        self.assertEqual(NSAKVOffloadConfig.from_json(text, TOP_K).window_slots, 1 << 15)
        # DeepSeek-V3.2's top-k, all query tokens that are allowed, the largest window.
        NSAKVOffloadConfig.from_json(text, 2048, hook.MAX_SPECULATIVE_STEPS + 1)
        with self.assertRaisesRegex(ValueError, "window_size=24576 and a top-k of 4096 for 5 tokens a step need"):
            NSAKVOffloadConfig.from_json('{"window_size": 24576}', 4096, 5)


if __name__ == "__main__":
    unittest.main()
