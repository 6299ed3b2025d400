"""A prefill and a decode server over a transfer backend on loopback.

Needs the backend's package: ``mooncake-transfer-engine-non-cuda`` or ``nixl``; `missing` says what a machine lacks.
"""

import importlib
import itertools
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence

from harness.environment import REFERENCE, child_environment, python_path
from harness.server import Server, ServerError, free_port

# TCP in place of RDMA, and addresses that stay on the machine.
ENVIRONMENT = {
    "HOST_IP": "127.0.0.1",
    "SGLANG_HOST_IP": "127.0.0.1",
    "MC_FORCE_TCP": "1",
    "UCX_TLS": "tcp,self,sm",
}
MODULES = {"mooncake": "mooncake.engine", "nixl": "nixl._api"}


def missing(backend: str) -> Optional[str]:
    """Why the backend cannot run here (its package or a system library is missing); None where it can."""
    try:
        importlib.import_module(MODULES[backend])
    except ImportError as error:
        return f"{backend} cannot be imported: {error}"
    return None


class Pair:
    """Starts both servers; ready once constructed.

    Args:
        args: command line of both servers; ``prefill_args`` and ``decode_args`` go to one.
        logs: folder for ``prefill.log`` and ``decode.log``.
        stock_prefill: the prefill node runs the installed SGLang, without the series.
        env: environment variables of both; folders in its ``PYTHONPATH`` are added to the harness's own.
    """

    def __init__(
        self,
        model_path,
        logs,
        backend: str = "mooncake",
        args: Sequence[str] = (),
        prefill_args: Sequence[str] = (),
        decode_args: Sequence[str] = (),
        stock_prefill: bool = True,
        env: Optional[Dict[str, str]] = None,
    ) -> None:
        self.bootstrap_port = free_port()
        self._settings = (str(model_path), Path(logs), dict(env or {}))
        self._rooms = itertools.count(int(time.time()))
        shared = ["--disaggregation-transfer-backend", backend]
        shared += ["--disaggregation-bootstrap-port", str(self.bootstrap_port), *args, "--disaggregation-mode"]
        self._commands = {"prefill": [*shared, "prefill", *prefill_args], "decode": [*shared, "decode", *decode_args]}
        self._stock = {"prefill": stock_prefill, "decode": False}
        self.servers: Dict[str, Server] = {}
        try:
            for mode in self._commands:
                self._start(mode)
            for server in self.servers.values():
                server.wait_ready()
        except BaseException:
            self.stop()
            raise

    @property
    def prefill(self) -> Server:
        return self.servers["prefill"]

    @property
    def decode(self) -> Server:
        return self.servers["decode"]

    def restart_prefill(self) -> None:
        """Start a prefill node in place of one that was stopped or killed; ready on return."""
        self.prefill.stop()
        self._start("prefill")
        self.prefill.wait_ready()

    def _start(self, mode: str) -> None:
        model_path, logs, env = self._settings
        path = [str(REFERENCE)] if self._stock[mode] else python_path()
        path += filter(None, [env.get("PYTHONPATH")])
        env = {**ENVIRONMENT, **env, "PYTHONPATH": os.pathsep.join(path)}
        self.servers[mode] = Server(model_path, logs / f"{mode}.log", self._commands[mode], env, wait=False)

    def __enter__(self) -> "Pair":
        return self

    def __exit__(self, *exc) -> None:
        self.stop()

    def stop(self) -> None:
        """End both servers; idempotent."""
        for server in self.servers.values():
            server.stop()

    def place(self) -> Dict[str, Any]:
        """Fields that bind the two halves of one request together; new ones at each call."""
        return {
            "bootstrap_host": "127.0.0.1",
            "bootstrap_port": self.bootstrap_port,
            "bootstrap_room": next(self._rooms),
        }

    def generate(self, ids: Sequence[int], n: int = 16, decode: Optional[Dict[str, Any]] = None, **body) -> Dict[str, Any]:
        """One greedy request through the pair; returns the decode server's answer. ``decode`` adds fields to its half."""
        place = self.place()
        with ThreadPoolExecutor(1) as pool:
            first = pool.submit(self.prefill.generate, ids, n, **place, **body)
            answer = self.decode.generate(ids, n, **place, **body, **(decode or {}))
            first.result()
        return answer

    def generate_all(self, prompts: Sequence[Sequence[int]], n: int = 16, at_once: int = 16, **body) -> List[Dict[str, Any]]:
        """`generate` for all prompts, ``at_once`` of them at a time; answers in the prompts' order."""
        with ThreadPoolExecutor(at_once) as pool:
            return list(pool.map(lambda ids: self.generate(ids, n, **body), prompts))


class Router(Server):
    """SGLang's own router in front of a pair; ready once constructed. Requests to it have no bootstrap fields."""

    def __init__(self, pair: Pair, log) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = Path(log)
        command = [sys.executable, "-m", "sglang_router.launch_router", "--pd-disaggregation"]
        command += ["--prefill", pair.prefill.url, str(pair.bootstrap_port), "--decode", pair.decode.url]
        command += ["--host", "127.0.0.1", "--port", str(self.port), "--prometheus-port", str(free_port())]
        with open(self.log, "wb") as out:
            self.process = subprocess.Popen(
                command, stdout=out, stderr=subprocess.STDOUT, env=child_environment(), start_new_session=True
            )
        self.wait_ready()

    def wait_ready(self, timeout_s: float = 240) -> None:
        """Return once both nodes are behind the router; ServerError, with the router stopped, where they are not."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                self._fail(f"exit code {self.process.returncode}")
            try:
                self.get("/readiness", timeout=5)
                return
            except (ServerError, OSError):
                time.sleep(0.2)
        self._fail(f"not ready after {timeout_s} s")
