"""Every way a request can live and end, on the real scheduler: right tokens, and nothing left behind."""

import pytest
from harness import offload
from harness.scheduler import InprocScheduler
from harness.stamps import Stamps

LENGTHS = (5, 129, 300, 450)
NEW_TOKENS = 40
PROMPTS = offload.prompts(LENGTHS)


@pytest.fixture(scope="module")
def expected(tiny_model):
    """Outputs without offloading; greedy output does not depend on the batch here."""
    with InprocScheduler(tiny_model, **offload.server_args()) as engine:
        return engine.run(PROMPTS, NEW_TOKENS)


@pytest.fixture(params=[False, True], ids=["normal", "overlap"])
def overlap(request):
    return request.param


def engine_on(tiny_model, overlap=False, **more):
    settings = {**offload.server_args(), **offload.offload_args(), **more}
    return InprocScheduler(tiny_model, overlap=overlap, **settings)


def submit_all(engine):
    return [engine.submit(prompt, NEW_TOKENS) for prompt in PROMPTS]


def assert_survivors(engine, rids, expected, gone=()):
    engine.drain()
    for rid, tokens in zip(rids, expected):
        if rid not in gone:
            assert engine.outputs[rid] == tokens, rid
    offload.check_idle(engine)


def test_abort_while_waiting(tiny_model, expected, overlap):
    with engine_on(tiny_model, overlap) as engine:
        rids = submit_all(engine)
        engine.abort(rids[1])
        assert_survivors(engine, rids, expected, gone=[rids[1]])
        assert engine.finished[rids[1]]["type"] == "abort"


def test_abort_between_chunks(tiny_model, expected, overlap):
    with engine_on(tiny_model, overlap, chunked_prefill_size=128) as engine:
        rids = submit_all(engine)
        engine.step_until(lambda: engine.scheduler.chunked_req is not None)
        victim = engine.scheduler.chunked_req.rid
        engine.abort(victim)
        assert_survivors(engine, rids, expected, gone=[victim])


def test_abort_while_decoding(tiny_model, expected, overlap):
    with engine_on(tiny_model, overlap) as engine:
        rids = submit_all(engine)
        engine.step_until(lambda: len(engine.outputs[rids[2]]) > 5)
        engine.abort(rids[2])
        late = engine.submit(PROMPTS[2], NEW_TOKENS)
        assert_survivors(engine, rids + [late], expected + [expected[2]], gone=[rids[2]])


def test_abort_all(tiny_model, overlap):
    with engine_on(tiny_model, overlap) as engine:
        rids = submit_all(engine)
        engine.step_until(lambda: len(engine.outputs[rids[0]]) > 3)
        engine.abort(all_requests=True)
        engine.drain()
        offload.check_idle(engine)


def test_retracted_request_continues_with_the_same_tokens(tiny_model, expected, overlap):
    with engine_on(tiny_model, overlap) as engine:
        rids = submit_all(engine)
        engine.step_until(lambda: all(len(engine.outputs[rid]) > 4 for rid in rids))
        assert engine.retract(2)
        assert_survivors(engine, rids, expected)


def test_paused_with_retraction(tiny_model, expected, overlap):
    with engine_on(tiny_model, overlap) as engine:
        rids = submit_all(engine)
        engine.step_until(lambda: all(len(engine.outputs[rid]) > 4 for rid in rids))
        engine.pause("retract")
        engine.resume()
        assert_survivors(engine, rids, expected)


@pytest.mark.parametrize("mode", ["abort", "retract", "in_place"])
def test_paused_flushed_and_continued(tiny_model, expected, overlap, mode):
    """A flush over paused requests is refused, as without the flag; they go on with the same tokens."""
    from sglang.srt.managers.io_struct import FlushCacheReqInput, FlushCacheReqOutput

    with engine_on(tiny_model, overlap) as engine:
        rids = submit_all(engine)
        engine.step_until(lambda: all(len(engine.outputs[rid]) > 4 for rid in rids))
        before = sum(len(engine.outputs[rid]) for rid in rids)
        engine.pause(mode)
        engine.control(FlushCacheReqInput())
        for _ in range(3):
            engine.step()
        assert [reply.success for reply in engine.replies if isinstance(reply, FlushCacheReqOutput)] == [False]
        assert sum(len(engine.outputs[rid]) for rid in rids) - before <= 2 * len(rids), "it was not paused"
        engine.resume()
        assert_survivors(engine, rids, expected)
        assert engine.flush()


def test_full_host_pool_queues_or_retracts(tiny_model, expected, overlap):
    """The pool holds about two of the requests; nothing raises, and all are served."""
    with engine_on(tiny_model, overlap, max_total_tokens=640) as engine:
        rids = submit_all(engine)
        assert_survivors(engine, rids, expected)


def test_twelve_prefill_batches_without_a_decode(tiny_model, overlap):
    """Staged rows are reused while their prompts wait for a first decode step."""
    work = offload.prompts([200 + 13 * i for i in range(12)], seed=1)
    with InprocScheduler(tiny_model, **offload.server_args(), max_running_requests=32) as engine:
        wanted = engine.run(work, 6)
    settings = {"max_running_requests": 32, "chunked_prefill_size": 512, "context_length": 512}
    with engine_on(tiny_model, overlap, **settings) as engine:
        staging = offload.coordinator(engine).staging
        rids = []
        for prompt in work:  # a prompt arrives every round, and prefill goes first
            rids.append(engine.submit(prompt, 6))
            batch = engine.step()
            assert batch is None or batch.forward_mode.is_extend()
        assert sum(-(-len(prompt) // 64) for prompt in work) > 2 * staging.num_pages
        engine.drain()
        assert [engine.outputs[rid] for rid in rids] == wanted
        offload.check_idle(engine)


def test_chunked_prompts(tiny_model, expected, overlap):
    with engine_on(tiny_model, overlap, chunked_prefill_size=64) as engine:
        assert_survivors(engine, submit_all(engine), expected)


def test_windows_pass_from_request_to_request(tiny_model, expected, overlap):
    """Two windows at a time serve many owners; each owner finds its window empty."""
    with Stamps() as stamps, engine_on(tiny_model, overlap, max_running_requests=2) as engine:
        rids = submit_all(engine) + submit_all(engine)
        for _ in range(60):
            engine.step()
            stamps.check(engine)
        engine.abort(rids[-1])
        engine.drain()
        offload.check_idle(engine)
    with engine_on(tiny_model, overlap, max_running_requests=2) as engine:
        rids = submit_all(engine) + submit_all(engine)
        assert_survivors(engine, rids, expected + expected)


def test_health_check_and_flush(tiny_model, expected, overlap):
    with engine_on(tiny_model, overlap) as engine:
        engine.health_check()
        engine.drain()
        offload.check_idle(engine)
        assert engine.flush()
        assert_survivors(engine, submit_all(engine), expected)


def test_weights_updated_right_after_an_answer(tiny_model, expected, overlap):
    """The next round of the event loop has not dropped the request yet."""
    from sglang.srt.managers.io_struct import UpdateWeightFromDiskReqInput, UpdateWeightFromDiskReqOutput

    with engine_on(tiny_model, overlap) as engine:
        for ids in (PROMPTS[3], PROMPTS[0]):
            rid = engine.submit(ids, 2)
            engine.step_until(lambda: rid in engine.finished)
            engine.control(UpdateWeightFromDiskReqInput(model_path=tiny_model, load_format="auto"))
            engine.step()
            assert [reply.success for reply in engine.replies if isinstance(reply, UpdateWeightFromDiskReqOutput)][-1]
            offload.check_idle(engine)
        assert_survivors(engine, submit_all(engine), expected)


def test_prompt_beyond_the_pool_is_refused_alone(tiny_model, expected):
    with engine_on(tiny_model, max_total_tokens=640) as engine:
        too_long = engine.submit(offload.prompts([900])[0], 4)
        rids = submit_all(engine)
        assert_survivors(engine, rids, expected)
        assert too_long in engine.finished


def test_bare_flag_derives_the_number_of_windows(tiny_model):
    with engine_on(tiny_model, max_running_requests=None) as engine:
        sizes = offload.coordinator(engine).sizes
        assert engine.scheduler.max_running_requests == sizes.num_windows - 1
        engine.run(PROMPTS[:1], 4)
        offload.check_idle(engine)


def test_eager_batch_larger_than_the_largest_graph(tiny_model, expected):
    """Graph capture asks for room for its own batches; larger ones still run, without a graph."""
    with engine_on(tiny_model) as engine:
        engine.attention_backend.coordinator.inputs.reserve(1)
        assert_survivors(engine, submit_all(engine), expected)
