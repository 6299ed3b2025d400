"""Multi-token prediction on a decode node with offloading, behind a prefill node of stock SGLang, over mooncake on loopback."""

import json

import pytest
from harness import offload, pd
from harness.scheduler import InprocScheduler

pytestmark = pytest.mark.skipif(pd.missing("mooncake") is not None, reason=str(pd.missing("mooncake")))

NEW_TOKENS = 24
STEPS = 3
SPECULATION = ["--speculative-algorithm", "EAGLE", "--speculative-num-steps", str(STEPS), "--disable-cuda-graph"]
SPECULATION += ["--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", str(STEPS + 1)]
PROMPTS = offload.prompts((1, 63, 64, 129, 450, 700), seed=8)


def expected_tokens(model, prompts) -> list:
    """Of a colocated server that neither offloads nor speculates."""
    with InprocScheduler(model, **offload.server_args("fp8_e4m3")) as engine:
        return engine.run(prompts, NEW_TOKENS)


def start(model, folder, **env) -> pd.Pair:
    return pd.Pair(
        model,
        folder,
        args=[*offload.command_line("fp8_e4m3"), *SPECULATION, "--sleep-on-idle"],
        prefill_args=["--chunked-prefill-size", "256", "--disable-radix-cache"],
        decode_args=offload.offload_command_line((STEPS + 1) * offload.TOP_K),
        env=env,
    )


def test_tokens(draft_model, tmp_path):
    """Two rounds: the second takes over the slots, windows and draft rows of the first."""
    expected = expected_tokens(draft_model, PROMPTS)
    with start(draft_model, tmp_path) as pair:
        for again in (slice(3, None), slice(None)):
            answers = pair.generate_all(PROMPTS[again], NEW_TOKENS)
            assert [answer["output_ids"] for answer in answers] == expected[again]
        steps = sum(answer["meta_info"]["spec_verify_ct"] for answer in answers)
        print(f"{len(PROMPTS) * NEW_TOKENS / steps:.2f} tokens a verify step")
        assert len(PROMPTS) * NEW_TOKENS > 1.2 * steps
        info = json.loads(pair.decode.get("/server_info"))
        assert info["speculative_num_steps"] == STEPS and info["enable_decode_nsa_kv_offload"] is True
        assert pair.decode.healthy(), pair.decode.log_tail()
        pair.decode.flush()


def test_retracted_requests_continue_with_the_same_tokens(draft_model, tmp_path):
    """By SGLang's own test switch. Their draft rows are lost, which costs accepted drafts and no token."""
    prompts = offload.prompts([70 + 10 * i for i in range(5)], seed=6)
    expected = expected_tokens(draft_model, prompts)
    with start(draft_model, tmp_path, SGLANG_TEST_RETRACT="1", SGLANG_TEST_RETRACT_INTERVAL="5") as pair:
        answers = pair.generate_all(prompts, NEW_TOKENS)
        retractions = sum(answer["meta_info"]["num_retractions"] for answer in answers)
        print("retractions:", retractions)
        assert retractions > 0
        assert [answer["output_ids"] for answer in answers] == expected
        pair.decode.flush()
