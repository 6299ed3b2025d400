"""A decode node with offloading behind a prefill node of stock SGLang, over mooncake on loopback.

Tokens are compared with one colocated server without the flag. ``PD_REQUESTS`` sets how many requests the long test sends.
"""

import http.client
import json
import os
import random
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
from harness import offload, pd, pd_recorder
from harness.scheduler import InprocScheduler
from harness.server import ServerError

pytestmark = pytest.mark.skipif(pd.missing("mooncake") is not None, reason=str(pd.missing("mooncake")))

REQUESTS = int(os.environ.get("PD_REQUESTS", "40"))
NEW_TOKENS = 24
EDGES = (1, 2, 63, 64, 65, 127, 128, 129, 191, 193, 700)  # pages of 64, a window of 128
PLAIN_PREFILL = ("--disable-radix-cache",)
# Its device pool holds less than the prompts do, so that rows go to its own host pool and come back.
HIERARCHICAL = ("--enable-hierarchical-cache", "--hicache-ratio", "4", "--max-total-tokens", "2048")


def mixed_prompts(count, seed=0):
    """Prompts of the edge lengths, then of random lengths up to five windows."""
    rng = random.Random(seed)
    lengths = [*EDGES, *(rng.randrange(1, 5 * offload.WINDOW) for _ in range(count))][:count]
    return offload.prompts(lengths, seed)


def start(tiny_model, folder, kv_cache_dtype, *decode_args, prefill=PLAIN_PREFILL, **env):
    return pd.Pair(
        tiny_model,
        folder,
        args=[*offload.command_line(kv_cache_dtype), "--sleep-on-idle"],
        # Chunks are sent as they are computed, so a long prompt takes several transfers.
        prefill_args=["--chunked-prefill-size", "256", *prefill],
        decode_args=[*offload.offload_command_line(), *decode_args],
        # A prefill node does not hear of an abort before the handshake; it gives up by itself, after 300 s by default.
        env={
            **pd_recorder.install(folder / "record"),
            "SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT": "90",
            "SGLANG_DISAGGREGATION_WAITING_TIMEOUT": "150",
            **env,
        },
    )


def colocated(tiny_model, kv_cache_dtype, prompts, n=NEW_TOKENS):
    """Tokens of one scheduler without the flag and without a prefix cache."""
    with InprocScheduler(tiny_model, **offload.server_args(kv_cache_dtype)) as engine:
        return engine.run(prompts, n)


def tokens(answers):
    return [answer["output_ids"] for answer in answers]


def assert_idle(pair):
    """Both nodes answer, and the decode node's idle checks, which end the server at a leak, have run."""
    time.sleep(1)
    assert pair.decode.healthy(), pair.decode.log_tail()
    assert pair.decode.process.poll() is None


def count_sent(record):
    return len(pd_recorder.read(record, "sent"))


def wait_for_transfers(record, count):
    deadline = time.monotonic() + 120
    while count_sent(record) < count:
        assert time.monotonic() < deadline, f"{count_sent(record)} of {count} transfers after 120 s"
        time.sleep(0.02)


# -- prefix cache off ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pair(tiny_model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("pair")
    with start(tiny_model, folder, "bfloat16") as pair:
        pair.folder = folder
        yield pair


@pytest.fixture(scope="module")
def prompts():
    return mixed_prompts(REQUESTS)


@pytest.fixture(scope="module")
def expected(tiny_model, prompts):
    return colocated(tiny_model, "bfloat16", prompts)


def test_prefill_node_is_stock(pair):
    assert "enable_decode_nsa_kv_offload" not in json.loads(pair.prefill.get("/server_info"))
    assert json.loads(pair.decode.get("/server_info"))["enable_decode_nsa_kv_offload"] is True


def test_tokens_equal_those_of_a_colocated_server(pair, prompts, expected):
    with ThreadPoolExecutor(1) as pool:
        # Holds its pages on the decode node only, so page ids of later requests differ between the nodes.
        long = pool.submit(pair.generate, prompts[10], 200)
        start_s = time.perf_counter()
        answers = pair.generate_all(prompts, NEW_TOKENS)
        print(f"{len(prompts)} requests in {time.perf_counter() - start_s:.1f} s")
        assert long.result()["output_ids"][:NEW_TOKENS] == expected[10]
    equal = [a == b for a, b in zip(tokens(answers), expected)]
    print(f"{sum(equal)} of {len(equal)} equal")
    assert all(equal), [i for i, same in enumerate(equal) if not same]
    assert_idle(pair)


def test_rows_went_to_host_memory_and_index_keys_to_the_device(pair):
    """After the requests of the test before."""
    record = pair.folder / "record"
    (places,) = pd_recorder.read(record, "places")
    sent = pd_recorder.read(record, "sent")
    assert len(sent) >= 2 * REQUESTS
    for transfer in sent:
        kind = "host" if transfer["latent"] else "index_keys"
        assert transfer["pointers"] == [first for first, _ in places[kind]]
        last_page = max(transfer["decode_pages"])
        for (_, size), page_bytes in zip(places[kind], transfer["page_bytes"]):
            assert (last_page + 1) * page_bytes <= size
    latent = [transfer for transfer in sent if transfer["latent"]]
    apart = [t for t in latent if not set(t["prefill_pages"]) & set(t["decode_pages"])]
    print(f"{len(apart)} of {len(latent)} transfers between pages that have no number in common")
    assert 4 * len(apart) > len(latent)


def test_a_router_in_front(pair, tmp_path, prompts, expected):
    pytest.importorskip("sglang_router", reason="sglang-router is not installed")
    with pd.Router(pair, tmp_path / "router.log") as router:
        answers = router.generate_all(prompts[:8], NEW_TOKENS)
    assert tokens(answers) == expected[:8]
    assert_idle(pair)


def test_flush_is_refused_while_a_request_runs(pair, prompts, expected):
    record = pair.folder / "record"
    with ThreadPoolExecutor(1) as pool:
        before = count_sent(record)
        running = pool.submit(pair.generate, prompts[10], 100)
        wait_for_transfers(record, before + 1)
        with pytest.raises(ServerError):
            pair.decode.flush(wait_s=0)
        assert running.result()["output_ids"][:NEW_TOKENS] == expected[10]
    assert_idle(pair)
    pair.decode.flush()
    assert tokens([pair.generate(prompts[10], NEW_TOKENS)]) == [expected[10]]


def abort(servers, rid):
    for server in servers:
        server.post("/abort_request", {"rid": rid})


def abort_until_done(servers, rid, future, within_s=200):
    """An abort may overtake its request, and is lost then."""
    deadline = time.monotonic() + within_s
    while not future.done():
        assert time.monotonic() < deadline, f"{rid} has not ended within {within_s} s of its abort"
        abort(servers, rid)
        time.sleep(0.2)


def outcome(call, *args, **body):
    """A request's tokens, or None where it was aborted or failed."""
    try:
        answer = call(*args, **body)
    except (ServerError, OSError, http.client.HTTPException):
        return None
    return None if answer["meta_info"]["finish_reason"]["type"] == "abort" else answer["output_ids"]


def test_abort_before_the_prefill_node_knows_the_request(pair, prompts, expected):
    with ThreadPoolExecutor(1) as pool:
        half = pool.submit(outcome, pair.decode.generate, prompts[5], NEW_TOKENS, rid="half", **pair.place())
        abort_until_done([pair.decode], "half", half, within_s=100)  # before the decode node gives up by itself
        assert half.result() is None
    assert tokens(pair.generate_all(prompts[:4], NEW_TOKENS)) == expected[:4]
    assert_idle(pair)


@pytest.mark.parametrize("mode", ["decode", "both"])
def test_aborts_at_any_time_leave_the_others_alone(pair, prompts, expected, mode):
    """On the decode node, or on both as a router does. (SGLang's decode nodes do not hear of one on the prefill node.)"""
    chosen = list(range(8, 20))
    rng = random.Random(mode)
    victims = {i for i in chosen if rng.random() < 0.5}
    servers = [pair.decode] if mode == "decode" else [pair.prefill, pair.decode]
    with ThreadPoolExecutor(16) as pool:
        running = {i: pool.submit(outcome, pair.generate, prompts[i], NEW_TOKENS, rid=f"{mode}-{i}") for i in chosen}
        for i in sorted(victims):
            time.sleep(rng.random() / 4)
            abort(servers, f"{mode}-{i}")
        for i in sorted(victims):
            abort_until_done(servers, f"{mode}-{i}", running[i])
        results = {i: future.result() for i, future in running.items()}
    aborted = sum(results[i] is None for i in victims)
    print("aborted:", aborted, "of", len(victims))
    assert aborted > 0
    for i in chosen:
        assert results[i] == expected[i] or (i in victims and results[i] is None), i
    assert_idle(pair)


def test_prefill_node_killed_in_a_transfer(pair, prompts, expected):
    """Last of this pair's tests: the node is replaced."""
    record = pair.folder / "record"
    with ThreadPoolExecutor(16) as pool:
        places = [pair.place() for _ in range(4)]
        prefilling, decoding = (
            [pool.submit(server.generate, ids, 150, **place) for ids, place in zip(prompts, places)]
            for server in (pair.prefill, pair.decode)
        )
        for future in prefilling:
            future.result(timeout=240)
        before = count_sent(record)
        caught = [pool.submit(outcome, pair.generate, ids, 4) for ids in offload.prompts([1900] * 4, seed=9)]
        wait_for_transfers(record, before + 2)
        os.killpg(pair.prefill.process.pid, signal.SIGKILL)
        results = [future.result(timeout=120) for future in caught]
        print("failed:", sum(tokens is None for tokens in results), "of", len(results))
        assert None in results
        assert [future.result()["output_ids"][:NEW_TOKENS] for future in decoding] == expected[:4]
    assert_idle(pair)
    pair.restart_prefill()
    # Failures counted before are forgotten at a successful heartbeat, and only nodes of some request get those.
    pair.generate(prompts[0], 2)
    time.sleep(6)
    assert tokens(pair.generate_all(prompts[:8], NEW_TOKENS)) == expected[:8]
    assert_idle(pair)


# -- prefix caches on both nodes, the prefill node's in two tiers ---------------------------------------------------------


@pytest.fixture(scope="module")
def caching_pair(tiny_model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("caching")
    with start(tiny_model, folder, "fp8_e4m3", "--disaggregation-decode-enable-radix-cache", prefill=HIERARCHICAL) as pair:
        pair.folder = folder
        yield pair


def test_prefixes_on_the_decode_node_are_reused(tiny_model, caching_pair):
    """Shared prefixes, repeated prompts, and turns that continue an earlier answer."""
    pair = caching_pair
    system = offload.prompts([250], seed=1)[0]
    # With 24 tokens more, of which the last has no row, some end with a page: the cache keeps the very last row.
    first = [system + tail for tail in offload.prompts([1, 47, 111, 200], seed=2)] + offload.prompts([41, 105], seed=3)
    assert [(len(ids) + NEW_TOKENS - 1) % 64 for ids in first].count(0) == 4
    prompts, outputs = [], []

    def turn(asked):
        """Cached tokens of each request on the decode node."""
        answers = pair.generate_all(asked, NEW_TOKENS)
        prompts.extend(asked)
        outputs.extend(tokens(answers))
        return [answer["meta_info"]["cached_tokens"] for answer in answers]

    def continued(asked, seed):
        return [ids + out + new for ids, out, new in zip(asked, outputs[-6:], offload.prompts([9, 60, 128] * 2, seed))]

    turn(first)
    repeated = turn(first)
    assert all(cached > 0 for cached, ids in zip(repeated, first) if len(ids) > 64), repeated
    second = continued(first, seed=4)
    of_second = turn(second)
    assert sum(cached > len(ids) for cached, ids in zip(of_second, first)) >= 4, of_second  # rows that decoding wrote
    third = continued(second, seed=5)
    of_third = turn(third)
    assert all(cached >= len(ids) // 64 * 64 for cached, ids in zip(of_third, second)), of_third
    print("cached tokens:", sum(repeated), sum(of_second), sum(of_third))
    expected = colocated(tiny_model, "fp8_e4m3", prompts)
    equal = [a == b for a, b in zip(outputs, expected)]
    print(f"{sum(equal)} of {len(equal)} equal")
    assert all(equal), [i for i, same in enumerate(equal) if not same]
    assert_idle(pair)
    pair.decode.flush()
    assert_idle(pair)


def test_sigterm_lets_requests_finish_and_leaves_no_process(tiny_model, caching_pair):
    """Last of this pair's tests: the decode node is gone."""
    pair, prompts = caching_pair, offload.prompts([90, 300], seed=8)
    processes = psutil.Process(pair.decode.process.pid).children(recursive=True)
    assert processes
    record = pair.folder / "record"
    with ThreadPoolExecutor(2) as pool:
        before = count_sent(record)
        running = [pool.submit(pair.generate, ids, 100) for ids in prompts]
        wait_for_transfers(record, before + 4)  # more than one of them takes, so that the decode node has both
        pair.decode.process.send_signal(signal.SIGTERM)
        answers = [future.result(timeout=300) for future in running]
    pair.decode.process.wait(timeout=120)
    assert not psutil.wait_procs(processes, timeout=60)[1]
    assert tokens(answers) == colocated(tiny_model, "fp8_e4m3", prompts, 100)


# -- retraction ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("radix", [False, True], ids=["plain", "radix"])
def test_retracted_requests_continue_with_the_same_tokens(tiny_model, tmp_path, radix):
    """Without the prefix cache because the pool is full; with it, by SGLang's own test switch."""
    prompts, n = offload.prompts([70 + 10 * i for i in range(5)], seed=6), 100
    if radix:
        args, env = ["--disaggregation-decode-enable-radix-cache"], {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "20"}
        prompts, n = [prompts[-1][:64] + ids for ids in prompts], 60
    else:
        args, env = ["--max-total-tokens", "896", "--num-reserved-decode-tokens", "16"], {}
    with start(tiny_model, tmp_path, "bfloat16", *args, **env) as pair:
        pair.generate(prompts[0], 2)
        for _ in range(3):  # requests that begin far apart may leave room for each other
            answers = pair.generate_all(prompts, n)
            retractions = sum(answer["meta_info"]["num_retractions"] for answer in answers)
            if retractions:
                break
        print("retractions:", retractions, "cached:", [answer["meta_info"]["cached_tokens"] for answer in answers])
        assert retractions > 0
        assert_idle(pair)
    assert tokens(answers) == colocated(tiny_model, "bfloat16", prompts, n)
