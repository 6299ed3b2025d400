"""Two tensor-parallel ranks of different speed: the same tokens, and both ranks stay in step."""

import json

from harness import offload
from harness.server import Server

LENGTHS = (65, 200, 300)
NEW_TOKENS = 20
COMMON = ("--tp-size", "2", "--disable-radix-cache", "--nsa-decode-backend", "flashmla_sparse", "--kv-cache-dtype", "bfloat16")
OFFLOAD = ("--enable-decode-nsa-kv-offload", "--decode-nsa-kv-offload-config", json.dumps({"window_size": offload.WINDOW}))


def serve(model, log, args, env=None):
    """Outputs of all prompts, at once, twice; a small pool makes decode retract."""
    with Server(model, log, args=(*COMMON, "--max-total-tokens", "640", *args), env=env) as server:
        prompts = offload.prompts(LENGTHS) * 2
        answers = server.generate_all(prompts, NEW_TOKENS)
        assert server.healthy()
    return [answer["output_ids"] for answer in answers]


def test_ranks_of_different_speed(tiny_model, tmp_path):
    expected = serve(tiny_model, tmp_path / "off.log", ())
    slow = {"SGL_CPU_REF_SLOW_RANK": "1:0.02"}
    assert serve(tiny_model, tmp_path / "on.log", OFFLOAD, env=slow) == expected
