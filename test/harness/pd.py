"""A prefill and a decode server over a transfer backend on loopback.

Needs the backend's package: ``mooncake-transfer-engine-non-cuda`` or ``nixl``.
"""

import itertools
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Dict, List, Sequence

from harness.server import Server, free_port

# TCP in place of RDMA, and addresses that stay on the machine.
ENVIRONMENT = {
    "HOST_IP": "127.0.0.1",
    "SGLANG_HOST_IP": "127.0.0.1",
    "MC_FORCE_TCP": "1",
    "UCX_TLS": "tcp,self,sm",
}


class Pair:
    """Starts both servers; ready once constructed.

    ``args`` go to both, ``decode_args`` and ``prefill_args`` to one; logs are written to the folder ``logs``.
    """

    def __init__(
        self,
        model_path,
        logs,
        backend: str = "mooncake",
        args: Sequence[str] = (),
        prefill_args: Sequence[str] = (),
        decode_args: Sequence[str] = (),
    ) -> None:
        self.bootstrap_port = free_port()
        self._rooms = itertools.count(int(time.time()))
        shared = ["--disaggregation-transfer-backend", backend]
        shared += ["--disaggregation-bootstrap-port", str(self.bootstrap_port), *args, "--disaggregation-mode"]
        self.servers: List[Server] = []
        try:
            for mode, own in (("prefill", prefill_args), ("decode", decode_args)):
                log = Path(logs) / f"{mode}.log"
                server = Server(model_path, log, [*shared, mode, *own], ENVIRONMENT, wait=False)
                self.servers.append(server)
            for server in self.servers:
                server.wait_ready()
        except BaseException:
            self.stop()
            raise
        self.prefill, self.decode = self.servers

    def __enter__(self) -> "Pair":
        return self

    def __exit__(self, *exc) -> None:
        self.stop()

    def stop(self) -> None:
        """End both servers; idempotent."""
        for server in self.servers:
            server.stop()

    def generate(self, ids: Sequence[int], n: int = 16, **body) -> Dict[str, Any]:
        """One greedy request through the pair; returns the decode server's answer."""
        place = {
            "bootstrap_host": "127.0.0.1",
            "bootstrap_port": self.bootstrap_port,
            "bootstrap_room": next(self._rooms),
        }
        with ThreadPoolExecutor(1) as pool:
            first = pool.submit(self.prefill.generate, ids, n, **place, **body)
            answer = self.decode.generate(ids, n, **place, **body)
            first.result()
        return answer

    def generate_all(self, prompts: Sequence[Sequence[int]], n: int = 16, **body) -> List[Dict[str, Any]]:
        """`generate` for all prompts at the same time; answers in the prompts' order."""
        with ThreadPoolExecutor(len(prompts)) as pool:
            return list(pool.map(lambda ids: self.generate(ids, n, **body), prompts))
