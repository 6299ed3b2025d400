"""The demo's parts that need no server: its requests, its trace, its numbers and its verdict."""

import dataclasses
import json
import os
import subprocess
import sys

import pytest
import torch

from demo import report, workload
from demo.evidence import INDEX_KEY_BYTES, gather
from demo.judge import LEAST_EVICTED, LEAST_TOGETHER, failures
from demo.metrics import Metrics, parse
from demo.pair import TRACE_PLUGIN, PairRun
from tiny_model import TinySpec

LAYERS = 3
REQUESTS = [request for phase in workload.phases() for request in phase.requests]
SIZES = {
    "num_layers": LAYERS,
    "row_bytes": 656,
    "window_bytes": 400_000,
    "bytes_per_token": INDEX_KEY_BYTES * LAYERS + 0.0625,
    "host_bytes_per_token": 656 * LAYERS,
    "fixed_bytes": 1_000_000,
}


def good_run() -> PairRun:
    tokens = {request.rid: [7] * request.new_tokens for request in REQUESTS}
    seen = [
        {"rid": r.rid, "fetched": [10] * LAYERS, "refetched": [3] * LAYERS, "written": [1] * LAYERS, "evicted": [4] * LAYERS}
        for r in REQUESTS
    ]
    trace = {
        "counters": [[90, 10, 10 * len(REQUESTS)]] * LAYERS,
        "rows_stored": 500,
        "sizes": SIZES,
        "host_pool_bytes": 5_000_000,
        "peak_batch": LEAST_TOGETHER,
        "requests": seen,
    }
    misses = 10 * len(REQUESTS) * LAYERS
    said = Metrics(100 * LAYERS, misses - 9, (misses - 9) * 656, 500 * LAYERS * 656, windows=21, host_rows=20096)
    return PairRun("fp8_e4m3", tokens, json.loads(json.dumps(tokens)), (True, True), json.loads(json.dumps(trace)), said)


def verdict(run: PairRun):
    return failures(gather(run, REQUESTS))


class TestWorkload:
    def test_lengths_around_every_edge(self):
        lengths = {request.prompt_len for request in REQUESTS}
        k, w, slots = workload.TOP_K, workload.WINDOW, workload.WINDOW + workload.RING
        assert {1, k - 1, k, k + 1, w - 1, w, w + 1, slots - 1, slots, slots + 1} <= lengths
        assert max(lengths) >= 4 * w
        assert any(r.prompt_len < w and r.total_len > slots for r in REQUESTS)
        assert workload.TOP_K == TinySpec().topk and workload.VOCABULARY == TinySpec().vocab

    def test_32_different_requests_1_to_16_at_once(self):
        assert len({request.rid for request in REQUESTS}) == 32
        groups = [len(group) for phase in workload.phases() for group in phase.groups]
        assert groups == [1] * 8 + [4] * 2 + [16]
        assert REQUESTS[3].ids == REQUESTS[3].ids and len(REQUESTS[3].ids) == REQUESTS[3].prompt_len


class TestJudge:
    def test_complete_evidence_passes(self):
        assert verdict(good_run()) == []

    def test_one_wrong_token(self):
        run = good_run()
        run.on[REQUESTS[5].rid][2] = 8
        assert verdict(run) == [f"fp8_e4m3: {REQUESTS[5].rid}: tokens differ from number 2 on"]

    @pytest.mark.parametrize("tokens", [[], None])
    def test_no_tokens_are_not_equal_tokens(self, tokens):
        run = good_run()
        for side in (run.off, run.on):
            if tokens is None:
                del side[REQUESTS[0].rid]
            else:
                side[REQUESTS[0].rid] = tokens
        assert len(verdict(run)) == 2

    def test_no_trace(self):
        lacks = verdict(dataclasses.replace(good_run(), trace=None))
        assert lacks == ["fp8_e4m3: nothing was traced on the server with the flag on"]

    def test_too_few_evictions(self):
        run = good_run()
        for request in run.trace["requests"][LEAST_EVICTED - 1 :]:
            request["evicted"] = [0] * LAYERS
        assert verdict(run) == ["fp8_e4m3: 19 requests evicted, 20 must"]

    def test_a_layer_without_refetch(self):
        run = good_run()
        for request in run.trace["requests"]:
            request["refetched"][1] = 0
        assert verdict(run) == ["fp8_e4m3: layer 1 fetched no evicted row again"]

    def test_no_row_of_decoding_fetched(self):
        run = good_run()
        for request in run.trace["requests"]:
            request["written"] = [0] * LAYERS
        assert verdict(run) == ["fp8_e4m3: no step fetched a row that decoding had written"]

    def test_never_16_at_once(self):
        run = good_run()
        run.trace["peak_batch"] = 15
        assert verdict(run) == ["fp8_e4m3: 15 requests decoded at once, 16 must"]

    def test_trace_and_counters_disagree(self):
        run = good_run()
        run.trace["counters"][2][2] += 1
        assert len(verdict(run)) == 1

    def test_endpoint_says_nothing(self):
        lacks = verdict(dataclasses.replace(good_run(), metrics=None))
        assert lacks == ["fp8_e4m3: the metrics endpoint says nothing of offloading"]

    @pytest.mark.parametrize("field", ["hits", "misses", "to_device_bytes", "to_host_bytes"])
    @pytest.mark.parametrize("factor", [0.7, 1.1])
    def test_endpoint_and_counts_disagree(self, field, factor):
        run = good_run()
        said = dataclasses.replace(run.metrics, **{field: int(getattr(run.metrics, field) * factor)})
        lacks = verdict(dataclasses.replace(run, metrics=said))
        assert len(lacks) == 1 and "the metrics endpoint says" in lacks[0]

    def test_nothing_was_decoded(self):
        run = good_run()
        run.trace["requests"] = []
        assert f"fp8_e4m3: 0 of {LAYERS} layers were traced" in verdict(run)


class TestNumbers:
    def test_bytes_and_rates(self):
        evidence = gather(good_run(), REQUESTS)
        misses, tokens = 10 * len(REQUESTS), max(request.total_len for request in REQUESTS)
        assert evidence.traffic.hit_rates == [100 / (100 + misses)] * LAYERS
        assert evidence.traffic.to_device_bytes == misses * LAYERS * 656
        assert evidence.traffic.to_host_bytes == 500 * LAYERS * 656
        assert evidence.memory.device_off == 788 * LAYERS * tokens
        assert evidence.memory.device_on == int(SIZES["bytes_per_token"] * tokens) + 400_000

    def test_report_with_and_without_trace(self, tmp_path):
        evidences = [gather(run, REQUESTS) for run in (good_run(), dataclasses.replace(good_run(), trace=None))]
        assert "hit rate, layer 2" in report.table(evidences)
        assert "32 of 32" in report.table(evidences[1:])
        assert "/metrics, fp8_e4m3: hit rate 24.0%, 951 misses, 624 kB to the device" in report.table(evidences)
        report.write(tmp_path / "report.json", evidences, ["lacks"], 1.0)
        written = json.loads((tmp_path / "report.json").read_text())
        assert not written["passed"] and written["runs"][0]["traffic"]["refetched"] == [3 * 32] * LAYERS
        assert (tmp_path / "tokens.json").exists()


SCRAPE = """
# HELP sglang:nsa_offload_topk_entries_total Top-k entries; misses are copied.
sglang:nsa_offload_topk_entries_total{layer="0",model_name="a b",result="lru_hit",tp_rank="0"} 60.0
sglang:nsa_offload_topk_entries_total{layer="1",model_name="a b",result="ring_hit",tp_rank="0"} 10.0
sglang:nsa_offload_topk_entries_total{layer="0",model_name="a b",result="miss",tp_rank="0"} 1.2e+01
sglang:nsa_offload_topk_entries_total{layer="1",model_name="a b",result="miss",tp_rank="0"} 18.0
sglang:nsa_offload_copied_bytes_total{direction="h2d",model_name="a b",tp_rank="0"} 19680.0
sglang:nsa_offload_copied_bytes_total{direction="d2h",model_name="a b",tp_rank="0"} 1312.0
sglang:nsa_offload_windows{model_name="a b",tp_rank="0"} 21.0
sglang:nsa_offload_windows_used{model_name="a b",tp_rank="0"} 3.0
sglang:nsa_offload_host_rows{model_name="a b",tp_rank="0"} 20032.0
sglang:num_running_reqs{model_name="a b",tp_rank="0"} 3.0
"""


class TestMetrics:
    def test_parse(self):
        said = parse(SCRAPE)
        assert said == Metrics(70, 30, 19680, 1312, windows=21, host_rows=20032)
        assert said.hit_rate == 0.7

    def test_server_without_offloading(self):
        assert parse("sglang:num_running_reqs{tp_rank=\"0\"} 3.0\n") is None


class TestTrace:
    @pytest.fixture
    def trace(self, monkeypatch):
        monkeypatch.syspath_prepend(str(TRACE_PLUGIN))
        from swap_trace.trace import SwapTrace

        return SwapTrace(num_layers=2, num_windows=3, max_context=32)

    @staticmethod
    def swap(trace, layer, misses, victims, held, window=1):
        """One request in ``window`` and one row of padding."""
        before = torch.full((3, 4), -1, dtype=torch.int32)
        before[window, : len(held)] = torch.tensor(held, dtype=torch.int32)
        after = before.clone()
        after[window, list(victims)] = torch.tensor(misses, dtype=torch.int32)
        trace.swap(layer, torch.tensor([window, -1], dtype=torch.int32), before, after)

    def test_first_fetch_eviction_and_refetch(self, trace):
        trace.begin(1, "a", first_position=8)
        self.swap(trace, 0, [0, 1, 2], [0, 1, 2], [])
        self.swap(trace, 0, [5, 9], [3, 0], [0, 1, 2])  # 9, which decoding wrote, evicts 0
        self.swap(trace, 0, [0], [1], [9, 1, 2, 5])  # 0 again; evicts 1
        self.swap(trace, 1, [0], [0], [])  # another layer: not again
        trace.end(1)
        trace.end(1)
        (request,) = trace.requests
        assert request == {
            "rid": "a",
            "first_position": 8,
            "fetched": [6, 1],
            "refetched": [1, 0],
            "written": [1, 0],
            "evicted": [2, 0],
        }
        assert trace.peak_batch == 1

    def test_next_owner_of_a_window_starts_anew(self, trace):
        for rid in ("a", "b"):
            trace.begin(2, rid, first_position=4)
            self.swap(trace, 0, [0, 1], [0, 1], [], window=2)
            trace.end(2)
        assert [r["refetched"] for r in trace.requests] == [[0, 0]] * 2
        assert [r["fetched"] for r in trace.requests] == [[2, 0]] * 2


def test_plugin_is_found_on_its_path_only():
    code = (
        "from importlib.metadata import entry_points\n"
        "print([e.value for e in entry_points(group='sglang.srt.plugins') if e.name == 'swap_trace'])"
    )
    for path, found in ((str(TRACE_PLUGIN), "['swap_trace.plugin:activate']"), ("", "[]")):
        env = {**os.environ, "PYTHONPATH": path}
        out = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
        assert out.stdout.strip() == found


def test_watch_sees_what_a_scheduler_swaps(tiny_model, tmp_path, monkeypatch):
    """Its hooks fit the methods they hang on, and its counts are the feature's own."""
    from harness import offload
    from harness.scheduler import InprocScheduler
    from sglang.srt.mem_cache.sparsity.nsa_offload.coordinator import NSAOffloadCoordinator
    from sglang.srt.mem_cache.sparsity.nsa_offload.lru_cache import LRUCacheState

    monkeypatch.syspath_prepend(str(TRACE_PLUGIN))
    from swap_trace.plugin import _Watch

    watch = _Watch(str(tmp_path / "trace.json"))

    def hook(owner, name, before=None, after=None):
        method = getattr(owner, name)

        def hooked(*args, **kwargs):
            if before is not None:
                before(*args, **kwargs)
            result = method(*args, **kwargs)
            if after is not None:
                after(result, *args, **kwargs)
            return result

        monkeypatch.setattr(owner, name, hooked)

    hook(NSAOffloadCoordinator, "on_request_begin", after=watch.begun)
    hook(NSAOffloadCoordinator, "on_request_end", before=watch.ending)
    hook(LRUCacheState, "prepare_layer_swap", before=watch.preparing, after=watch.prepared)
    with InprocScheduler(tiny_model, **offload.server_args(), **offload.offload_args()) as engine:
        engine.run(offload.prompts((65, 300)), 70)
    seen = json.loads((tmp_path / "trace.json").read_text())
    misses = [layer[2] for layer in seen["counters"]]
    fetched = [sum(layers) for layers in zip(*(request["fetched"] for request in seen["requests"]))]
    assert fetched == misses
    assert sum(map(sum, (request["evicted"] for request in seen["requests"]))) > 0
