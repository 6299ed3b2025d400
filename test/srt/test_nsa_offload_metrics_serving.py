"""The metrics of decode KV offloading on the real scheduler, as the Prometheus endpoint shows them."""

import json
import logging
import unittest

import prometheus_client
from harness import environment, offload
from harness.scheduler import InprocScheduler
from tiny_model import TinySpec, write_checkpoint

from sglang.srt.mem_cache.sparsity.nsa_offload import collector
from sglang.srt.observability.metrics_collector import SchedulerMetricsCollector
from sglang.test.test_utils import CustomTestCase



def scraped():
    """Our metrics as the endpoint shows them: name and further labels to value."""
    values = {}
    for family in prometheus_client.REGISTRY.collect():
        for sample in family.samples:
            if sample.name.startswith(collector.PREFIX) and not sample.name.endswith("_created"):
                more = [sample.labels[k] for k in ("layer", "result", "direction", "state", "lack") if k in sample.labels]
                values[" ".join([sample.name.removeprefix(collector.PREFIX), *more])] = sample.value
    return values


class TestServing(CustomTestCase):
    """The real scheduler; Prometheus lets a process have one of each metric, so one engine."""

    PROMPTS = offload.prompts((65, 130, 200, 300))

    @classmethod
    def setUpClass(cls):
        cls.model = environment.MODELS / "tiny"
        write_checkpoint(cls.model, TinySpec())

    def test_flag_off(self):
        with InprocScheduler(self.model, **offload.server_args()) as engine:
            self.assertIsNone(engine.scheduler.nsa_offload_metrics)
            with self.assertLogs("sglang.srt.observability", logging.INFO) as logs:
                engine.run(self.PROMPTS[:1], 50)
            self.assertFalse([line for line in logs.output if "offload" in line])
            state = engine.scheduler.get_internal_state(None).internal_state
            self.assertNotIn("decode_nsa_kv_offload", state)

    def test_decode_node(self):
        """A lone one, with the fake transfer: two decode, the others wait for what they lack."""
        with InprocScheduler(
            self.model,
            disaggregation_mode="decode",
            disaggregation_transfer_backend="fake",
            max_running_requests=2,
            max_total_tokens=3008,
            **offload.server_args(),
            **offload.offload_args(),
        ) as engine:
            for room in range(8):
                engine.submit(list(range(3, 203)), 12, bootstrap_room=room)
            lacks = []
            while engine.unfinished():
                engine.step()
                metrics = engine.scheduler.nsa_offload_metrics
                lacks.append(metrics.for_publishing().queued)
                self.assertIn("#window: ", metrics.log_text())
            seen = {name for lack in lacks for name, count in lack.items() if count}
            self.assertTrue({"window", "max_total_tokens"} <= seen, seen)
            engine.drain()
            self.assertEqual(sum(metrics.for_publishing().queued.values()), 0)

    def test_flag_on(self):
        with InprocScheduler(
            self.model,
            overlap=True,
            enable_metrics=True,
            decode_log_interval=4,
            max_running_requests=3,
            **offload.server_args("fp8_e4m3"),
            **offload.offload_args(),
        ) as engine:
            scheduler = engine.scheduler
            self.assertIsInstance(scheduler.metrics_collector, SchedulerMetricsCollector)
            parts = offload.coordinator(engine)
            with self.assertLogs("sglang.srt.observability", logging.INFO) as logs:
                for prompt in self.PROMPTS:
                    engine.submit(prompt, 60)
                engine.retract(1)
                for _ in range(30):
                    engine.step()
                seen = scraped()
                engine.drain()
            lines = [line for line in logs.output if "Decode batch" in line]
            self.assertTrue(all("offload hit rate: " in line for line in lines))
            self.assertRegex(lines[-1], r"offload hit rate: 0\.\d{3}, .*#window: \d/4")

            self.assertEqual(seen["windows_used"], 3)
            self.assertEqual(seen["windows"], 4)
            self.assertGreater(seen["host_rows_used"], 65 + 130)
            self.assertGreater(seen["queued_requests window"], 0)
            self.assertEqual(seen["retracted_requests_total max_total_tokens"], 1)
            self.assertGreater(seen["copy_bytes_per_second h2d"], 0)

            seen = scraped()  # without waiting for an idle report
            self.assertEqual((seen["copy_bytes_per_second h2d"], seen["copy_bytes_per_second d2h"]), (0, 0))
            self.assertEqual(sum(value for name, value in seen.items() if name.startswith("queued_")), 0)
            (running,) = (f for f in prometheus_client.REGISTRY.collect() if f.name == "sglang:num_running_reqs")
            self.assertEqual([sample.value for sample in running.samples], [0])
            for layer, counts in enumerate(parts.lru.counters.tolist()):
                for result, count in zip(("lru_hit", "ring_hit", "miss"), counts):
                    self.assertGreater(count, 0)
                    self.assertEqual(seen[f"topk_entries_total {layer} {result}"], count)
            misses = int(parts.lru.counters[:, 2].sum())
            self.assertEqual(seen["copied_bytes_total h2d"], misses * 656)
            rows = parts.controller.rows_stored
            self.assertGreaterEqual(rows, 65 + 130 + 200 + 300)
            self.assertEqual(
                seen["copied_bytes_total d2h"], rows * parts.sizes.host_bytes_per_token
            )
            self.assertEqual(seen["write_back_rows_total done"], rows)
            self.assertEqual((seen["windows_used"], seen["host_rows_used"]), (0, 0))

            state = scheduler.get_internal_state(None).internal_state
            info = state["decode_nsa_kv_offload"]
            self.assertEqual(json.loads(json.dumps(info)), info)
            self.assertEqual((info["window_size"], info["windows"]), (offload.WINDOW, 4))
            self.assertEqual(info["host_bytes"], parts.host_pool.kv_buffer.nbytes)
            self.assertEqual(info["tokens_limited_by"], "max_total_tokens")


if __name__ == "__main__":
    unittest.main()
