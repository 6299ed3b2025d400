"""A real server on the CPU reference: the same tokens as the scheduler in this process, and interpreted Triton kernels."""

import os
import random
import signal

import psutil
import pytest
from harness import server as harness_server
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


def test_a_forked_server_is_a_server(tiny_model, tmp_path, monkeypatch):
    """Tokens, processes and a log of its own, an end by signal, and the exit code of one that fails."""
    monkeypatch.setattr(harness_server, "preforked", True)
    prompt = list(range(3, 80))
    with InprocScheduler(tiny_model, disable_radix_cache=True) as engine:
        (expected,) = engine.run([prompt], 8)
    with Server(tiny_model, tmp_path / "server.log", ["--disable-radix-cache"]) as server:
        assert server.generate(prompt, 8)["output_ids"] == expected
        processes = [psutil.Process(server.process.pid), *psutil.Process(server.process.pid).children(recursive=True)]
        assert len(processes) == 3
        assert "Uvicorn running" in server.log_tail()
        server.process.send_signal(signal.SIGTERM)
        server.process.wait(timeout=60)
        _, alive = psutil.wait_procs(processes[1:], timeout=30)
        # Where process 1 does not collect those whose parent has died they stay, dead.
        assert all(process.status() == psutil.STATUS_ZOMBIE for process in alive)
    parents = dict(harness_server.prefork._parents)
    monkeypatch.setenv("PYTEST_CURRENT_TEST", "another")  # as in the next test
    with pytest.raises(ServerError, match="exit code 2(.|\n)*no-such-option"):
        Server(tiny_model, tmp_path / "wrong.log", ["--no-such-option"])
    assert harness_server.prefork._parents == parents  # shared
