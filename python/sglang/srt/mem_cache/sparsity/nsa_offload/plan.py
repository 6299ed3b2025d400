"""What fits, with and without decode KV offloading: asked before a server is started.

    python -m sglang.srt.mem_cache.sparsity.nsa_offload.plan --context 32768 131072 \\
        --gpu-memory-gib 139 --mem-fraction-static 0.85 --weights-gib 81

Device bytes come from the configurator that sizes a server's pools, not from a copy of it.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Optional

import torch

from sglang.srt.arg_groups.nsa_kv_offload_hook import MAX_SPECULATIVE_STEPS
from sglang.srt.configs.model_config import is_deepseek_nsa
from sglang.srt.mem_cache.sparsity.nsa_offload.config import parse_object
from sglang.srt.mem_cache.sparsity.nsa_offload.host_pool import (
    HOST_RESERVE_BYTES,
    NSAKVOnlyTokenToKVPoolHost,
)
from sglang.srt.mem_cache.sparsity.nsa_offload.plan_report import launch_command, table
from sglang.srt.mem_cache.sparsity.nsa_offload.retraction import pool_bytes_beside
from sglang.srt.mem_cache.sparsity.nsa_offload.sizing import (
    DEVICE_MEMORY,
    INDEX_KEY_BYTES,
    NSAOffloadPoolConfigurator,
    OffloadSizes,
)
from sglang.srt.model_executor.model_runner_kv_cache_mixin import ModelRunnerKVCacheMixin

PAGE = 64
GIB = 1 << 30
DTYPES = {"fp8_e4m3": torch.float8_e4m3fn, "bfloat16": torch.bfloat16}
DEEPSEEK_V32_ID = "deepseek-ai/DeepSeek-V3.2"
# What is read of its config.json.
DEEPSEEK_V32 = {
    "architectures": ["DeepseekV32ForCausalLM"],
    "num_hidden_layers": 61,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "index_topk": 2048,
}


@dataclass(frozen=True)
class Question:
    """A rank's memory and what it shall serve.

    Attributes:
        model: the keys of ``DEEPSEEK_V32``.
        kv_cache_dtype: a key of ``DTYPES``.
        kv_bytes: device bytes for KV.
        context: tokens of each request, and the server's context length.
        batch: requests at once; None for as many as fit, with the flag 256 at most.
        config: JSON of ``--decode-nsa-kv-offload-config``, or None.
        ranks: ranks of the one host; each takes its own host pool.
        data_ranks: of them with DP attention, each with requests of its own; 1 without.
        host_bytes: memory of the host; None where it does not limit.
        decode_node: no prompt is prefilled here, so nothing is staged.
        chunked_prefill_size: tokens.
        speculative_steps: draft tokens a request and step; 0 without speculation.
    """

    model: dict[str, Any]
    kv_cache_dtype: str
    kv_bytes: int
    context: int
    batch: Optional[int] = None
    config: Optional[str] = None
    ranks: int = 8
    data_ranks: int = 1
    host_bytes: Optional[int] = None
    decode_node: bool = True
    chunked_prefill_size: int = 8192
    speculative_steps: int = 0

    @property
    def context_slots(self) -> int:
        """Slots of one request: whole pages."""
        return -(-self.context // PAGE) * PAGE

    @property
    def host_share(self) -> float:
        """Host bytes that one rank may take."""
        if self.host_bytes is None:
            return float("inf")
        return (self.host_bytes - HOST_RESERVE_BYTES) / self.ranks


@dataclass(frozen=True)
class Side:
    """One rank's answer with the flag off or on.

    Attributes:
        requests: of the full context, as many as fit on a rank.
        fits: whether the batch asked for does; True where none was.
        request_bytes: device bytes of one request.
        device_bytes: of the batch asked for, or of as many as fit.
        host_bytes: of their rows; 0 with the flag off.
        retraction_bytes: host bytes for retracted requests beside them; 0 where none are saved.
    """

    requests: int
    fits: bool
    request_bytes: int
    device_bytes: int
    host_bytes: int
    retraction_bytes: int = 0


@dataclass(frozen=True)
class Answer:
    """Both sides, and the sizes behind the second; ``sizes`` counts its windows.

    Attributes:
        slot_limit: what limits the slots with the flag on, as ``NSAOffloadPoolConfigurator`` says.
    """

    question: Question
    off: Side
    on: Side
    sizes: OffloadSizes
    slot_limit: str = DEVICE_MEMORY


def answer(question: Question) -> Answer:
    """Size both.

    Raises:
        ValueError: the model has no sparse attention, the configuration is not legal, or not
            one request fits.
    """
    configurator = NSAOffloadPoolConfigurator(_runner(question))
    slots = configurator.fit_slots(question.kv_bytes)
    sizes = configurator.sizes
    fit = min(sizes.num_windows - 1, slots // question.context_slots)
    count = question.batch or fit
    used = count * question.context_slots
    served = replace(sizes, num_windows=count + 1)
    device_bytes = served.device_bytes(used)
    host_bytes = NSAKVOnlyTokenToKVPoolHost.rows_for(used, PAGE) * sizes.host_bytes_per_token
    retraction = configurator.retraction_bytes(used, host_bytes)
    on = Side(
        requests=fit,
        fits=device_bytes <= question.kv_bytes and host_bytes + retraction <= question.host_share,
        request_bytes=int(
            sizes.window_bytes + question.context_slots * sizes.bytes_per_token
        ),
        device_bytes=device_bytes,
        host_bytes=host_bytes,
        retraction_bytes=retraction,
    )
    return Answer(question, _dense(question, sizes), on, served, configurator.slot_limit)


def _dense(question: Question, sizes: OffloadSizes) -> Side:
    """Without offloading every token's latent row and index key lie on the device."""
    layers = sizes.num_layers + sizes.draft_layers
    token_bytes = (sizes.row_bytes + INDEX_KEY_BYTES) * layers
    padding = PAGE * token_bytes
    request_bytes = question.context_slots * token_bytes
    fit = max(0, (question.kv_bytes - padding) // request_bytes)
    count = question.batch or fit
    return Side(fit, count <= fit, request_bytes, count * request_bytes + padding, 0)


def _runner(question: Question) -> SimpleNamespace:
    """What the configurator reads of a model runner."""
    hf_config = SimpleNamespace(**question.model)
    if not is_deepseek_nsa(hf_config):
        raise ValueError(
            f"{question.model.get('architectures')} has no DeepSeek sparse attention "
            "(index_topk)."
        )
    model_config = SimpleNamespace(
        hf_config=hf_config,
        context_len=question.context,
        kv_lora_rank=hf_config.kv_lora_rank,
        qk_rope_head_dim=hf_config.qk_rope_head_dim,
    )
    args = SimpleNamespace(
        decode_nsa_kv_offload_config=_config(question),
        get_model_config=lambda: model_config,
        tp_size=question.ranks,
        nnodes=1,
        dp_size=question.data_ranks,
        enable_dp_attention=question.data_ranks > 1,
        disaggregation_mode="decode" if question.decode_node else "null",
        chunked_prefill_size=question.chunked_prefill_size,
        max_prefill_tokens=question.context,
        max_total_tokens=None,
        max_running_requests=None,
        nsa_prefill_backend=None,
        nsa_decode_backend=None,
        speculative_algorithm=None,
        speculative_num_draft_tokens=None,
    )
    if question.speculative_steps:
        args.speculative_algorithm = "EAGLE"
        args.speculative_num_draft_tokens = question.speculative_steps + 1
    runner = SimpleNamespace(
        server_args=args,
        page_size=PAGE,
        model_config=model_config,
        num_effective_layers=hf_config.num_hidden_layers,
        kv_cache_dtype=DTYPES[question.kv_cache_dtype],
    )
    runner.calculate_mla_kv_cache_dim = (
        lambda: ModelRunnerKVCacheMixin.calculate_mla_kv_cache_dim(runner)
    )
    return runner


def _config(question: Question) -> Optional[str]:
    """The configuration, with the host's memory as the limit where it names none."""
    if question.host_bytes is None:
        return question.config
    if question.host_share <= 0:
        raise ValueError(
            f"--host-memory-gib {question.host_bytes / GIB:g} leaves nothing beside the "
            f"{HOST_RESERVE_BYTES / GIB:g} GiB that a server leaves free; give more."
        )
    config = parse_object(question.config)
    if "host_size_gb" in config:
        return question.config
    share = question.host_share
    if question.decode_node:
        sizes = NSAOffloadPoolConfigurator(_runner(replace(question, host_bytes=None))).sizes
        request = sizes.saved_bytes(question.context)
        share = pool_bytes_beside(share, config.get("retract_size_gb"), request)
    if share <= 0:
        raise ValueError(
            f"--host-memory-gib {question.host_bytes / GIB:g}: what a rank may take, "
            f"{question.host_share / 1e9:.2f} GB, goes to its retracted requests; give more, or "
            "lower retract_size_gb in --config."
        )
    return json.dumps({"host_size_gb": share / 1e9, **config})


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="plan", description="What fits with and without --enable-decode-nsa-kv-offload."
    )
    add = parser.add_argument
    add("--model", help="config.json or its folder; default: DeepSeek-V3.2")
    add("--kv-cache-dtype", choices=DTYPES, default="fp8_e4m3")
    add("--tp-size", type=_count, default=8, help="ranks, all of one host")
    add("--dp-attention", action="store_true", help="and with --dp-size ranks of their own requests")
    add("--dp-size", type=_count, help="with --dp-attention; default: --tp-size")
    add("--dp-weights-gib", type=float, help="as --weights-gib, with DP attention: it repeats attention")
    add("--dp-kv-memory-gib", type=float, help="as --kv-memory-gib, with DP attention")
    add("--context", type=_count, nargs="+", default=[32768, 131072], help="prompt and answer")
    add("--batch", type=_count, help="requests at once; default: as many as fit")
    add("--kv-memory-gib", type=float, help="device memory for KV; else the next three")
    add("--gpu-memory-gib", type=float, help="of one GPU")
    add("--mem-fraction-static", type=_fraction, default=0.85, help="as given to the server")
    add("--weights-gib", type=float, help="on one GPU: 'mem usage' in the server's log")
    add("--host-memory-gib", type=float, help="of one host; default: no limit")
    add("--config", help="as given to --decode-nsa-kv-offload-config")
    add(
        "--speculative-num-steps",
        type=int,
        default=0,
        choices=range(MAX_SPECULATIVE_STEPS + 1),
        help="with multi-token prediction",
    )
    add("--colocated", action="store_true", help="a server that prefills too")
    add("--chunked-prefill-size", type=int, default=8192)
    return parser


def main(argv: Optional[list[str]] = None) -> int:
    """Print a table for each context. Returns the exit status; errors end the program."""
    parser = _parser()
    args = parser.parse_args(argv)
    memory = [_kv_memory(parser, args, "")]
    ranks = [1]
    if args.dp_attention:
        memory.append(_kv_memory(parser, args, "dp-"))
        ranks.append(args.dp_size or args.tp_size)
        if args.tp_size % ranks[1] or ranks[1] == 1:
            parser.error(f"--dp-size {ranks[1]} is not above 1 and a divisor of --tp-size {args.tp_size}")
    try:
        model = _model(args.model)
        answers = [
            [
                answer(
                    Question(
                        model=model,
                        kv_cache_dtype=args.kv_cache_dtype,
                        kv_bytes=int(kv_gib * GIB),
                        context=context,
                        batch=args.batch,
                        config=args.config,
                        ranks=args.tp_size,
                        data_ranks=data_ranks,
                        host_bytes=_bytes(args.host_memory_gib),
                        decode_node=not args.colocated,
                        chunked_prefill_size=args.chunked_prefill_size,
                        speculative_steps=args.speculative_num_steps,
                    )
                )
                for (kv_gib, _), data_ranks in zip(memory, ranks)
            ]
            for context in args.context
        ]
    except (OSError, ValueError, KeyError) as error:
        parser.error(str(error))
    kinds = [f"TP {args.tp_size}"] + [f"DP attention {ranks[-1]}"] * args.dp_attention
    print(
        f"{args.model or 'DeepSeek-V3.2'}, {args.kv_cache_dtype}, "
        f"{'colocated' if args.colocated else 'decode node'}, {' and '.join(kinds)}"
        f"{_speculation(args.speculative_num_steps)}; "
        + ", ".join(f"for KV {kv_gib:.2f} GiB a GPU ({how})" for kv_gib, how in memory)
    )
    for each in answers:
        print(f"\n{table(each)}")
        print(f"\n{launch_command(each[-1], args.model or DEEPSEEK_V32_ID)}")
    return 0


def _kv_memory(parser, args, prefix: str) -> tuple[float, str]:
    """GiB for KV on a GPU, and how they were found, from the options with a prefix."""
    given, weights = (
        getattr(args, prefix.replace("-", "_") + name) for name in ("kv_memory_gib", "weights_gib")
    )
    if given is not None:
        kv_gib, how = given, "given"
    elif args.gpu_memory_gib is not None and weights is not None:
        kv_gib = args.gpu_memory_gib * args.mem_fraction_static - weights
        how = f"{args.gpu_memory_gib:g} x {args.mem_fraction_static:g} - {weights:g}"
    else:
        parser.error(f"give --{prefix}kv-memory-gib, or --gpu-memory-gib and --{prefix}weights-gib")
    if kv_gib <= 0:
        parser.error(
            f"{kv_gib:.2f} GiB are left for KV ({how}); check --{prefix}kv-memory-gib, or "
            f"--gpu-memory-gib, --mem-fraction-static and --{prefix}weights-gib"
        )
    return kv_gib, how


def _count(text: str) -> int:
    value = int(text)
    if value <= 0:
        raise argparse.ArgumentTypeError(f"{value} is not above 0")
    return value


def _speculation(steps: int) -> str:
    return f", --speculative-num-steps {steps}" if steps else ""


def _fraction(text: str) -> float:
    value = float(text)
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 1, such as 0.85")
    return value


def _model(name: Optional[str]) -> dict[str, Any]:
    path = Path(name or DEEPSEEK_V32_ID)
    if not path.exists():
        if str(path) == DEEPSEEK_V32_ID:
            return DEEPSEEK_V32
        raise ValueError(
            f"--model {name} is no file or folder here; give a config.json or its folder, or leave "
            f"it out for {DEEPSEEK_V32_ID}."
        )
    file = path / "config.json" if path.is_dir() else path
    try:
        found = json.loads(file.read_text())
        missing = [key for key in DEEPSEEK_V32 if key not in found]
    except (ValueError, TypeError) as error:
        raise ValueError(f"--model {name}: {file} is no JSON object ({error}).") from error
    if missing:
        raise ValueError(f"--model {name} lacks {missing}: no model with DeepSeek sparse attention.")
    return {key: found[key] for key in DEEPSEEK_V32}


def _bytes(gib: Optional[float]) -> Optional[int]:
    return None if gib is None else int(gib * GIB)


if __name__ == "__main__":
    raise SystemExit(main())
