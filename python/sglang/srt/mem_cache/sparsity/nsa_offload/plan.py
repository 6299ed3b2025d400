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
from typing import Any, Callable, Optional

import torch

from sglang.srt.arg_groups.nsa_kv_offload_hook import MAX_SPECULATIVE_STEPS
from sglang.srt.configs.model_config import is_deepseek_nsa
from sglang.srt.mem_cache.sparsity.nsa_offload.config import parse_object
from sglang.srt.mem_cache.sparsity.nsa_offload.host_pool import (
    HOST_RESERVE_BYTES,
    NSAKVOnlyTokenToKVPoolHost,
)
from sglang.srt.mem_cache.sparsity.nsa_offload.retraction import pool_bytes_beside
from sglang.srt.mem_cache.sparsity.nsa_offload.sizing import (
    INDEX_KEY_BYTES,
    NSAOffloadPoolConfigurator,
    OffloadSizes,
)
from sglang.srt.model_executor.model_runner_kv_cache_mixin import ModelRunnerKVCacheMixin

PAGE = 64
GIB = 1 << 30
DTYPES = {"fp8_e4m3": torch.float8_e4m3fn, "bfloat16": torch.bfloat16}
# What is read of deepseek-ai/DeepSeek-V3.2's config.json.
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
        ranks: attention TP ranks on the host; each takes its own host pool.
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
        requests: of the full context, as many as fit.
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
    """Both sides, and the sizes behind the second; ``sizes`` counts its windows."""

    question: Question
    off: Side
    on: Side
    sizes: OffloadSizes


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
    return Answer(question, _dense(question, sizes), on, served)


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
        dp_size=1,
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


def report(answer: Answer) -> str:
    """The answer as a table, bytes in powers of ten."""
    question, sizes = answer.question, answer.sizes
    of = f"device bytes of {question.batch}" if question.batch else "device bytes of these"
    rows: list[tuple[str, Callable[[Side], str]]] = [
        ("requests that fit", lambda s: f"{s.requests:,}"),
        ("device bytes a request", lambda s: _size(s.request_bytes)),
        (of, lambda s: _size(s.device_bytes)),
        ("host bytes a rank", lambda s: _size(s.host_bytes)),
        ("for retracted requests", lambda s: _size(s.retraction_bytes)),
        (
            f"host bytes, {question.ranks} ranks",
            lambda s: _size((s.host_bytes + s.retraction_bytes) * question.ranks),
        ),
    ]
    if question.batch:
        rows.insert(1, (f"{question.batch} fit", lambda s: _yes(s.fits)))
    lines = [f"{f'context {question.context:,}':<30}{'flag off':>12}{'flag on':>12}"]
    lines += [f"{name:<30}{cell(answer.off):>12}{cell(answer.on):>12}" for name, cell in rows]
    lines.append(
        f"windows of {sizes.lru_slots:,} + {sizes.ring_slots} rows"
        f"{_of_queries(sizes)}, {_size(sizes.window_bytes)} each; staging of {sizes.staging_slots:,} rows"
    )
    if sizes.queries > 1:
        lines.append(f"pass --max-running-requests {sizes.num_windows - 1}: SGLang's default is 48")
    return "\n".join(lines)


def _of_queries(sizes: OffloadSizes) -> str:
    if sizes.queries == 1:
        return ""
    return f" for {sizes.queries} tokens a step"


def _size(count: int) -> str:
    if not count:
        return "-"
    return f"{count / 1e9:,.2f} GB" if count >= 1e9 else f"{count / 1e6:,.1f} MB"


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="plan", description="What fits with and without --enable-decode-nsa-kv-offload."
    )
    add = parser.add_argument
    add("--model", type=Path, help="config.json or its folder; default: DeepSeek-V3.2")
    add("--kv-cache-dtype", choices=DTYPES, default="fp8_e4m3")
    add("--tp-size", type=_count, default=8, help="attention TP ranks on one host")
    add("--context", type=_count, nargs="+", default=[32768, 131072], help="prompt and answer")
    add("--batch", type=_count, help="requests at once; default: as many as fit")
    add("--kv-memory-gib", type=float, help="device memory for KV; else the next three")
    add("--gpu-memory-gib", type=float, help="of one GPU")
    add("--mem-fraction-static", type=float, default=0.85, help="as given to the server")
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
    if args.kv_memory_gib is not None:
        kv_gib, how = args.kv_memory_gib, "given"
    elif args.gpu_memory_gib is not None and args.weights_gib is not None:
        kv_gib = args.gpu_memory_gib * args.mem_fraction_static - args.weights_gib
        how = f"{args.gpu_memory_gib:g} x {args.mem_fraction_static:g} - {args.weights_gib:g}"
    else:
        parser.error("give --kv-memory-gib, or --gpu-memory-gib and --weights-gib")
    if kv_gib <= 0:
        parser.error(
            f"{kv_gib:.2f} GiB are left for KV ({how}); check --kv-memory-gib, or --gpu-memory-gib, "
            "--mem-fraction-static and --weights-gib"
        )
    try:
        model = _model(args.model)
        answers = [
            answer(
                Question(
                    model=model,
                    kv_cache_dtype=args.kv_cache_dtype,
                    kv_bytes=int(kv_gib * GIB),
                    context=context,
                    batch=args.batch,
                    config=args.config,
                    ranks=args.tp_size,
                    host_bytes=_bytes(args.host_memory_gib),
                    decode_node=not args.colocated,
                    chunked_prefill_size=args.chunked_prefill_size,
                    speculative_steps=args.speculative_num_steps,
                )
            )
            for context in args.context
        ]
    except (OSError, ValueError, KeyError) as error:
        parser.error(str(error))
    print(
        f"{args.model or 'DeepSeek-V3.2'}, {args.kv_cache_dtype}, "
        f"{'colocated' if args.colocated else 'decode node'}, TP {args.tp_size}"
        f"{_speculation(args.speculative_num_steps)}; "
        f"for KV {kv_gib:.2f} GiB a GPU ({how})"
    )
    for each in answers:
        print(f"\n{report(each)}")
    return 0


def _count(text: str) -> int:
    value = int(text)
    if value <= 0:
        raise argparse.ArgumentTypeError(f"{value} is not above 0")
    return value


def _speculation(steps: int) -> str:
    return f", --speculative-num-steps {steps}" if steps else ""


def _model(path: Optional[Path]) -> dict[str, Any]:
    if path is None:
        return DEEPSEEK_V32
    found = json.loads((path / "config.json" if path.is_dir() else path).read_text())
    missing = [key for key in DEEPSEEK_V32 if key not in found]
    if missing:
        raise ValueError(f"{path} lacks {missing}: no model with DeepSeek sparse attention.")
    return {key: found[key] for key in DEEPSEEK_V32}


def _bytes(gib: Optional[float]) -> Optional[int]:
    return None if gib is None else int(gib * GIB)


if __name__ == "__main__":
    raise SystemExit(main())
