"""A decode node of two tensor-parallel ranks behind a prefill node of one rank or two, over mooncake on loopback.

The prefill node is made to write slowly to one of the ranks, so that a request's transfers end apart. Tokens are compared with a
pair whose decode node has no offloading; a page that has been given back must not be written to.
"""

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from harness import offload, pd, pd_recorder
from harness.server import ServerError

pytestmark = pytest.mark.skipif(pd.missing("mooncake") is not None, reason=str(pd.missing("mooncake")))

NEW_TOKENS = 16
PROMPTS = offload.prompts((1, 65, 129, 200, 300, 450), seed=21)
SLOW_RANK, SLOW_S = 1, 0.4


def start(model, folder, prefill_ranks, *decode_args, slow="-1:0"):
    return pd.Pair(
        model,
        folder,
        args=[*offload.command_line("fp8_e4m3"), "--sleep-on-idle"],
        prefill_args=["--tp-size", str(prefill_ranks), "--disable-radix-cache", "--chunked-prefill-size", "256"],
        decode_args=["--tp-size", "2", "--max-total-tokens", "2048", *decode_args],
        env={**pd_recorder.install(folder / "record"), "PD_SLOW": slow},
    )


def tokens(pair):
    return [answer["output_ids"] for answer in pair.generate_all(PROMPTS, NEW_TOKENS, at_once=3)]


@pytest.mark.parametrize("prefill_ranks", [1, 2])
def test_tokens_and_aborts(tiny_model, tmp_path, prefill_ranks):
    """The tokens of two ranks are not those of one, so another pair says what they are; that of one prefill rank need not."""
    (tmp_path / "off").mkdir(), (tmp_path / "on").mkdir()
    expected = None
    if prefill_ranks == 2:
        with start(tiny_model, tmp_path / "off", prefill_ranks) as pair:
            expected = tokens(pair)
    slow = f"{SLOW_RANK}:{SLOW_S}"
    with start(tiny_model, tmp_path / "on", prefill_ranks, *offload.offload_command_line(), slow=slow) as pair:
        found = tokens(pair)
        expected = expected or found
        assert found == expected
        aborted = storm(pair, expected)
        assert pair.decode.healthy(), pair.decode.log_tail()
        began = time.monotonic()
        assert pair.generate(PROMPTS[1], NEW_TOKENS)["output_ids"] == expected[1]
        print(f"prefill TP {prefill_ranks}: {aborted} aborted, the next request took {time.monotonic() - began:.1f} s")
        pair.decode.flush()
    assert aborted > 3
    check_pages(tmp_path / "on" / "record")


def storm(pair, expected, count=16) -> int:
    """Requests that are aborted at any time of their transfer and after, and others beside them; how many ended so."""
    rng, ended = random.Random(5), []

    def serve(i):
        victim = i % 2 == 0
        timer = threading.Timer(0.05 + rng.random() * 2 * SLOW_S, abort, (pair, f"storm-{i}"))
        if victim:
            timer.start()
        try:
            answer = pair.generate(PROMPTS[i % 6], NEW_TOKENS, rid=f"storm-{i}")
        except ServerError:
            answer = None
        if answer is None or answer["meta_info"]["finish_reason"]["type"] == "abort":
            assert victim, i
            ended.append(i)
        else:
            assert answer["output_ids"] == expected[i % 6], i

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(serve, range(count)))
    return len(ended)


def abort(pair, rid) -> None:
    for server in (pair.prefill, pair.decode):
        server.post("/abort_request", {"rid": rid})


def check_pages(record) -> None:
    """No write to a page ends after its owner has left the transfer queue, nor on another rank of it."""
    left = {(entry["room"], entry["rank"]): entry["time"] for entry in pd_recorder.read(record, "left")}
    owned = [  # (rank, page, from, until)
        (entry["rank"], page, entry["time"], left.get((entry["room"], entry["rank"]), float("inf")))
        for entry in pd_recorder.read(record, "announced")
        for page in entry["pages"]
    ]
    by_place = {}
    for rank, page, begin, end in owned:
        by_place.setdefault((rank, page), []).append((begin, end))
    sent = pd_recorder.read(record, "sent")
    assert {entry["to_rank"] for entry in sent} == {0, 1}
    slow = [entry["end"] - entry["begin"] for entry in sent if entry["to_rank"] == SLOW_RANK]
    assert min(slow) >= SLOW_S
    redirected = 0
    for entry in sent:
        for page in entry["decode_pages"]:
            if page == 0:  # of a request that was withdrawn
                redirected += 1
                continue
            spans = by_place[entry["to_rank"], page]
            assert any(begin <= entry["begin"] and entry["end"] <= end for begin, end in spans), (entry["to_rank"], page, entry["begin"], entry["end"], spans)
    print(f"{len(sent)} writes, {redirected} pages redirected")
