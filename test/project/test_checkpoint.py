"""The tiny checkpoint serves its purpose: one wrong KV row shows in the greedy tokens.

What holds, and what cannot: a row matters only to steps whose top-k selects it. Rows that no later step of their layer
selects can hold anything; a test that must see such a row has to compare bytes. Rows that are selected show with high
probability, not with certainty: over 168 random choices (both KV formats, all layers, a neighbour's row in place of the
right one, 32 further tokens) 162 showed, and of the 139 that five or more steps selected, 137.
"""

import filecmp
import random
import subprocess
import sys
from collections import Counter
from typing import NamedTuple

import pytest
import torch
from harness.environment import child_environment
from harness.recorder import TopkRecorder, lru_fetches, lru_misses
from harness.scheduler import InprocScheduler
from tiny_model import TinySpec, write_checkpoint

CONTEXT, STEPS, LAYERS, TOPK = 300, 32, 3, 64
WINDOW = 2 * TOPK
PICKS_A_LAYER = 3
FILES = ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]


class Pick(NamedTuple):
    layer: int
    position: int


class Baseline(NamedTuple):
    tokens: list
    rows: dict
    """Layer to the slots each decode step selects; the first step comes before the corruption."""
    slots: list
    """Slots of the prompt, by position."""


def make_prompt(seed):
    rnd = random.Random(seed)
    return [rnd.randrange(3, 2048) for _ in range(CONTEXT)]


def run_baseline(engine, prompt) -> Baseline:
    with TopkRecorder(engine) as recorder:
        rid = engine.submit(prompt, STEPS + 2)
        engine.step_until(lambda: len(engine.outputs[rid]) >= 2)
        slots = engine.slots(rid).tolist()[:CONTEXT]
        engine.drain()
    return Baseline(engine.outputs[rid], recorder.rows(), slots)


def run_corrupted(engine, prompt, picks):
    """One request for each pick, all in one batch; after its first decode step, the row is overwritten by a neighbour's."""
    rids = [engine.submit(prompt, STEPS + 2) for _ in picks]
    engine.step_until(lambda: min(len(engine.outputs[rid]) for rid in rids) >= 2)
    before = [len(engine.outputs[rid]) for rid in rids]
    for rid, pick in zip(rids, picks):
        if pick is None:
            continue
        slots = engine.slots(rid).long()
        buffer = engine.kv_pool.kv_buffer[pick.layer]
        neighbour = pick.position - 1 if pick.position else 1
        with torch.inference_mode():
            buffer[slots[pick.position]] = buffer[slots[neighbour]].clone()
    engine.drain()
    return [engine.outputs[rid] for rid in rids], before


@pytest.mark.parametrize("dtype", ["auto", "fp8_e4m3"])
def test_one_wrong_row_changes_the_tokens(tiny_model, dtype):
    rnd, prompt = random.Random(5), make_prompt(1)
    options = {"kv_cache_dtype": dtype, "disable_radix_cache": True, "max_running_requests": 24}
    with InprocScheduler(tiny_model, **options) as engine:
        base = run_baseline(engine, prompt)
        picks, unread = [], []
        for layer in range(LAYERS):
            selected = Counter(slot for step in base.rows[layer][1:] for slot in step)
            chosen = [p for p, slot in enumerate(base.slots) if selected[slot]]
            picks += [Pick(layer, p) for p in rnd.sample(chosen, PICKS_A_LAYER)]
            unread += [Pick(layer, p) for p, slot in enumerate(base.slots) if not selected[slot]]
        # The batch's requests are not all at the same step when the rows change: an unread row must be unread by all.
        controls = [None] + rnd.sample(unread, min(2, len(unread)))
        outputs, before = run_corrupted(engine, prompt, picks + controls)

    for tokens, count in zip(outputs, before):
        assert tokens[:count] == base.tokens[:count]
    changed = [tokens != base.tokens for tokens in outputs]
    assert sum(changed[: len(picks)]) >= len(picks) - 1, list(zip(picks, changed))
    assert not any(changed[len(picks) :]), "a control changed: output depends on the batch, or on unread rows"


def test_output_is_diverse_and_selections_move(tiny_model):
    with InprocScheduler(tiny_model, disable_radix_cache=True) as engine:
        base = run_baseline(engine, make_prompt(2))
        again = run_baseline(engine, make_prompt(2))
    assert again.tokens == base.tokens
    assert len(set(base.tokens)) > 0.8 * len(base.tokens)
    for layer in range(LAYERS):
        steps = base.rows[layer]
        assert all(len(set(rows)) == TOPK for rows in steps)
        assert all(set(a) != set(b) for a, b in zip(steps, steps[1:]))
        warm = lru_misses(steps, WINDOW)[4:]
        rate = sum(warm) / (TOPK * len(warm))
        assert 0.3 < rate < 0.8, f"layer {layer}: {rate:.2f}"
        assert min(warm) > 0
        # Rows that left the window come back.
        fetched = Counter()
        for rows in lru_fetches(steps, WINDOW):
            fetched.update(rows)
        assert sum(count > 1 for count in fetched.values()) > TOPK / 2


def test_lru_misses_by_hand():
    assert lru_misses([[1, 2], [2, 3], [1, 2], [4, 5], [1, 2]], 3) == [2, 1, 0, 2, 1]
    assert lru_misses([[1, 2], [3, 4], [1, 2]], 2) == [2, 2, 2]


def test_writing_is_deterministic_and_idempotent(tmp_path):
    spec = TinySpec(seed=7, layers=2, vocab=64)
    assert write_checkpoint(tmp_path / "a", spec)
    assert write_checkpoint(tmp_path / "b", spec)
    equal, different, odd = filecmp.cmpfiles(tmp_path / "a", tmp_path / "b", FILES, shallow=False)
    assert equal == FILES and not different and not odd

    stamp = (tmp_path / "a" / "model.safetensors").stat().st_mtime_ns
    assert not write_checkpoint(tmp_path / "a", spec)
    assert (tmp_path / "a" / "model.safetensors").stat().st_mtime_ns == stamp

    assert write_checkpoint(tmp_path / "a", TinySpec(seed=8, layers=2, vocab=64))
    assert not filecmp.cmp(tmp_path / "a" / FILES[2], tmp_path / "b" / FILES[2], shallow=False)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "b"]


def test_command_line(tmp_path):
    command = [sys.executable, "-m", "tiny_model", "--out", str(tmp_path / "m"), "--layers", "2", "--vocab", "64"]
    for word in ("wrote", "kept"):
        out = subprocess.run(command, env=child_environment(), capture_output=True, text=True, check=True).stdout
        assert out.startswith(word) and "2 layers, topk 64" in out
