"""What ``plan`` prints: a table of what fits, and the command that starts such a server."""

from __future__ import annotations

import json
import shlex
from typing import TYPE_CHECKING, Callable, Sequence

from sglang.srt.arg_groups.nsa_kv_offload_hook import FLAG
from sglang.srt.mem_cache.sparsity.nsa_offload.config import CONFIG_FLAG, parse_object
from sglang.srt.mem_cache.sparsity.nsa_offload.sizing import (
    HOST_MEMORY,
    MAX_DERIVED_REQUESTS,
    OffloadSizes,
)

if TYPE_CHECKING:
    from sglang.srt.mem_cache.sparsity.nsa_offload.plan import Answer, Side

NAME_WIDTH, CELL_WIDTH = 30, 16


def table(answers: Sequence["Answer"]) -> str:
    """What fits for one context, bytes in powers of ten.

    Args:
        answers: of tensor parallelism, and of DP attention where it was asked about: two columns
            each, the flag off and on.
    """
    question = answers[0].question
    sides = [(answer, side) for answer in answers for side in (answer.off, answer.on)]
    of = f"device bytes of {question.batch}" if question.batch else "device bytes of these"
    ranks = f"{question.ranks} rank" + "s" * (question.ranks > 1)
    rows: list[tuple[str, Callable[["Side"], str]]] = [
        ("requests that fit", lambda s: f"{s.requests:,}"),
        ("device bytes a request", lambda s: _size(s.request_bytes)),
        (of, lambda s: _size(s.device_bytes)),
        ("host bytes a rank", lambda s: _size(s.host_bytes)),
        ("for retracted requests", lambda s: _size(s.retraction_bytes)),
        (
            f"host bytes, {ranks}",
            lambda s: _size((s.host_bytes + s.retraction_bytes) * question.ranks),
        ),
    ]
    if question.batch:
        rows.insert(1, (f"{question.batch} fit", lambda s: "yes" if s.fits else "no"))
    prefixes = [_kind(answer) if len(answers) > 1 else "" for answer in answers]
    heads = [f"{prefix}flag {state}" for prefix in prefixes for state in ("off", "on")]
    lines = [_line(f"context {question.context:,}", heads)]
    lines += [_line(name, [cell(side) for _, side in sides]) for name, cell in rows]
    if len(answers) > 1:
        node = [f"{side.requests * answer.question.data_ranks:,}" for answer, side in sides]
        lines[1] = lines[1].replace("requests that fit", "requests a rank  ")
        lines.insert(1, _line("requests that fit", node))
    sizes = answers[-1].sizes
    lines.append(
        f"windows of {sizes.lru_slots:,} + {sizes.ring_slots} rows"
        f"{_of_queries(sizes)}, {_size(sizes.window_bytes)} each; staging of {sizes.staging_slots:,} rows"
    )
    lines += [note for answer in answers for note in _notes(answer, len(answers) > 1)]
    return "\n".join(lines)


def launch_command(answer: "Answer", model: str) -> str:
    """The command of a server that serves what the answer says."""
    question, sizes = answer.question, answer.sizes
    words = ["python", "-m", "sglang.launch_server", "--model-path", model]
    words += ["--tp-size", str(question.ranks)]
    if question.data_ranks > 1:
        words += ["--dp-size", str(question.data_ranks), "--enable-dp-attention"]
    words += ["--kv-cache-dtype", question.kv_cache_dtype]
    if question.decode_node:
        words += ["--disaggregation-mode", "decode", "--disaggregation-transfer-backend", "mooncake"]
    else:
        words += ["--disable-radix-cache", "--chunked-prefill-size"]
        words += [str(question.chunked_prefill_size * question.data_ranks)]
    if question.speculative_steps:
        steps = question.speculative_steps
        words += ["--speculative-algorithm", "EAGLE", "--speculative-num-steps", str(steps)]
        words += ["--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", str(steps + 1)]
    requests = (sizes.num_windows - 1) * question.data_ranks
    words += ["--context-length", str(question.context), "--max-running-requests", str(requests)]
    config = {key: value for key, value in parse_object(question.config).items() if key != "host_ratio"}
    config.setdefault("window_size", sizes.lru_slots)
    config.setdefault("host_size_gb", -(-answer.on.host_bytes // 10**7) / 100)
    return shlex.join([*words, FLAG, CONFIG_FLAG, json.dumps(config)])


def _kind(answer: "Answer") -> str:
    return f"DP {answer.question.data_ranks} " if answer.question.data_ranks > 1 else "TP "


def _notes(answer: "Answer", named: bool) -> list[str]:
    """What else than device memory has limited the requests with the flag on."""
    where = _kind(answer) if named else ""
    notes = []
    if answer.on.requests == MAX_DERIVED_REQUESTS:
        notes.append(
            f"{where}flag on: more than {MAX_DERIVED_REQUESTS} requests a rank gain nothing, so no more "
            "are counted; --batch asks about another number"
        )
    elif answer.slot_limit == HOST_MEMORY:
        notes.append(f"{where}flag on: host memory is the limit, not device memory")
    return notes


def _line(name: str, cells: Sequence[str]) -> str:
    return f"{name:<{NAME_WIDTH}}" + "".join(f"{cell:>{CELL_WIDTH}}" for cell in cells)


def _of_queries(sizes: OffloadSizes) -> str:
    return "" if sizes.queries == 1 else f" for {sizes.queries} tokens a step"


def _size(count: int) -> str:
    if not count:
        return "-"
    return f"{count / 1e9:,.2f} GB" if count >= 1e9 else f"{count / 1e6:,.1f} MB"
