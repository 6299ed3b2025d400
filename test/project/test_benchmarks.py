"""The benchmarks' own logic, in a size for the CPU: what they time is right, and is what they say."""

import argparse
import contextlib
import dataclasses
import importlib.util
import json
import random
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from harness import mlp_sync, offload
from harness.environment import ROOT, child_environment
from harness.scheduler import InprocScheduler
from harness.stamps import Stamps

FOLDER = Path(__file__).resolve().parents[2] / "benchmark" / "kv_offload"


def load(name):
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def swap_layer():
    from sgl_cpu_ref import nsa_swap

    module = load("swap_layer")
    nsa_swap.install()
    with mock.patch.multiple(module, WINDOW=128, TOP_K=64, WARMUP=1, TIMED=2):
        yield module


def memory(module, layers, case, rows=0):
    tensor = torch.zeros(layers * (rows or case.batch * case.positions) * case.row_bytes, dtype=torch.uint8)
    return module.HostMemory("pinned", tensor)


def test_swap_layer_moves_what_it_says(swap_layer):
    case = swap_layer.Case(9, 656, 0.25, positions=640)
    impls = ["ours", "ours_listed", "ours_ordered", "gather", "gather_sorted", "copy"]
    rows = swap_layer.measure(case, memory(swap_layer, 2, case), 9, "cpu", "none", impls)
    assert [row["impl"] for row in rows] == ["ours", "no_io", *impls[1:]]
    assert [row["misses"] for row in rows] == [9 * 16, 0, *[9 * 16] * 5]
    assert {row["layers"] for row in rows} == {2}
    lists = swap_layer.topk_lists(case, 4)
    for before, after in zip(lists, lists[1:]):
        assert int((before != after).sum()) == case.misses
    seen = [set(lists[: step + 1, 0].flatten().tolist()) for step in range(4)]
    assert [len(positions) for positions in seen] == [64, 80, 96, 112]  # what misses was never resident


def test_swap_of_several_lists_misses_as_often_as_its_reference(swap_layer):
    several, one = (dataclasses.replace(case, positions=896) for case in swap_layer.several_lists(2, 3))
    assert (several.misses, one.misses) == (2 * 3 * 6, 2 * 19)  # 6.4 and 19.2 of 64, rounded
    lists = swap_layer.topk_lists(several, 4).view(4, 2, 3, 64).transpose(1, 2).flatten(0, 1)
    for before, after in zip(lists, lists[1:]):
        assert [len(set(new) - set(old)) for old, new in zip(before.tolist(), after.tolist())] == [6, 6]
    for case in (several, one):
        rows = swap_layer.measure(case, memory(swap_layer, 2, case), 9, "cpu", "none", swap_layer.IMPLS)
        assert [row["impl"] for row in rows if row["impl"] != "no_io"] == list(case.impls)
        assert (rows[0]["misses"], rows[0]["window"], rows[0]["queries"]) == (case.misses, 192, case.queries)


def test_swap_layer_notices_a_wrong_row(swap_layer):
    case = swap_layer.Case(2, 656, 0.25, positions=640)
    real = swap_layer.Ours.__call__

    def faulty(self, layer, step, topk):
        table = real(self, layer, step, topk)
        self.pool.device[layer, int(table[1, 5]), -1] += 1
        return table

    with mock.patch.object(swap_layer.Ours, "__call__", faulty), pytest.raises(AssertionError, match="wrong"):
        swap_layer.measure(case, memory(swap_layer, 2, case), 2, "cpu", "none", ["ours"])


@pytest.mark.parametrize("placement", ["contiguous", "pages", "random"])
def test_placements_use_every_row_once(swap_layer, placement):
    case = swap_layer.Case(2, 656, 0.1, positions=640, placement=placement)
    pool = swap_layer.Pool(case, memory(swap_layer, 1, case), 1, "cpu")
    assert torch.equal(pool.req_to_token.flatten().sort().values, torch.arange(1280, dtype=torch.int32))
    larger = swap_layer.Case(2, 656, 0.1, positions=640, placement=placement, pool_rows=6400)
    pool = swap_layer.Pool(larger, memory(swap_layer, 1, larger, 6400), 1, "cpu")
    assert len(pool.req_to_token.unique()) == 1280 and int(pool.req_to_token.max()) < 6400
    with pytest.raises(ValueError, match="GB of host memory"):
        swap_layer.Pool(larger, memory(swap_layer, 1, case), 1, "cpu")


def test_replayed_topk_sets_the_miss_rate(tiny_model):
    """A lone decode node whose lists miss a quarter misses a quarter."""
    from sglang.srt.plugins import load_plugins

    load_plugins()  # puts the functions there that are replayed
    replay_module = load("replayed_topk")
    top_k, batch, steps, context = offload.TOP_K, 2, 8, 500
    lists = replay_module.lists_of(steps, batch, top_k, context, 0.25)
    with replay_module.replayed_topk(torch.zeros_like(lists), 3) as replay, InprocScheduler(
        tiny_model,
        **offload.server_args(),
        **offload.offload_args(256),
        disaggregation_mode="decode",
        disaggregation_transfer_backend="fake",
    ) as engine:
        for room in range(batch):
            prompt = offload.prompts([context], seed=room)[0]
            engine.submit(prompt, 20, bootstrap_host="2.2.2.2", bootstrap_room=room)
        engine.step_until(lambda: engine.scheduler.running_batch.batch_size() == batch)
        counters = offload.coordinator(engine).lru.counters
        replay.play(lists)
        engine.step()
        before = counters.clone()
        for _ in range(steps - 1):
            engine.step()
        added = (counters - before).tolist()
        engine.abort(all_requests=True)
        engine.drain()
    new = round(top_k * 0.25) * batch * (steps - 1)
    assert added == [[top_k * batch * (steps - 1) - new, 0, new]] * 3


def test_replayed_topk_refuses_more_steps_than_positions():
    with pytest.raises(ValueError, match="need more than"):
        load("replayed_topk").lists_of(100, 1, 64, 500, 0.25)


def test_capacity_counts_what_is_allocated(tiny_model, monkeypatch):
    """The most requests within the budget, dense and with offloading; one more would not fit."""
    monkeypatch.syspath_prepend(str(FOLDER))
    from sglang.srt.plugins import load_plugins

    load_plugins()
    capacity = load("capacity")
    monkeypatch.setattr(capacity.lone_node, "TOP_K", offload.TOP_K)
    args = argparse.Namespace(budget_gb=0.02, context=1984, window=128, layers=3, dtype="bfloat16", warmup=12, steps=1, rounds=1)
    args.miss_rates, args.impls = [0.1], ("dense", "ours")

    def one_by_one(function, calls):
        return [function(*own) for own in calls]

    rows = list(capacity.measure(tiny_model, args, call_all=one_by_one))
    fit = {row["impl"]: row["requests_that_fit"] for row in rows}
    assert [(row["impl"], row["batch"]) for row in rows] == [
        ("dense", fit["dense"]),
        ("ours", fit["dense"]),
        ("ours", fit["ours"]),
    ]
    assert fit["ours"] > fit["dense"]
    for impl, count in fit.items():
        held = [capacity.held_bytes(impl, args, tiny_model, capacity.decode_step.tokens_made(2, args), n) for n in (count, count + 1)]
        assert held[0] <= args.budget_gb * 1e9 < held[1]
    args.budget_gb = 0.0001
    with pytest.raises(ValueError, match="over the budget"):
        list(capacity.measure(tiny_model, args, call_all=one_by_one))


def test_flag_off_serves_both_trees(tmp_path):
    """Each server says which tree it runs; were it the other one, the script would raise."""
    import sysconfig

    trees = {"stock": sysconfig.get_paths()["purelib"], "patched": ROOT / "build" / "sglang" / "python"}
    env = child_environment(PYTHONPATH=str(ROOT / "test"))
    sizes = ["--layers", "1", "--batch", "1", "--context", "64", "--warmup", "1", "--steps", "1", "--rounds", "2", "--servers", "2"]
    command = [sys.executable, FOLDER / "flag_off.py", "--model", tmp_path / "slim", "--out", tmp_path / "out.json", *sizes]
    command += ["--trees", *(f"{name}={path}" for name, path in trees.items())]
    run = subprocess.run(command, env=env, capture_output=True, text=True)
    assert (tmp_path / "out.json").exists(), run.stderr[-2000:]
    row = json.loads((tmp_path / "out.json").read_text())
    assert [[len(times) for times in servers] for servers in row["step_ms"].values()] == [[2, 2], [2, 2]] and row["ratio"] > 0
    assert run.returncode == 0 or "the ratio is not within" in run.stderr


def test_host_memory_reads_both_ends(swap_layer, monkeypatch):
    host_memory = load("host_memory")
    monkeypatch.setattr(host_memory, "TOP_K", 64)
    monkeypatch.setattr(host_memory, "WINDOW", 128)
    monkeypatch.setattr(host_memory, "LAYERS", 2)
    rows = host_memory.LAUNCHES * host_memory.BATCH * 64
    row = host_memory.child("plain", 3 * rows * host_memory.ROW_BYTES, "cpu", rows)
    assert row["take_s"] >= 0 and set(row) == {"take_s", "gather_near_us", "gather_far_us", "free_huge_gb"}


@pytest.fixture
def serving_benchmarks(monkeypatch):
    """Their modules by name, with the tiny checkpoint's top-k."""
    monkeypatch.syspath_prepend(str(FOLDER))
    from sglang.srt.plugins import load_plugins

    load_plugins()
    import lone_node

    monkeypatch.setattr(lone_node, "TOP_K", offload.TOP_K)
    return load


def test_retraction_copies_what_a_request_holds(tiny_model, serving_benchmarks, monkeypatch):
    retraction = serving_benchmarks("retraction")
    args = argparse.Namespace(context=640, window=128, layers=3, dtype="bfloat16", repeats=1)
    row = retraction.measure(tiny_model, args)
    assert row["bytes"] == 3 * 640 * (1152 + 132)
    with pytest.raises(AssertionError, match="rows have changed"), monkeypatch.context() as broken:
        pool = "sglang.srt.mem_cache.sparsity.nsa_offload.device_pool.NSAOffloadTokenToKVPool"
        broken.setattr(f"{pool}.load_cpu_copy", lambda *args: None)
        retraction.copies(tiny_model, args)


def test_a_lone_node_leaves_nothing(tiny_model, serving_benchmarks, monkeypatch):
    import exactness

    stress = serving_benchmarks("stress")
    monkeypatch.setattr(exactness, "slim_model", lambda *args: tiny_model)
    monkeypatch.setattr(stress, "LONE_LENGTHS", [200, 200, 900])
    monkeypatch.setattr(stress, "LONE_WINDOW", 128)
    row = stress.long_requests(argparse.Namespace(steps=10, dtype="bfloat16", model=None, layers=3))
    assert row["requests"] == 3
    # Of requests that run for 18 and 9 steps, every step of every layer counts its top-k.
    assert all(sum(layer) % offload.TOP_K == 0 for layer in row["counters"]) and row["miss_rate"] > 0.05


@pytest.mark.parametrize("part", ["write_back", "metrics"])
def test_steps_without_a_part(part, tiny_model, serving_benchmarks, monkeypatch):
    from sglang.srt.mem_cache.sparsity.nsa_offload import collector, controller

    owner, name = {
        "write_back": (controller.SparseCacheController, "write_back"),
        "metrics": (collector.OffloadMetricsCollector, "_publish"),
    }[part]
    calls, original = [], getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda self, *args: calls.append(1) or original(self, *args))
    module = serving_benchmarks("step_parts")

    def counted(engine, steps: int) -> int:
        before = len(calls)
        for _ in range(steps):
            engine.step()
        return len(calls) - before + 1

    monkeypatch.setattr(module.lone_node, "round_ms", counted)
    args = argparse.Namespace(
        context=900, window=128, layers=3, dtype="bfloat16", batches=[2], batch=2, miss_rates=[0.1], warmup=4, steps=5, rounds=4
    )
    (row,) = module.measure(part, tiny_model, args)
    assert row["step_ms"] == {"with": [6, 6], "without": [1, 1]} and row["ratio"] == 6
    assert row["miss_rate"] == round(6 / 64, 4)
    if part == "write_back":  # a process can have one server with metrics
        monkeypatch.setattr(module.lone_node, "play", lambda *args: None)
        with pytest.raises(RuntimeError, match="were replayed"):
            list(module.measure(part, tiny_model, args))


def test_what_other_ranks_cause_leaves_rows_and_tokens(tiny_model, serving_benchmarks, monkeypatch):
    """The loops of ``exactness.py`` and ``stress.py`` with padded batches and idle forwards."""
    exactness, stress = serving_benchmarks("exactness"), serving_benchmarks("stress")
    on_cpu = torch.full
    monkeypatch.setattr(torch, "full", lambda *args, device=None, **more: on_cpu(*args, **more))
    monkeypatch.setattr(exactness, "late_loads", contextlib.nullcontext)
    args = {**offload.server_args("fp8_e4m3"), **offload.offload_args(), "max_running_requests": 6}
    work = offload.prompts([70, 200, 300])
    plain = exactness.run(tiny_model, work, 12, True, **args)
    with exactness.other_ranks(queries=1, limit=6):
        assert exactness.run(tiny_model, work, 12, True, **args)["outputs"] == plain["outputs"]
    rng, seen = random.Random(0), []
    with Stamps() as stamps, mlp_sync.padded(lambda batch: rng.choice((0, 1, 5)), seen=seen, limit=6):
        with InprocScheduler(tiny_model, overlap=True, max_total_tokens=4096, **args) as engine:
            life = argparse.Namespace(seed=0, steps=100, max_len=600, ranks=True, vocab=2048)
            done = stress.live(engine, stamps, life)
            offload.check_idle(engine)
    assert done["idle_forwards"] > 10 and done["checked_rows"] > 1000 and {"DECODE", "EXTEND"} == set(seen)


def test_turnover_serves_what_ends(tiny_model, serving_benchmarks, monkeypatch):
    turnover, lone_node = serving_benchmarks("turnover"), sys.modules["lone_node"]
    monkeypatch.setattr(turnover, "SETTLE_STEPS", 5)
    for context in (60, 700):
        args = argparse.Namespace(
            window=128, dtype="bfloat16", layers=3, context=context, outstanding=4, warmup=2, steps=2, rounds=2, turnover_steps=60
        )
        row = turnover.measure("ours", tiny_model, args)
        assert sum(r["ended"] for r in row["turnover"]) > 5 and row["tokens_per_s"] > 0
        assert all(3 < r["mean_batch"] <= 4 for r in row["turnover"])
        assert row["fixed_miss_rate"] <= 1 / lone_node.TOP_K  # the row that has left the ring
