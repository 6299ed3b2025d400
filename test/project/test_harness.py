"""The harness drives SGLang's scheduler faithfully: results, lifecycle, and the faults it has to show."""

import random
import threading

import pytest
import torch

from harness.scheduler import InprocScheduler
from harness.stepper import Stepper

HISPARSE = {
    "enable_hisparse": True,
    "hisparse_config": '{"top_k": 64, "device_buffer_size": 128, "host_to_device_ratio": 4}',
    "disable_radix_cache": True,
}


def prompts(*lengths, seed=0):
    rnd = random.Random(seed)
    return [[rnd.randrange(3, 2048) for _ in range(n)] for n in lengths]


@pytest.fixture(scope="module")
def expected(tiny_model):
    """Prompts and their outputs, each run alone by the plain scheduler."""
    ids = prompts(10, 63, 65, 200, 330)
    with InprocScheduler(tiny_model) as engine:
        outputs = []
        for prompt in ids:
            outputs += engine.run([prompt], 12)
            assert engine.flush()
        assert engine.run(ids[-1:], 12) == outputs[-1:]  # deterministic, over a flush
        assert engine.run(ids[-1:], 12) == outputs[-1:]  # and with its prefix cached
    return ids, outputs


@pytest.mark.parametrize(
    "options",
    [{}, {"overlap": True}, {"disable_radix_cache": True}, {"chunked_prefill_size": 128}, HISPARSE],
    ids=["normal", "overlap", "no-radix", "chunked", "hisparse"],
)
def test_batch_equals_alone(tiny_model, expected, options):
    ids, outputs = expected
    with InprocScheduler(tiny_model, **options) as engine:
        assert engine.run(ids, 12) == outputs
        engine.idle_checks()


@pytest.mark.parametrize("overlap", [False, True])
def test_fp8_batch_equals_alone(tiny_model, overlap):
    ids = prompts(65, 200, 330)
    with InprocScheduler(tiny_model, overlap=overlap, kv_cache_dtype="fp8_e4m3") as engine:
        alone = [engine.run([prompt], 8)[0] for prompt in ids]
        assert engine.flush()
        assert engine.run(ids, 8) == alone
        assert engine.kv_pool.kv_buffer[0].shape[-1] == 656


@pytest.mark.parametrize("overlap", [False, True])
def test_retract_and_recompute(tiny_model, expected, overlap):
    ids, outputs = expected
    with InprocScheduler(tiny_model, overlap=overlap, disable_radix_cache=True) as engine:
        rids = [engine.submit(prompt, 12) for prompt in ids]
        engine.step_until(lambda: min(len(engine.outputs[rid]) for rid in rids) >= 3)
        retracted = engine.retract(2)
        assert len(retracted) == 2
        engine.drain()
        assert [engine.outputs[rid] for rid in rids] == outputs


def test_pause_retracts_all_and_resumes(tiny_model, expected):
    ids, outputs = expected
    with InprocScheduler(tiny_model, disable_radix_cache=True) as engine:
        rids = [engine.submit(prompt, 12) for prompt in ids]
        engine.step_until(lambda: min(len(engine.outputs[rid]) for rid in rids) >= 3)
        engine.pause("retract")
        assert engine.step() is None and engine.scheduler.running_batch.is_empty()
        engine.resume()
        engine.drain()
        assert [engine.outputs[rid] for rid in rids] == outputs


def test_shrunk_pool_retracts(tiny_model, expected):
    ids, outputs = expected
    with InprocScheduler(tiny_model, disable_radix_cache=True) as engine:
        rids = [engine.submit(prompt, 12) for prompt in ids]
        engine.step_until(lambda: min(len(engine.outputs[rid]) for rid in rids) >= 1)
        with engine.shrunk(0):
            engine.step_until(lambda: engine.scheduler.num_retracted_reqs > 0, 20)
        engine.drain()
        assert [engine.outputs[rid] for rid in rids] == outputs


@pytest.mark.parametrize("overlap", [False, True])
def test_abort_waiting_and_running(tiny_model, expected, overlap):
    ids, outputs = expected
    with InprocScheduler(tiny_model, overlap=overlap) as engine:
        running, kept = engine.submit(ids[3], 1000), engine.submit(ids[4], 12)
        engine.step_until(lambda: len(engine.outputs[running]) >= 2)
        waiting = engine.submit(ids[2], 12)
        engine.abort(waiting)
        engine.abort(running)
        engine.drain()
        assert engine.finished[running]["type"] == engine.finished[waiting]["type"] == "abort"
        assert engine.outputs[kept] == outputs[4]
        engine.idle_checks()


def test_health_check(tiny_model):
    with InprocScheduler(tiny_model) as engine:
        rid = engine.health_check()
        engine.drain()
        assert len(engine.outputs[rid]) == 1 and engine.finished[rid]["type"] == "length"


def test_a_leak_is_raised(tiny_model):
    with InprocScheduler(tiny_model) as engine:
        engine.run(prompts(70), 2)
        engine.scheduler.token_to_kv_pool_allocator.alloc(64)
        with pytest.raises(ValueError, match="leak"):
            engine.idle_checks()


def test_slots_name_the_rows(tiny_model):
    with InprocScheduler(tiny_model) as engine:
        rid = engine.submit(prompts(70)[0], 8)
        engine.step_until(lambda: len(engine.outputs[rid]) >= 3)
        slots = engine.slots(rid)
        assert len(slots) == 70 + 2  # the newest token has no KV yet
        assert engine.kv_pool.kv_buffer[2][slots.long()].float().abs().sum(-1).gt(0).all()
        with pytest.raises(KeyError):
            engine.request("nobody")
        engine.drain()


def test_no_watchdog_outlives_its_scheduler(tiny_model):
    with InprocScheduler(tiny_model):
        pass
    with pytest.raises(Exception, match="max_total_tokens|Not enough memory|page"):
        InprocScheduler(tiny_model, max_total_tokens=1)
    assert not [thread for thread in threading.enumerate() if "watchdog" in thread.name]


def test_graph_inputs_end_with_their_scheduler(tiny_model):
    """SGLang keeps them by name for the process: the next one's graphs would be captured on rows and slots it does not have."""
    from sglang.srt.model_executor.input_buffers import _forward_input_buffer_pool as kept

    with InprocScheduler(tiny_model):
        kept["req_pool_indices"] = torch.full((8,), 70)
    assert not kept


def test_stepper_hands_over_and_ends():
    rounds = []

    def loop():
        while True:
            stepper.pause()
            rounds.append(len(rounds))
            if len(rounds) == 3:
                raise ValueError("third")

    stepper = Stepper(loop)
    stepper.step()
    assert rounds == [0]
    stepper.step()
    with pytest.raises(ValueError, match="third"):
        stepper.step()
    assert not stepper.alive
    with pytest.raises(RuntimeError):
        stepper.step()
    stepper.stop()
