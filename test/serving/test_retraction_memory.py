"""A decode node whose host memory for retracted requests is small: who waits there, who stays, and who ends.

The least output and then the longest prompt is retracted first; what does not fit stays while another does.
"""

import pytest
from harness import offload
from harness.delivery import Delivery, decode_node
from harness.scheduler import InprocScheduler

PROMPTS = offload.prompts((5, 129, 200, 300), seed=3)
NEW_TOKENS = 24
ROOM = 256  # tokens that may be saved: the request of 200, or that of 129 alone


def start(tiny_model, overlap=False, offloading=True, **config):
    on = offload.offload_args(**config) if offloading else {}
    return InprocScheduler(tiny_model, overlap=overlap, **decode_node(**offload.server_args(), **on))


@pytest.fixture(scope="module")
def expected(tiny_model):
    with Delivery() as delivery, start(tiny_model, offloading=False) as engine:
        delivery.engine = engine
        return [engine.run([ids], NEW_TOKENS, **delivery.place(i))[0] for i, ids in enumerate(PROMPTS)]


@pytest.fixture(scope="module", params=[False, True], ids=["normal", "overlap"])
def node(request, tiny_model, expected):
    with Delivery() as delivery, start(tiny_model, request.param) as engine:
        delivery.engine = engine
        yield engine, delivery


@pytest.fixture
def running(node):
    """The engine with all four requests decoding, and their rids."""
    engine, delivery = node
    engine.kv_pool.retraction.total = engine.kv_pool.sizes.saved_bytes(ROOM)
    rids = [engine.submit(ids, NEW_TOKENS, **delivery.place(i)) for i, ids in enumerate(PROMPTS)]
    engine.step_until(lambda: all(len(engine.outputs[rid]) > 5 for rid in rids))
    return engine, rids


def retracted(engine):
    return [req.rid for req in engine.scheduler.disagg_decode_prealloc_queue.retracted_queue]


def finish(engine, rids, expected, ended=()):
    engine.drain()
    for rid, tokens in zip(rids, expected):
        if rid in ended:
            assert 5 < len(engine.outputs[rid]) < NEW_TOKENS
            tokens = tokens[: len(engine.outputs[rid])]
        assert engine.outputs[rid] == tokens, rid
        assert engine.finished[rid]["type"] == ("abort" if rid in ended else "length")
    assert engine.kv_pool.retraction.used == 0
    offload.check_idle(engine)
    assert engine.flush()
    offload.check_idle(engine)


def test_the_longest_that_fits_waits(running, expected):
    engine, rids = running
    engine.retract(1)
    assert retracted(engine) == rids[2:3]
    assert engine.kv_pool.retraction.used == engine.kv_pool.sizes.saved_bytes(ROOM)
    finish(engine, rids, expected)


def test_one_ends_where_none_fits(running, expected):
    engine, rids = running
    engine.retract(2)
    assert retracted(engine) == rids[2:3]
    finish(engine, rids, expected, ended=rids[3:])
    reason = engine.finished[rids[3]]
    assert int(reason["status_code"]) == 503
    for words in (" tokens take ", "retract_size_gb", "--decode-nsa-kv-offload-config"):
        assert words in reason["message"]


def test_a_pool_too_small_for_all(running, expected):
    """By occupation: the four want more pages than there are, again and again."""
    engine, rids = running
    engine.kv_pool.retraction.total = 0
    with engine.shrunk(keep=0):
        engine.step_until(lambda: any(rid in engine.finished for rid in rids))
        ended = [rid for rid in rids if rid in engine.finished and engine.finished[rid]["type"] == "abort"]
        assert ended and not retracted(engine)
        engine.step()
    finish(engine, rids, expected, ended=ended)


def test_a_pause_keeps_what_does_not_fit(running, expected):
    """SGLang gives a paused decode node's retracted requests slots again at once."""
    engine, rids = running
    engine.pause("retract")
    engine.step()
    assert [req.rid for req in engine.scheduler.waiting_queue] == rids[:2]
    assert [req.rid for req in engine.scheduler.running_batch.reqs] == rids[2:]
    engine.resume()
    finish(engine, rids, expected)


def test_an_aborted_request_leaves_its_memory(running, expected):
    engine, rids = running
    engine.retract(1)
    (victim,) = retracted(engine)
    engine.abort(victim)
    engine.step()
    assert engine.kv_pool.retraction.used == 0
    finish(engine, rids, expected, ended=[victim])


def test_memory_by_default_holds_the_longest_request(node):
    engine, _ = node
    sizes, scheduler = engine.kv_pool.sizes, engine.scheduler
    longest = min(scheduler.model_config.context_len, scheduler.max_total_num_tokens)
    assert sizes.retraction_bytes >= sizes.saved_bytes(longest)
