"""The sizing command: its answers are the configurator's, and they are the largest that fit."""

import argparse
import contextlib
import dataclasses
import io
import json
import shlex
import tempfile
import unittest
from pathlib import Path
from unittest import mock

import nsa_offload_tools  # noqa: F401  (first: chooses the device)

from sglang.srt.arg_groups import nsa_kv_offload_hook as hook
from sglang.srt.mem_cache.sparsity.nsa_offload import plan
from sglang.srt.mem_cache.sparsity.nsa_offload.config import NSAKVOffloadConfig
from sglang.srt.mem_cache.sparsity.nsa_offload.sizing import OffloadSizes
from sglang.srt.server_args import ServerArgs
from sglang.test.test_utils import CustomTestCase

KV_BYTES = int(38e9)


def ask(**more):
    question = plan.Question(plan.DEEPSEEK_V32, "fp8_e4m3", KV_BYTES, 32768)
    return plan.answer(dataclasses.replace(question, **more))


def run(*argv):
    """Exit status and all that is printed."""
    out, status = io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        try:
            plan.main(list(argv))
        except SystemExit as error:
            status = error.code
    return status, out.getvalue()


class TestAnswer(CustomTestCase):
    def test_as_many_as_fit_and_no_more(self):
        for dtype in plan.DTYPES:
            for context in (5000, 32768, 131072):
                for node in (True, False):
                    with self.subTest(dtype=dtype, context=context, decode_node=node):
                        asked = {"kv_cache_dtype": dtype, "context": context, "decode_node": node}
                        fit = ask(**asked)
                        for side in (fit.off, fit.on):
                            self.assertTrue(side.fits)
                            self.assertLessEqual(side.device_bytes, KV_BYTES)
                        more = ask(**asked, batch=fit.on.requests + 2)
                        if fit.on.requests < 256:  # the most a server derives
                            self.assertFalse(more.on.fits)
                        self.assertTrue(ask(**asked, batch=fit.on.requests).on.fits)
                        self.assertTrue(ask(**asked, batch=fit.off.requests).off.fits)
                        self.assertFalse(ask(**asked, batch=fit.off.requests + 1).off.fits)

    def test_bytes_of_deepseek(self):
        fit = ask()
        count = fit.on.requests
        self.assertEqual(fit.off.request_bytes, 61 * 788 * 32768)
        self.assertEqual(fit.on.host_bytes, 61 * 656 * (count * 32768 + 64))
        # The formula of docs/design.md, by hand.
        window = 61 * 656 * 4160 + 61 * 6 * 4096 + 4 + 20 * 2048
        self.assertEqual(fit.on.request_bytes, window + 32768 * 61 * 132 + 32768 // 16 * 67)
        tokens = count * 32768
        self.assertEqual(
            fit.on.device_bytes,
            61 * 656 * 64 + (count + 1) * window + 61 * 132 * (tokens + 64) + tokens // 16 * 67,
        )
        self.assertEqual(ask(kv_cache_dtype="bfloat16").sizes.row_bytes, 1152)

    def test_the_formula_is_not_a_copy(self):
        before = ask().on
        with mock.patch.object(OffloadSizes, "window_bytes", property(lambda s: 10**9)):
            after = ask().on
        self.assertEqual(after.requests, int(KV_BYTES / 1e9 / (1 + 32768 * 61 * 132 / 1e9)) - 1)
        self.assertLess(after.requests, before.requests)

    def test_host_memory_limits(self):
        free, limited = ask(), ask(host_bytes=plan.HOST_RESERVE_BYTES + 8 * int(40e9))
        self.assertEqual(limited.on.requests, int(40e9 / 1.05 / (61 * 656 * 32768)))
        self.assertLess(limited.on.requests, free.on.requests)
        self.assertEqual(limited.off.requests, free.off.requests)
        self.assertLessEqual(limited.on.host_bytes, 40e9)
        # Retracted requests have a part of it.
        share = {"host_bytes": plan.HOST_RESERVE_BYTES + 8 * int(40e9)}
        self.assertEqual(limited.on.retraction_bytes, int(limited.on.host_bytes * 0.05))
        for context, config in ((32768, None), (131072, None), (32768, '{"retract_size_gb": 20}')):
            fit = ask(**share, context=context, config=config)
            took = fit.on.host_bytes + fit.on.retraction_bytes
            self.assertLessEqual(took, 40e9)
            self.assertGreater(took + 1.05 * 61 * 656 * context, 40e9)
            self.assertTrue(fit.on.fits)
            self.assertGreaterEqual(fit.on.retraction_bytes, 61 * 788 * context)
        self.assertEqual(ask(decode_node=False).on.retraction_bytes, 0)
        self.assertEqual(ask(config='{"retract_size_gb": 0}').on.retraction_bytes, 0)
        # What fits on the device alone is no answer.
        asked = {"batch": free.on.requests, "host_bytes": plan.HOST_RESERVE_BYTES + int(320e9)}
        self.assertFalse(ask(**asked).on.fits)

    def test_configuration_is_heard(self):
        small = ask(config='{"window_size": 2048}')
        self.assertEqual(small.sizes.lru_slots, 2048)
        self.assertGreater(small.on.requests, ask().on.requests)
        half = ask(config='{"host_ratio": 0.5}')
        self.assertAlmostEqual(half.on.requests, ask().on.requests / 2, delta=1)

    def test_speculation(self):
        """Larger windows, and a layer more of resident rows on both sides."""
        fit, plain = ask(speculative_steps=4), ask()
        self.assertEqual((fit.sizes.lru_slots, fit.sizes.queries), (5 * 2048, 5))
        self.assertEqual(fit.off.request_bytes, 62 * 788 * 32768)
        for answer in (fit, plain):
            resident = answer.on.request_bytes - answer.sizes.window_bytes
            self.assertAlmostEqual(
                resident / 32768, 61 * 132 + 788 * answer.sizes.draft_layers, delta=5
            )
        self.assertLess(fit.on.requests, plain.on.requests)
        self.assertEqual(fit.on.host_bytes, 61 * 656 * (fit.on.requests * 32768 + 64))

    def test_a_colocated_server_stages_a_prompt(self):
        fit = ask(decode_node=False)
        self.assertGreaterEqual(fit.sizes.staging_slots, 32768 + 8192)
        self.assertLess(fit.on.requests, ask().on.requests)


class TestCommand(CustomTestCase):
    def test_tables(self):
        status, text = run("--kv-memory-gib", "38", "--batch", "64", "--tp-size", "4")
        self.assertEqual(status, 0)
        for words in ("DeepSeek-V3.2, fp8_e4m3, decode node, TP 4; for KV 38.00 GiB a GPU",
                      "context 32,768", "context 131,072", "64 fit", "host bytes, 4 ranks"):
            self.assertIn(words, text)
        fit = ask(kv_bytes=38 << 30, ranks=4)
        line = next(x for x in text.splitlines() if x.startswith("requests that fit"))
        self.assertEqual(line.split()[-2:], [str(fit.off.requests), str(fit.on.requests)])
        rank, retracted, ranks = (
            float(next(x for x in text.splitlines() if x.startswith(name)).split()[-2].replace(",", ""))
            for name in ("host bytes a rank", "for retracted requests", "host bytes, 4 ranks")
        )
        self.assertGreater(retracted, 0)
        self.assertAlmostEqual(ranks, 4 * (rank + retracted), delta=0.05)

    def test_one_rank_and_wide_numbers(self):
        _, text = run("--kv-memory-gib", "38", "--tp-size", "1", "--batch", "5000", "--context", "131072")
        line = next(x for x in text.splitlines() if x.startswith("host bytes, 1 rank "))
        self.assertEqual(line.split()[-3], "-")
        self.assertGreater(float(line.split()[-2].replace(",", "")), 26000)

    def test_limits_are_said(self):
        _, text = run("--kv-memory-gib", "380", "--context", "4096")
        self.assertIn("more than 256 requests a rank gain nothing", text)
        _, text = run("--kv-memory-gib", "38", "--host-memory-gib", "300")
        self.assertIn("flag on: host memory is the limit", text)

    def test_dp_attention_beside_tensor_parallelism(self):
        """Less device memory for KV, since attention weights repeat, and requests of each rank's own."""
        command = ("--gpu-memory-gib", "139", "--weights-gib", "81", "--context", "32768")
        status, text = run(*command, "--dp-attention", "--dp-weights-gib", "92")
        self.assertEqual(status, 0)
        rows = {line[:30].strip(): line[30:].split() for line in text.splitlines()}
        tensor = ask(kv_bytes=int((139 * 0.85 - 81) * plan.GIB))
        data = ask(kv_bytes=int((139 * 0.85 - 92) * plan.GIB), data_ranks=8)
        sides = (tensor.off, tensor.on, data.off, data.on)
        self.assertEqual(rows["requests a rank"], [f"{side.requests}" for side in sides])
        counts = [side.requests * n for side, n in zip(sides, (1, 1, 8, 8))]
        self.assertEqual(rows["requests that fit"], [f"{count}" for count in counts])
        self.assertGreater(counts[3], 3 * counts[2])
        self.assertEqual(run(*command, "--dp-attention")[0], 2)
        status, text = run(*command, "--dp-attention", "--dp-weights-gib", "92", "--dp-size", "3")
        self.assertIn("--dp-size 3 is not above 1 and a divisor of --tp-size 8", text)

    def test_launch_command_is_what_a_server_accepts(self):
        for more in ((), ("--colocated",), ("--speculative-num-steps", "2"), ("--dp-attention", "--dp-kv-memory-gib", "26")):
            with self.subTest(more=more):
                _, text = run("--kv-memory-gib", "38", "--context", "32768", *more)
                words = shlex.split(text.splitlines()[-1])
                self.assertEqual(words[:3], ["python", "-m", "sglang.launch_server"])
                parser = argparse.ArgumentParser()
                ServerArgs.add_cli_args(parser)
                with mock.patch.object(ServerArgs, "__post_init__"):
                    args = ServerArgs.from_cli_args(parser.parse_args(words[3:]))
                self.assertTrue(args.enable_decode_nsa_kv_offload)
                # What SGLang itself sets from the model and the machine.
                args.speculative_draft_model_path = args.model_path
                for conflict in hook.CONFLICTS:
                    self.assertFalse(conflict.holds(args), conflict.setting)
                fit = ask(
                    kv_bytes=(26 if args.enable_dp_attention else 38) << 30,
                    data_ranks=args.dp_size,
                    decode_node=args.disaggregation_mode == "decode",
                    speculative_steps=args.speculative_num_steps or 0,
                )
                self.assertEqual(args.max_running_requests, fit.on.requests * args.dp_size)
                config = NSAKVOffloadConfig.from_json(
                    args.decode_nsa_kv_offload_config, 2048, args.speculative_num_draft_tokens or 1
                )
                self.assertAlmostEqual(config.host_size_gb, fit.on.host_bytes / 1e9, delta=0.011)
                self.assertGreaterEqual(config.host_size_gb, fit.on.host_bytes / 1e9)

    def test_speculation_is_named(self):
        _, text = run("--kv-memory-gib", "38", "--speculative-num-steps", "2")
        self.assertIn("TP 8, --speculative-num-steps 2;", text)
        self.assertIn("windows of 6,144 + 64 rows for 3 tokens a step, ", text)

    def test_memory_for_kv(self):
        _, text = run("--gpu-memory-gib", "139", "--mem-fraction-static", "0.85", "--weights-gib", "81")
        self.assertIn("for KV 37.15 GiB a GPU (139 x 0.85 - 81)", text)

    def test_model_by_its_name(self):
        named = run("--model", "deepseek-ai/DeepSeek-V3.2", "--kv-memory-gib", "38")[1]
        self.assertEqual(named.splitlines()[1:], run("--kv-memory-gib", "38")[1].splitlines()[1:])

    def test_model_file(self):
        with tempfile.TemporaryDirectory() as folder:
            config = Path(folder, "config.json")
            config.write_text(json.dumps({**plan.DEEPSEEK_V32, "num_hidden_layers": 3, "more": 1}))
            for path in (folder, str(config)):
                status, text = run("--model", path, "--kv-memory-gib", "1", "--context", "4096")
                self.assertEqual(status, 0, text)
                line = next(x for x in text.splitlines() if x.startswith("device bytes a request"))
                self.assertEqual(line.split()[4], f"{788 * 3 * 4096 / 1e6:.1f}")

    def test_refusals(self):
        with tempfile.TemporaryDirectory() as folder:
            dense = Path(folder, "config.json")
            broken = Path(folder, "broken.json")
            broken.write_text("{")
            dense.write_text('{"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 3}')
            for argv, words in (
                ((), "give --kv-memory-gib"),
                (("--gpu-memory-gib", "139"), "--weights-gib"),
                (("--kv-memory-gib", "0.1"), "are left"),
                (("--kv-memory-gib", "38", "--config", '{"window_size": 100}'), "window_size=100"),
                (("--kv-memory-gib", "38", "--config", "{"), "not JSON"),
                (("--kv-memory-gib", "38", "--model", folder), "no model with DeepSeek sparse"),
                (("--kv-memory-gib", "38", "--model", folder + "/none"), "is no file or folder here; give a config.json"),
                (("--kv-memory-gib", "38", "--model", str(broken)), f"--model {broken}: {broken} is no JSON object"),
                (("--kv-memory-gib", "38", "--mem-fraction-static", "85"), "argument --mem-fraction-static: 85 is not between 0 and 1"),
                (("--kv-memory-gib", "38", "--mem-fraction-static", "1.5"), "1.5 is not between"),
                (("--kv-memory-gib", "38", "--host-memory-gib", "10.001"), "goes to its retracted requests"),
                (("--kv-memory-gib", "38", "--host-memory-gib", "10.001", "--colocated"), "host_size_gb"),
                (("--kv-memory-gib", "38", "--colocated", "--config", '{"retract_size_gb": 1}'), "has no use"),
                (("--kv-memory-gib", "38", "--host-memory-gib", "5"), "--host-memory-gib 5 leaves"),
                (("--kv-memory-gib", "38", "--host-memory-gib", "99", "--config", "[]"), "not a JSON object"),
                (("--kv-memory-gib", "38", "--context", "0"), "argument --context: 0 is not above 0"),
                (("--kv-memory-gib", "38", "--batch", "-3"), "argument --batch: -3 is not above 0"),
                (("--gpu-memory-gib", "79", "--weights-gib", "81"), "-13.85 GiB are left for KV"),
            ):
                with self.subTest(argv=argv):
                    status, text = run(*argv)
                    self.assertEqual(status, 2)
                    self.assertIn(words, text)


if __name__ == "__main__":
    unittest.main()
