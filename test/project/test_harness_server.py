"""A real server on the CPU reference: the same tokens as the scheduler in this process, and interpreted Triton kernels."""

import os
import random

import pytest
from harness.environment import python_path
from harness.scheduler import InprocScheduler
from harness.server import Server, ServerError

PROBE = """
import json, os, triton
import triton.language as tl

@triton.jit
def kernel(x):
    pass

def probe():
    from sglang.srt.mem_cache import allocator
    facts = {
        "kernel": type(kernel).__name__,
        "library": type(tl.sum).__name__,
        "allocator": type(allocator.alloc_decode_kernel).__module__,
    }
    with open(os.path.join(os.environ["PROBE_OUT"], str(os.getpid())), "w") as out:
        json.dump(facts, out)
"""


@pytest.fixture
def probe(tmp_path):
    """A plugin that writes down what kernels a process has; returns the environment for it and the folder of its notes."""
    code, out = tmp_path / "code", tmp_path / "out"
    info = code / "probe-0.1.dist-info"
    info.mkdir(parents=True)
    out.mkdir()
    (code / "triton_probe.py").write_text(PROBE)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: probe\nVersion: 0.1\n")
    (info / "entry_points.txt").write_text("[sglang.srt.plugins]\nzz_probe = triton_probe:probe\n")
    path = os.pathsep.join([*python_path(), str(code)])
    return {"PYTHONPATH": path, "PROBE_OUT": str(out), "TRITON_INTERPRET": None}, out


def test_server_equals_scheduler_and_interprets_kernels(tiny_model, tmp_path, probe):
    env, notes = probe
    rnd = random.Random(3)
    prompts = [[rnd.randrange(3, 2048) for _ in range(n)] for n in (10, 65, 200)]
    with Server(tiny_model, tmp_path / "server.log", ["--disable-radix-cache"], env) as server:
        alone = [server.generate(ids, 8)["output_ids"] for ids in prompts]
        together = [answer["output_ids"] for answer in server.generate_all(prompts, 8)]
        server.flush()
        assert server.healthy()
    assert together == alone
    with InprocScheduler(tiny_model, disable_radix_cache=True) as engine:
        assert engine.run(prompts, 8) == alone

    # TRITON_INTERPRET was not set: the plugin set it in the launcher, so the scheduler process started with it.
    facts = [note.read_text() for note in notes.iterdir()]
    interpreted = '{"kernel": "InterpretedFunction", "library": "InterpretedFunction", "allocator": "sgl_cpu_ref.patching"}'
    assert interpreted in facts, facts


def test_a_server_that_dies_says_why(tiny_model, tmp_path):
    with pytest.raises(ServerError, match="no-such-option"):
        Server(tiny_model, tmp_path / "server.log", ["--no-such-option"])
