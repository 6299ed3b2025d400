"""A real SGLang server in processes of its own.

    with Server(tiny_model, log=tmp_path / "server.log") as server:
        print(server.generate(prompt_ids, 16)["output_ids"])
"""

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence, Set

from harness import prefork
from harness.environment import child_environment

preforked = False
"""Whether servers are forked from a process that has imported SGLang (`prefork.py`); tests that start many say so."""

READY_S = 600
REQUEST_S = 300

# A port is bound long after it was drawn, so each test worker has a range of its own; other processes have the first.
# A range's end is left to the ports that SGLang derives by adding to one.
_WORKER = 1 + int(os.environ.get("PYTEST_XDIST_WORKER", "gw-1")[2:])
_FIRST_PORT = 20000 + _WORKER % 12 * 1000
_drawn: Set[int] = set()
_random = random.SystemRandom()  # SGLang seeds the other one alike in every process


class ServerError(RuntimeError):
    """The server died, did not become ready, or refused a request."""


def free_port(count: int = 1) -> int:
    """A port that was free just now and that this process was not given before; with ``count`` the first of so many."""
    for _ in range(100):
        port = _random.randrange(_FIRST_PORT, _FIRST_PORT + 750 - count)
        ports = set(range(port, port + count))
        if ports & _drawn:
            continue
        _drawn.update(ports)
        if all(map(_is_free, ports)):
            return port
    raise ServerError("no free port")


def _is_free(port: int) -> bool:
    with socket.socket() as s:
        try:
            s.bind(("127.0.0.1", port))
            return True
        except OSError:
            return False


def _binding(command: Sequence[str]) -> Dict[str, str]:
    """A core for each tensor-parallel rank: SGLang's own choice asks how the machine's memory is laid out."""
    ranks = int(command[command.index("--tp-size") + 1]) if "--tp-size" in command else 1
    return {"SGLANG_CPU_OMP_THREADS_BIND": "|".join(map(str, range(ranks)))} if ranks > 1 else {}


class Server:
    """Starts ``sglang.launch_server`` with the stubs and the plugin; ready once constructed.

    Args:
        model_path: checkpoint folder.
        log: file for the server's output; its end is quoted in errors.
        args: more command-line arguments, such as ``("--disable-radix-cache",)``.
        env: environment variables over the harness's own.
        wait: False returns at once; call `wait_ready` later.
    """

    def __init__(
        self,
        model_path,
        log,
        args: Sequence[str] = (),
        env: Optional[Dict[str, str]] = None,
        port: Optional[int] = None,
        wait: bool = True,
    ) -> None:
        self.port = port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = Path(log)
        command = ["--model-path", str(model_path)]
        command += ["--device", "cpu", "--attention-backend", "nsa", "--host", "127.0.0.1", "--port", str(self.port)]
        command += ["--nccl-port", str(free_port())]  # SGLang's own draw is one that the kernel may give away meanwhile
        if "--enable-dp-attention" in args:  # its ranks talk over ports that follow this one
            command += ["--dist-init-addr", f"127.0.0.1:{free_port(count=12)}"]
        command += ["--mem-fraction-static", "0.1", "--max-total-tokens", "20032", "--max-running-requests", "16"]
        command += ["--skip-server-warmup", *args]
        environment = child_environment(**{**_binding(command), **(env or {})})
        if preforked:
            self.process = prefork.start(command, self.log, environment)
        else:
            command = [sys.executable, "-m", "sglang.launch_server", *command]
            with open(self.log, "wb") as out:
                self.process = subprocess.Popen(
                    command, stdout=out, stderr=subprocess.STDOUT, env=environment, start_new_session=True
                )
        if wait:
            try:
                self.wait_ready()
            except BaseException:
                self.stop()
                raise

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *exc) -> None:
        self.stop()

    def wait_ready(self, timeout_s: float = READY_S) -> None:
        """Return once the server answers; ServerError, with the server stopped, where it does not."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                self._fail(f"exit code {self.process.returncode}")
            try:
                self.get("/model_info", timeout=5)
                return
            except (ServerError, OSError):
                time.sleep(0.2)
        self._fail(f"not ready after {timeout_s} s")

    def stop(self) -> None:
        """End the server and every process it started; idempotent.

        A server takes five seconds to end by itself, which those that are forked for tests are not given.
        """
        if self.process.poll() is None and not preforked:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                pass
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait()

    # -- requests ------------------------------------------------------------------------------------------------------

    def generate(self, ids: Sequence[int], n: int = 16, **body) -> Dict[str, Any]:
        """One greedy request of ``n`` tokens; ``body`` adds fields, and ``sampling_params`` entries over the greedy ones.

        Returns the answer; its tokens are in "output_ids", or "output_ids" of the text's tokens.
        """
        sampling = {"temperature": 0, "max_new_tokens": n, "ignore_eos": True, **body.pop("sampling_params", {})}
        return self.post("/generate", {"input_ids": list(ids), "sampling_params": sampling, **body})

    def generate_all(self, prompts: Sequence[Sequence[int]], n: int = 16, **body) -> List[Dict[str, Any]]:
        """`generate` for all prompts at the same time; answers in the prompts' order."""
        with ThreadPoolExecutor(len(prompts)) as pool:
            return list(pool.map(lambda ids: self.generate(ids, n, **body), prompts))

    def flush(self, wait_s: float = 30) -> None:
        """Flush the cache; ServerError where the server is still busy after ``wait_s``.

        The overlapped scheduler is busy for one more round after its last answer.
        """
        self.post(f"/flush_cache?timeout={wait_s}", None)

    def healthy(self) -> bool:
        """Whether the health check that generates a token passes."""
        try:
            self.get("/health_generate", timeout=30)
            return True
        except (ServerError, OSError):
            return False

    def get(self, path: str, timeout: float = REQUEST_S) -> str:
        return self._open(urllib.request.Request(self.url + path), timeout)

    def post(self, path: str, body, timeout: float = REQUEST_S):
        data = b"" if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"content-type": "application/json"}, method="POST")
        text = self._open(request, timeout)
        try:
            return json.loads(text)
        except ValueError:
            return text

    def log_tail(self, lines: int = 40) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    # -- inside --------------------------------------------------------------------------------------------------------

    def _open(self, request, timeout: float) -> str:
        try:
            with urllib.request.urlopen(request, timeout=timeout) as answer:
                return answer.read().decode()
        except urllib.error.HTTPError as error:
            raise ServerError(f"{request.full_url}: {error.code} {error.read().decode(errors='replace')[:500]}") from error

    def _fail(self, what: str) -> None:
        tail = self.log_tail()
        self.stop()
        raise ServerError(f"server: {what}\n{tail}")
