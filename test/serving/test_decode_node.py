"""An in-process decode node: every state of a request's life there, aborted, flushed over and paused in.

The prefill node is stood in for by `Delivery`, so that a request stays in a state for as long as a test wants; tokens are
compared with a decode node without the flag that got the same rows.
"""

from unittest import mock

import pytest
from harness import offload
from harness.delivery import Delivery, decode_node
from harness.scheduler import InprocScheduler
from sglang.srt.disaggregation.fake.conn import FakeKVReceiver
from sglang.srt.mem_cache.sparsity.nsa_offload.controller import SparseCacheController

PROMPTS = offload.prompts((129, 300, 5, 200), seed=3)
NEW_TOKENS = 24


def start(tiny_model, overlap=False, offloading=True, **more):
    on = offload.offload_args() if offloading else {}
    settings = {**offload.server_args(), **on, "max_running_requests": 2, **more}
    return InprocScheduler(tiny_model, overlap=overlap, **decode_node(**settings))


@pytest.fixture(scope="module")
def expected(tiny_model):
    with Delivery() as delivery, start(tiny_model, offloading=False) as engine:
        delivery.engine = engine
        return [engine.run([ids], NEW_TOKENS, **delivery.place(i))[0] for i, ids in enumerate(PROMPTS)]


@pytest.fixture(scope="module", params=[False, True], ids=["normal", "overlap"])
def node(request, tiny_model, expected):
    """An engine and its delivery, idle between tests; the pool holds about two of the requests. (One engine at a time.)"""
    with Delivery() as delivery, start(tiny_model, request.param, max_total_tokens=704) as engine:
        delivery.engine = engine
        yield engine, delivery


def queues(engine):
    """Requests by where the scheduler keeps them."""
    scheduler = engine.scheduler
    prealloc = scheduler.disagg_decode_prealloc_queue
    return {
        "waiting": [entry.req.rid for entry in prealloc.queue],
        "retracted": [req.rid for req in prealloc.retracted_queue],
        "transferring": [entry.req.rid for entry in scheduler.disagg_decode_transfer_queue.queue],
        "admission": [req.rid for req in scheduler.waiting_queue],
        "running": [req.rid for req in scheduler.running_batch.reqs],
    }


def bring_to(engine, delivery, state):
    """Submit requests until one is in a state. Returns its rid, the prompt's number of each, and the room that is held."""
    room = None
    rids = {engine.submit(PROMPTS[i], NEW_TOKENS, **delivery.place(i)): i for i in range(2)}
    engine.step_until(lambda: all(engine.outputs[rid] for rid in rids))
    if state in ("first step", "running"):
        victim = list(rids)[1]
        engine.step_until(lambda: len(engine.outputs[victim]) >= (1 if state == "first step" else 8))
        state = "running"
    elif state == "retracted":
        engine.retract(1)
        (victim,) = queues(engine)["retracted"]
    elif state == "resumed":
        engine.retract(1)
        (victim,) = queues(engine)["retracted"]
        engine.step_until(lambda: victim in queues(engine)["running"])
        state = "running"
    else:  # a third: two may run, and three have slots
        number = 3 if state == "waiting" else 2
        held = delivery.place(number, hold=state == "transferring")
        victim = engine.submit(PROMPTS[number], NEW_TOKENS, **held)
        rids[victim] = number
        if state == "waiting":  # for slots: the pool is full
            late = engine.submit(PROMPTS[2], NEW_TOKENS, **delivery.place(2))
            rids[late] = 2
        engine.step_until(lambda: victim in queues(engine)[state], max_steps=10)
        if state == "transferring":
            room = held["bootstrap_room"]
    assert victim in queues(engine)[state], queues(engine)
    return victim, rids, room


def flush(engine):
    from sglang.srt.managers.io_struct import FlushCacheReqInput, FlushCacheReqOutput

    engine.control(FlushCacheReqInput())
    engine.step()
    return [reply for reply in engine.replies if isinstance(reply, FlushCacheReqOutput)][-1].success


STATES = ("waiting", "transferring", "admission", "first step", "running", "retracted", "resumed")


@pytest.mark.parametrize("state", STATES)
def test_abort(node, expected, state):
    engine, delivery = node
    victim, rids, room = bring_to(engine, delivery, state)
    engine.abort(victim)
    assert not flush(engine), "flushed over requests"
    engine.health_check()
    if room is not None:
        engine.step_until(lambda: len(engine.outputs[next(iter(rids))]) > 15)
        delivery.deliver(room)
    late = engine.submit(PROMPTS[1], NEW_TOKENS, **delivery.place(1))
    rids[late] = 1
    finish(engine)
    assert engine.finished[victim]["type"] == "abort"
    check_tokens(engine, rids, expected, gone=victim)


@pytest.mark.parametrize(
    "state, mode",
    [
        ("transferring", "retract"),
        ("running", "retract"),
        ("running", "in_place"),
        ("running", "abort"),
        ("retracted", "retract"),
    ],
)
def test_pause_flush_and_resume(node, expected, state, mode):
    engine, delivery = node
    _, rids, room = bring_to(engine, delivery, state)
    engine.pause(mode)
    assert not flush(engine), "flushed over requests"
    if room is not None:
        delivery.deliver(room)
    engine.step()
    engine.resume()
    finish(engine)
    check_tokens(engine, rids, expected)


def finish(engine):
    health = [rid for rid in engine.unfinished() if rid.startswith("HEALTH_CHECK")]
    for rid in health:  # a busy scheduler drops them
        del engine.outputs[rid]
    engine.drain()


def check_tokens(engine, rids, expected, gone=None):
    for rid, number in rids.items():
        tokens = engine.outputs[rid]
        assert tokens == expected[number][: len(tokens)], (rid, number)
        assert len(tokens) == NEW_TOKENS or rid == gone, (rid, len(tokens))
    engine.idle_checks()
    offload.coordinator(engine).check_idle()
    assert engine.flush()
    offload.check_idle(engine)


class Pending:
    """Stands in for the event of a forward or a copy that goes on for as long as a test wants."""

    done = False

    def query(self):
        return self.done


def test_prefill_node_learns_of_slots_when_nothing_writes_to_them(node, expected):
    """Until then nobody waits: the other request decodes on, and the new one is in transfer."""
    engine, delivery = node
    event, asked, told = Pending(), [], []
    in_flight, send = SparseCacheController.writes_in_flight, FakeKVReceiver.send_metadata

    def forwards_go_on(controller, forwards):
        asked.append((forwards, bool(offload.coordinator(engine)._released)))
        return in_flight(controller, forwards) + [event] * forwards

    def noted(receiver, *args, **more):
        told.append(receiver.room)
        send(receiver, *args, **more)

    with (
        mock.patch.object(SparseCacheController, "writes_in_flight", forwards_go_on),
        mock.patch.object(FakeKVReceiver, "send_metadata", noted),
    ):
        first, second = [engine.submit(PROMPTS[2], 8 + 16 * i, **delivery.place(2)) for i in range(2)]
        engine.step_until(lambda: first in engine.finished)
        place = delivery.place(0)
        third = engine.submit(PROMPTS[0], NEW_TOKENS, **place)
        for _ in range(4):
            engine.step()
        assert asked[-1] == (True, True) and place["bootstrap_room"] not in told
        assert queues(engine)["transferring"] == [third] and len(engine.outputs[second]) > 8
        event.done = True
        engine.step()
        assert place["bootstrap_room"] in told
        engine.drain()
    assert (False, False) in asked and all(forwards == released for forwards, released in asked)
    check_tokens(engine, {third: 0}, expected)


def test_abort_before_the_prefill_node_knows_the_slots(node, expected):
    """The transfer has not begun: the slots are free when it could have."""
    engine, delivery = node
    event = Pending()
    with mock.patch.object(SparseCacheController, "writes_in_flight", lambda controller, forwards: [event]):
        victim = engine.submit(PROMPTS[1], NEW_TOKENS, **delivery.place(1))
        engine.step_until(lambda: victim in queues(engine)["transferring"])
        (entry,) = engine.scheduler.disagg_decode_transfer_queue.queue
        assert isinstance(entry.kv_receiver, FakeKVReceiver) and not entry.kv_receiver.has_sent_metadata
        engine.abort(victim)
        engine.step()
        assert engine.finished[victim]["type"] == "abort" and not flush(engine)
        event.done = True
        engine.drain()
    check_tokens(engine, {victim: 1}, expected, gone=victim)
