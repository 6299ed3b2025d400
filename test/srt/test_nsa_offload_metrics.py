"""Metrics of decode KV offloading: what is counted, when it is read, how it is named."""

import json
import unittest
from types import SimpleNamespace
from unittest import mock

import nsa_offload_tools as tools  # first: chooses the device
import prometheus_client
import torch

from sglang.srt.environ import envs
from sglang.srt.mem_cache.sparsity.nsa_offload import collector, counters, metrics, shortage
from sglang.srt.mem_cache.sparsity.nsa_offload.sizing import OffloadSizes
from sglang.srt.observability.metrics_collector import SchedulerMetricsCollector
from sglang.test.test_utils import CustomTestCase

LAYERS = 2
SIZES = OffloadSizes(
    num_windows=5,
    window_slots=192,
    lru_slots=128,
    staging_slots=0,
    num_layers=LAYERS,
    row_bytes=656,
    page_size=64,
    top_k=64,
)
LIMIT = shortage.HOST_MEMORY


class FakeController:
    """Copies are done when ``finish`` is called, as on a busy GPU."""

    def __init__(self):
        self.rows_stored, self.arrived, self.copies, self.events = 0, 0, [], []

    def rows_arrived(self):
        return self.arrived

    def copy_after_forward(self, target, source):
        self.copies.append((target, source.clone()))
        event = mock.Mock()
        event.query.return_value = False
        event.synchronize.side_effect = AssertionError("metrics waited for the GPU")
        self.events.append(event)
        return event

    def finish(self):
        target, value = self.copies[-1]
        target.copy_(value)
        self.events[-1].query.return_value = True


class World:
    """A scheduler's parts, as far as metrics read them; modules may carry a fault."""

    def __init__(self, **faulty):
        self.metrics_module = faulty.get("metrics", metrics)
        self.collector_module = faulty.get("collector", collector)
        self.now = 100.0
        self.controller = FakeController()
        self.counters = torch.zeros((LAYERS, 3), dtype=torch.int64)
        coordinator = SimpleNamespace(
            lru=SimpleNamespace(counters=self.counters),
            controller=self.controller,
            sizes=SIZES,
            windows=SimpleNamespace(num_windows=5, num_free=2),
            host_pool=SimpleNamespace(size=704, size_per_token=LAYERS * 656, memory="pinned"),
            check_idle=self._check_idle,
            token_to_kv_pool=SimpleNamespace(
                size=640, retraction=SimpleNamespace(total=9000, used=400)
            ),
        )
        runner = SimpleNamespace(memory_pool_config=SimpleNamespace(slot_limit=LIMIT))
        self.scheduler = SimpleNamespace(
            req_to_token_pool=SimpleNamespace(
                sparse_coordinator=coordinator, available_size=lambda: self.free_rows
            ),
            tp_worker=SimpleNamespace(model_runner=runner),
            token_to_kv_pool_allocator=SimpleNamespace(size=640, available_size=lambda: 256),
            waiting_queue=[],
            running_batch=SimpleNamespace(reqs=[1, 2, 3], batch_is_full=False),
            max_running_requests=4,
            forward_ct=0,
            is_fully_idle=lambda: self.idle,
            current_scheduler_metrics_enabled=True,
            metrics_collector=SimpleNamespace(last_log_time=self.now),
            _maybe_log_idle_metrics=self._log_idle,
        )
        self.idle, self.idle_reports, self.checks, self.leak = False, [], 0, None
        self.free_rows = 1
        for name, module in (("CounterSampler", "counters"), ("queued_requests", "shortage")):
            if module in faulty:
                setattr(self.metrics_module, name, getattr(faulty[module], name))
        self.metrics = self.metrics_module.OffloadMetrics(self.scheduler)

    def _check_idle(self):
        self.checks += 1
        self.controller.finish()  # it waits for the GPU
        if self.leak:
            raise RuntimeError(self.leak)

    def _log_idle(self):
        """As SGLang's: 30 seconds after the last."""
        if self.now > self.scheduler.metrics_collector.last_log_time + 30:
            self.scheduler.metrics_collector.last_log_time = self.now
            self.idle_reports.append(self.metrics.for_publishing())

    def count(self, *layers):
        """Add (LRU hits, ring hits, misses) of each layer."""
        self.counters += torch.tensor(layers)

    def read(self, seconds=10.0, finish=True, reader=None):
        """One report; the copy it queues is done at once, or not."""
        reader = reader or self.metrics.for_publishing
        self.now += seconds
        with mock.patch.object(self.metrics_module.time, "perf_counter", lambda: self.now):
            stats = reader()
        if finish:
            self.controller.finish()
        return stats

    def read_by(self, made):
        """One report through the collector."""
        self.read(reader=lambda: made.log_stats(None))


def check_late_but_exact(**faulty):
    world = World(**faulty)
    world.count((60, 10, 30), (50, 0, 50))
    assert world.read(finish=False).hit_rate is None, "nothing has arrived yet"
    world.count((1000, 1000, 0), (1000, 1000, 0))
    assert world.read(finish=False).hit_rate is None
    assert len(world.controller.copies) == 1, "a buffer was given to two copies"
    world.controller.finish()
    stats = world.read()
    assert stats.entries == [[60, 10, 30], [50, 0, 50]]
    assert world.read().entries == [[1060, 1010, 30], [1050, 1000, 50]]


def check_rates(**faulty):
    world = World(**faulty)
    world.read()
    world.count((60, 10, 30), (50, 0, 50))
    world.controller.rows_stored = 7
    world.read()
    world.count((90, 6, 4), (100, 0, 0))
    world.controller.rows_stored = 27
    world.controller.arrived = 20
    stats = world.read(seconds=2.0)
    assert stats.layer_hit_rates == [0.7, 0.5] and stats.hit_rate == 0.6
    assert stats.to_device_bytes == 80 * 656
    assert stats.to_device_rate == 80 * 656 / 10.0
    assert stats.to_host_bytes == 27 * LAYERS * 656
    assert stats.to_host_rate == 20 * LAYERS * 656 / 2.0
    assert (stats.rows_issued, stats.rows_done, stats.backlog) == (27, 20, 7)
    # The last interval alone, not the sums.
    stats = world.read()
    assert stats.layer_hit_rates == [0.96, 1.0] and stats.hit_rate == 0.98
    assert stats.to_device_rate == 4 * 656 / 2.0
    assert world.read().hit_rate is None, "an interval without a step has no rate"


def check_pools(**faulty):
    stats = World(**faulty).read()
    assert (stats.host_rows, stats.host_rows_used) == (640, 384)
    assert (stats.windows, stats.windows_used) == (5, 3)
    assert (stats.retraction_bytes, stats.retraction_bytes_used) == (9000, 400)


def check_shortage(**faulty):
    def lack(world):
        return {name: count for name, count in world.read().queued.items() if count}

    world = World(**faulty)
    scheduler = world.scheduler
    assert lack(world) == {}
    scheduler.waiting_queue = [1, 2]
    assert lack(world) == {"nothing": 2}
    scheduler.running_batch.batch_is_full = True
    assert lack(world) == {LIMIT: 2}
    world.free_rows = 0  # the last row is a prompt's in prefill
    assert lack(world) == {"window": 2}
    world.free_rows = 1
    scheduler.running_batch.reqs = [1, 2, 3, 4]
    assert lack(world) == {"window": 2}

    # A decode node: it has more rows than windows.
    rows = [3]
    entry = SimpleNamespace(waiting_for_input=True)
    buffers = [3]
    scheduler.disagg_decode_prealloc_queue = SimpleNamespace(
        queue=[entry, entry, SimpleNamespace(waiting_for_input=False)],
        retracted_queue=[1],
        req_to_token_pool=SimpleNamespace(available_size=lambda: rows[0]),
        req_to_metadata_buffer_idx_allocator=SimpleNamespace(available_size=lambda: buffers[0]),
    )
    assert lack(world) == {"window": 2, LIMIT: 3, "nothing": 1}
    buffers[0] = 0
    assert lack(world) == {"window": 2, LIMIT: 1, "metadata_buffer": 2, "nothing": 1}
    rows[0] = 0
    assert lack(world) == {"window": 2, LIMIT: 1, "request_row": 2, "nothing": 1}
    scheduler.running_batch.reqs = [1]
    assert lack(world) == {LIMIT: 1, "request_row": 2, "nothing": 3}


def check_retracted(**faulty):
    world = World(**faulty)
    world.metrics.count_retracted(2)
    world.metrics.count_retracted(1)
    assert world.read().retracted == {**dict.fromkeys(shortage.RESOURCES, 0), LIMIT: 3}


def check_log(**faulty):
    world = World(**faulty)
    world.scheduler.waiting_queue = [1]
    world.scheduler.running_batch.reqs = [1, 2, 3, 4]
    with mock.patch.object(world.metrics_module.time, "perf_counter", lambda: world.now):
        assert "offload hit rate: n/a" in world.metrics.log_text()
        world.controller.finish()
        world.count((60, 10, 30), (50, 0, 50))
        world.metrics.log_text()
        world.controller.finish()
        world.controller.rows_stored = 9
        text = world.metrics.log_text()
        world.controller.rows_stored = 10
        assert world.metrics.for_publishing().rows_issued == 9, "one reading a report"
        assert world.metrics.for_publishing().rows_issued == 10, "no line was logged"
    for words in (
        "offload hit rate: 0.600",
        "h2d: ",
        "d2h: ",
        "#window: 3/5",
        "#host row: 384/640",
        "write-back backlog: 9 rows",
        "queued for window: 1",
    ):
        assert words in text, (words, text)


class FakeMetric:
    """Stands in for a Prometheus metric; all values of a process by name and labels."""

    values = {}

    def __init__(self, name="", documentation="", labelnames=(), **kwargs):
        self.name, self.labelnames = name, tuple(labelnames)

    def labels(self, **labels):
        assert set(labels) == set(self.labelnames), (self.name, labels)
        key = self.name.removeprefix(collector.PREFIX)
        key += "".join(f" {v}" for k, v in labels.items() if k != "model_name")
        return SimpleNamespace(set=lambda v: self._set(key, v), inc=lambda v: self._inc(key, v))

    def _set(self, key, value):
        self.values[key] = value

    def _inc(self, key, value):
        assert value >= 0, "a counter fell"
        self.values[key] = self.values.get(key, 0) + value


def check_idle_report(**faulty):
    world = World(**faulty)
    clock = mock.patch.object(world.metrics_module.time, "perf_counter", lambda: world.now)
    world.metrics.on_idle()
    assert not world.checks and not world.idle_reports, "nothing has run yet"
    world.count((60, 10, 30), (50, 0, 50))
    world.read()
    world.count((60, 10, 30), (50, 0, 50))
    world.controller.rows_stored = 9
    world.read()
    world.scheduler.metrics_collector.last_log_time = world.now
    world.count((1, 0, 1), (1, 0, 1))
    world.controller.rows_stored = 12
    world.scheduler.forward_ct, world.idle = 3, True
    world.now += 1
    with clock:
        for _ in range(3):
            world.metrics.on_idle()
    assert world.checks == 1 and len(world.idle_reports) == 1
    (stats,) = world.idle_reports
    assert stats.entries == [[121, 20, 61], [101, 0, 101]], "the last forwards count"
    assert (stats.to_device_rate, stats.to_host_rate) == (0.0, 0.0)
    assert stats.hit_rate == 0.5

    world.scheduler.forward_ct, world.leak = 4, "leaked: windows"
    with clock:
        try:
            world.metrics.on_idle()
        except ValueError as error:
            assert "leaked: windows" in str(error)
        else:
            raise AssertionError("a leak was not told")
        world.scheduler.forward_ct, world.scheduler.current_scheduler_metrics_enabled = 5, False
        del world.scheduler.metrics_collector
        strict = envs.SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE
        before = strict.get()
        strict.set(False)
        try:
            world.metrics.on_idle()
        except ValueError as error:
            raise AssertionError("a leak is logged where checks are not strict") from error
        finally:
            strict.set(before)
    assert world.checks == 3 and len(world.idle_reports) == 1
    assert world.scheduler.count_nsa_offload_leak_warnings == 1


def check_names(**faulty):
    world = World(**faulty)
    def init(self, labels):
        self.labels = labels

    with (
        mock.patch.multiple(prometheus_client, Gauge=FakeMetric, Counter=FakeMetric),
        mock.patch.multiple(SchedulerMetricsCollector, __init__=init, log_stats=mock.DEFAULT),
        mock.patch.dict(FakeMetric.values, clear=True) as values,
    ):
        made = world.collector_module.OffloadMetricsCollector(
            world.metrics, labels={"model_name": "tiny"}
        )
        world.read()
        world.count((60, 10, 30), (50, 0, 50))
        world.read()
        world.metrics.count_retracted(4)
        world.controller.rows_stored, world.controller.arrived = 9, 5
        world.scheduler.waiting_queue = [1, 2]
        for _ in range(2):  # counters must not grow by being published again
            world.read_by(made)
        world.count((2, 0, 1), (0, 0, 3))
        world.read()
        world.read_by(made)
        ours = dict(values)
    expected = {
        "hit_rate": 2 / 6,
        "layer_hit_rate 0": 2 / 3,
        "layer_hit_rate 1": 0.0,
        "copy_bytes_per_second h2d": 4 / 10.0 * 656,
        "copy_bytes_per_second d2h": 0.0,
        "host_rows": 640,
        "host_rows_used": 384,
        "retraction_bytes": 9000,
        "retraction_bytes_used": 400,
        "windows": 5,
        "windows_used": 3,
        "write_back_backlog_rows": 4,
        "topk_entries_total 0 lru_hit": 62,
        "topk_entries_total 0 ring_hit": 10,
        "topk_entries_total 0 miss": 31,
        "topk_entries_total 1 lru_hit": 50,
        "topk_entries_total 1 ring_hit": 0,
        "topk_entries_total 1 miss": 53,
        "copied_bytes_total h2d": 84 * 656,
        "copied_bytes_total d2h": 9 * LAYERS * 656,
        "write_back_rows_total issued": 9,
        "write_back_rows_total done": 5,
    }
    for resource in shortage.RESOURCES:
        expected[f"queued_requests {resource}"] = 2 if resource == "nothing" else 0
        expected[f"retracted_requests_total {resource}"] = 4 if resource == LIMIT else 0
    assert ours == expected, {k for k in {*ours, *expected} if ours.get(k) != expected.get(k)}


CHECKS = (
    check_late_but_exact,
    check_rates,
    check_pools,
    check_shortage,
    check_retracted,
    check_log,
    check_idle_report,
    check_names,
)

# module: name of the fault: (text, what stands there instead)
FAULTS = {
    counters: {
        "buffer read before its copy is done": ("if not event.query():", "if False:"),
        "copy waited for": ("time, event = self._pending", "time, event = self._pending; event.synchronize()"),
        "asked for once only": ("self._pending = (now, event)", "self._pending = self._pending or (now, event)"),
        "time of the reading, not of the copy": ("CounterSample(time,", "CounterSample(now,"),
        "previous sample lost": ("self.previous = self.latest", "pass"),
        "ring hits for misses": ("sum(layer[2]", "sum(layer[1]"),
    },
    metrics: {
        "ring hits forgotten": ("layer[0] + layer[1]", "layer[0]"),
        "sums for the last interval": ("[new - old for", "[new for"),
        "hits copied": ("sum(layer[2] for layer in entries)", "sum(layer[0] for layer in entries)"),
        "bytes of one layer to the host": ("to_host = controller.rows_stored * sizes.host_bytes_per_token", "to_host = controller.rows_stored * sizes.row_bytes"),
        "rate over all time": ("(to_host - before.to_host_bytes)", "to_host"),
        "rows as a rate": ("_miss_rate(latest, previous) * sizes.row_bytes", "_miss_rate(latest, previous)"),
        "free for used rows": ("allocator.size - allocator.available_size()", "allocator.available_size()"),
        "free for used windows": ("coordinator.windows.num_windows - coordinator.windows.num_free", "coordinator.windows.num_free"),
        "all windows free": ("windows=coordinator.windows.num_windows", "windows=coordinator.windows.num_free"),
        "free for used memory": ("retraction_bytes_used=retraction.used", "retraction_bytes_used=retraction.total"),
        "issued for done": ("rows_done=controller.rows_arrived()", "rows_done=controller.rows_stored"),
        "retractions overwritten": ("[self._slot_limit] += num", "[self._slot_limit] = num"),
        "read again for publishing": ("self._published = False", "pass"),
        "not looked for leaks": ("self._coordinator.check_idle()", "pass"),
        "looked for leaks in every round": ("self._checked_forward = scheduler.forward_ct", "pass"),
        "leaks not told": ("raise_error_or_warn(scheduler, strict", "(lambda *a: None)(scheduler, strict"),
        "always strict": ("raise_error_or_warn(scheduler, strict", "raise_error_or_warn(scheduler, True"),
        "idle report in its time": ("scheduler.metrics_collector.last_log_time = -math.inf", "pass"),
        "last counts not asked for": ("self._refresh()  # asks", "pass  # asks"),
        "rates of the last steps while idle": ("0.0 if idle else _miss", "_miss"),
        "never read again": ("self._published = True\n        return", "return"),
    },
    shortage: {
        "a full batch lacks slots": (" or _windows_are_taken(scheduler)", ""),
        "rows of prompts forgotten": ("scheduler.req_to_token_pool.available_size() <= 0 or ", ""),
        "full flag not looked at": ("slot_limit if scheduler.running_batch.batch_is_full", "slot_limit if False"),
        "retracted forgotten": ("len(prealloc.retracted_queue)", "0"),
        "handshakes lack slots": ("sum(entry.waiting_for_input for", "sum(True for"),
        "rows not looked at": ("if prealloc.req_to_token_pool.available_size() <= 0:", "if False:"),
        "buffers not looked at": ("if prealloc.req_to_metadata_buffer_idx_allocator.available_size() <= 0:", "if False:"),
        "decode node as colocated": ("if prealloc is None:", "if True:"),
    },
    collector: {
        "directions swapped": ('stats.to_device_bytes, direction="h2d"', 'stats.to_host_bytes, direction="h2d"'),
        "rates swapped": ('stats.to_device_rate, direction="h2d"', 'stats.to_host_rate, direction="h2d"'),
        "counted twice": ("self._last[key] = total", "pass"),
        "results in another order": ('("lru_hit", "ring_hit", "miss")', '("ring_hit", "lru_hit", "miss")'),
        "one layer for all": ("count, layer=layer, result", "count, layer=0, result"),
        "done for issued": ('stats.rows_issued, state="issued"', 'stats.rows_done, state="issued"'),
        "backlog of what is done": ("stats.backlog", "stats.rows_done"),
        "retracted as queued": ("in stats.retracted.items()", "in stats.queued.items()"),
    },
}  # fmt: skip


class TestMetrics(CustomTestCase):
    def test_checks(self):
        for check in CHECKS:
            with self.subTest(check.__name__):
                check()

    def test_faults_are_seen(self):
        for module, faults in FAULTS.items():
            short = module.__name__.rsplit(".", 1)[1]
            for name, (old, new) in faults.items():
                with self.subTest(f"{short}: {name}"):
                    parts = {"metrics": tools.mutated(metrics, "import time", "import time")}
                    parts[short] = tools.mutated(module, old, new)
                    self.assertTrue(any(self.fails(check, parts) for check in CHECKS))

    @staticmethod
    def fails(check, parts):
        try:
            check(**parts)
        except AssertionError:
            return True
        return False

    def test_server_info_is_json(self):
        info = World().metrics.server_info()
        self.assertEqual(json.loads(json.dumps(info)), info)
        expected = {
            "window_size": 128,
            "write_back_ring": 64,
            "windows": 5,
            "tokens": 640,
            "tokens_limited_by": LIMIT,
            "host_rows": 640,
            "host_bytes": 704 * LAYERS * 656,
            "host_memory": "pinned",
            "retraction_bytes": SIZES.retraction_bytes,
            "device_bytes": SIZES.device_bytes(640),
            "max_running_requests": 4,
        }
        self.assertEqual({key: info[key] for key in expected}, expected)


if __name__ == "__main__":
    unittest.main()
