"""DP attention: two data-parallel ranks, each with requests, windows and a host pool of its own.

Tokens are compared with a server of two such ranks without the flag. A request is sent to the rank that a test names.
"""

import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Dict, List, NamedTuple

import pytest
from harness import offload, pd
from harness.server import Server

from sglang.srt.mem_cache.sparsity.nsa_offload import plan

RANKS = ["--tp-size", "2", "--dp-size", "2", "--enable-dp-attention", "--disable-cuda-graph", "--disable-radix-cache"]
RANKS += ["--sleep-on-idle"]
NEW_TOKENS = 12
# Of one rank.
POOL = ["--max-total-tokens", "1024", "--max-running-requests", "16"]
# SGLang's own test switch, by a rank's steps.
RETRACT = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "7"}
TOKENS = 20480  # of a rank of the pair's decode node
SPECULATION = ["--speculative-algorithm", "EAGLE", "--speculative-eagle-topk", "1"]


class Work(NamedTuple):
    """What both servers are asked for."""

    mixed: List[List[int]]  # to either rank in turn
    crowd: List[List[int]]  # all to rank 0
    lone: List[List[int]]  # one after the other to rank 1, while rank 0 is idle
    aborted: List[List[int]]  # to rank 1, which is told to give up half of them


WORK = Work(
    offload.prompts((1, 65, 127, 129, 200, 300, 450, 64), seed=1),
    offload.prompts((190, 185, 180), seed=2),
    offload.prompts((300, 90), seed=3),
    offload.prompts((140, 150, 160, 170), seed=4),
)


class Served(NamedTuple):
    tokens: Dict[str, list]
    retractions: List[int]
    verify_steps: List[int]
    info: dict


def serve(model, log, args, env) -> Served:
    """All of ``WORK`` by a server of two ranks."""
    with Server(model, log, args=[*RANKS, *POOL, *args], env=env) as server:
        with ThreadPoolExecutor(16) as pool:

            def ask(ids, rank, n=NEW_TOKENS, **body):
                return pool.submit(server.generate, ids, n, routed_dp_rank=rank, **body)

            def outputs(futures):
                return [future.result()["output_ids"] for future in futures]

            mixed = [ask(ids, i % 2) for i, ids in enumerate(WORK.mixed)]
            answers = [future.result() for future in mixed]
            assert [answer["meta_info"]["dp_rank"] for answer in answers] == [0, 1] * 4
            crowd = [ask(ids, 0, 20) for ids in WORK.crowd]
            crowd = [future.result() for future in crowd]
            lone = [ask(ids, 1).result()["output_ids"] for ids in WORK.lone]
            beside = [ask(ids, 0, 16) for ids in WORK.lone]
            aborted = [ask(ids, 1, 300, rid=f"gone-{i}") for i, ids in enumerate(WORK.aborted[:2])]
            stay = [ask(ids, 1, 16) for ids in WORK.aborted[2:]]
            time.sleep(0.3)
            for i, future in enumerate(aborted):
                while not future.done():  # one that has not arrived yet is not heard of
                    server.post("/abort_request", {"rid": f"gone-{i}"})
                    time.sleep(0.1)
            ended = [future.result()["meta_info"]["finish_reason"]["type"] for future in aborted]
            assert ended == ["abort", "abort"], ended
            tokens = {
                "mixed": [answer["output_ids"] for answer in answers],
                "crowd": [answer["output_ids"] for answer in crowd],
                "lone": lone,
                "beside": outputs(beside),
                "stay": outputs(stay),
            }
        assert server.healthy(), server.log_tail()
        server.flush()
        return Served(
            tokens,
            [answer["meta_info"]["num_retractions"] for answer in crowd],
            [answer["meta_info"].get("spec_verify_ct") for answer in answers],
            json.loads(server.get("/server_info")),
        )


def check(model, folder, args, window=offload.WINDOW, **env):
    off = serve(model, folder / "off.log", args, env)
    on = serve(model, folder / "on.log", [*args, *offload.offload_command_line(window)], env)
    assert on.tokens == off.tokens
    assert on.verify_steps == off.verify_steps
    assert all((sum(served.retractions) > 0) == bool(env) for served in (off, on))
    states = [state["decode_nsa_kv_offload"] for state in on.info["internal_states"]]
    for state in states:
        assert (state["max_running_requests"], state["windows"], state["host_rows"]) == (8, 9, 1024)
    assert len(states) == 2
    return off, on


@pytest.mark.parametrize("dtype, loop", [("bfloat16", []), ("fp8_e4m3", ["--disable-overlap-schedule"])])
def test_tokens(tiny_model, tmp_path, dtype, loop):
    check(tiny_model, tmp_path, [*offload.command_line(dtype), *loop], **RETRACT)


@pytest.mark.parametrize("steps, more", [(1, []), (3, ["--enable-dp-lm-head"])])
def test_multi_token_prediction(draft_model, tmp_path, steps, more):
    args = [*SPECULATION, "--speculative-num-steps", str(steps), "--speculative-num-draft-tokens", str(steps + 1)]
    off, _ = check(draft_model, tmp_path, [*offload.command_line("fp8_e4m3"), *args, *more], (steps + 1) * offload.TOP_K)
    assert sum(off.verify_steps) < NEW_TOKENS * len(WORK.mixed)


def check_plan(model, info) -> None:
    """What ``plan`` answers for as many tokens is what each rank of the server has taken."""
    config = json.loads((Path(model) / "config.json").read_text())
    asked = plan.Question(
        {key: config[key] for key in plan.DEEPSEEK_V32},
        "fp8_e4m3",
        kv_bytes=10**9,
        context=TOKENS // 8,
        batch=8,  # of a rank: the server's limit of 16 is for both
        config=offload.offload_args()["decode_nsa_kv_offload_config"],
        ranks=2,
        data_ranks=2,
    )
    side = plan.answer(asked).on
    states = [state["decode_nsa_kv_offload"] for state in info["internal_states"]]
    assert len(states) == 2
    for state in states:
        assert (state["tokens"], state["windows"]) == (TOKENS, 9)
        assert (state["host_bytes"], state["device_bytes"]) == (side.host_bytes, side.device_bytes)


@pytest.mark.skipif(pd.missing("mooncake") is not None, reason=str(pd.missing("mooncake")))
@pytest.mark.parametrize("prefill_ranks, cache", [("1", []), ("2", ["--disaggregation-decode-enable-radix-cache"])])
def test_decode_node_of_a_pair(tiny_model, tmp_path, prefill_ranks, cache):
    """Each rank's rows land in its own host pool, from a prefill node of one rank or two; a repeated prompt is in its radix cache."""

    def serve_pair(folder, *decode_args) -> list:
        folder.mkdir()
        ranks = [arg for arg in RANKS if arg != "--disable-radix-cache"]
        with pd.Pair(
            tiny_model,
            folder,
            args=offload.command_line("fp8_e4m3"),
            prefill_args=["--sleep-on-idle", "--tp-size", prefill_ranks, "--disable-radix-cache", "--chunked-prefill-size", "256"],
            decode_args=[*ranks, "--max-total-tokens", str(TOKENS), *cache, *decode_args],
        ) as pair:
            prompts = WORK.mixed
            with ThreadPoolExecutor(4) as pool:
                first = list(pool.map(lambda i: pair.generate(prompts[i], NEW_TOKENS, decode={"routed_dp_rank": i % 2}), range(len(prompts))))
            again = [pair.generate(prompts[i], NEW_TOKENS, decode={"routed_dp_rank": i % 2}) for i in (5, 6)]
            assert pair.decode.healthy(), pair.decode.log_tail()
            cached = [answer["meta_info"]["cached_tokens"] for answer in again]
            if decode_args:
                check_plan(tiny_model, json.loads(pair.decode.get("/server_info")))
            return [[answer["output_ids"] for answer in first + again], [tokens > 0 for tokens in cached]]

    off = serve_pair(tmp_path / "off")
    assert serve_pair(tmp_path / "on", *offload.offload_command_line()) == off
