"""Server processes forked from one that has imported SGLang once: a server's three processes would each import it for 9 seconds.

    process = start(["--model-path", ...], log, environment)     # as subprocess.Popen of sglang.launch_server

The server has a session and a log of its own, and processes of its own, which it forks in turn where SGLang would spawn them; both
forks are refused to a process of several threads. There is a parent for each environment, since SGLang reads some of it while it is
imported.
"""

import atexit
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Dict, List, Optional

MOST_PARENTS = 3
# Read when they are used, so servers that differ in them alone can share a parent.
LATE = ("PD_RECORD", "SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT", "SGLANG_DISAGGREGATION_WAITING_TIMEOUT")
_parents: Dict[str, "Parent"] = {}


class Process:
    """A forked server, with what `subprocess.Popen` would offer."""

    def __init__(self, parent: "Parent") -> None:
        self._parent, self.own_pid, self.returncode = parent, None, None

    @property
    def pid(self) -> int:
        self._parent.settle()
        return self.own_pid

    def poll(self) -> Optional[int]:
        if self.returncode is None:
            if self._parent.dead():
                self.returncode = -signal.SIGKILL  # nobody is left to tell
            else:
                self.returncode = self._parent.ask({"poll": self.pid})
        return self.returncode

    def wait(self, timeout: Optional[float] = None) -> int:
        deadline = None if timeout is None else time.monotonic() + timeout
        while self.poll() is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("sglang.launch_server", timeout)
            time.sleep(0.02)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


class Parent:
    """The process that servers of one environment are forked from; it ends with this one."""

    def __init__(self, env: Dict[str, str]) -> None:
        # As a script, and without its folder on the path: to import the harness would put the patched tree in front.
        command = [sys.executable, "-P", __file__]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env, start_new_session=True)
        self.servers: List[Process] = []
        self._starting: List[Process] = []
        self._turn = threading.RLock()  # an answer belongs to the question before it

    def ask(self, question: dict):
        with self._turn:
            self.settle()
            self._send(question)
            return self._receive()

    def start(self, args: List[str], log: Path, late: Dict[str, str]) -> Process:
        """Does not wait for this process's imports, so that several of them import at the same time."""
        with self._turn:
            self._send({"start": args, "log": str(log), "env": late})
            process = Process(self)
            self.servers.append(process)
            self._starting.append(process)
            return process

    def settle(self) -> None:
        """Wait until every server is started that was asked for."""
        with self._turn:
            while self._starting:
                self._starting[0].own_pid = self._receive()
                self._starting.pop(0)

    def _send(self, question: dict) -> None:
        print(json.dumps(question), file=self._process.stdin, flush=True)

    def _receive(self):
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"the parent of servers has died, exit code {self._process.wait()}")
        return json.loads(answer)

    def dead(self) -> bool:
        return self._process.poll() is not None

    def busy(self) -> bool:
        return any(server.poll() is None for server in self.servers)

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait()


def start(args: List[str], log: Path, env: Dict[str, str]) -> Process:
    """Start a server; its output goes to ``log``."""
    late = {name: env[name] for name in LATE if name in env}
    # pytest changes its variable with every test.
    env = {name: value for name, value in env.items() if name not in (*LATE, "PYTEST_CURRENT_TEST")}
    for name in [name for name, parent in _parents.items() if parent.dead()]:
        del _parents[name]
    key = json.dumps(env, sort_keys=True)
    if key not in _parents:
        idle = [name for name, parent in _parents.items() if not parent.busy()]
        for old in idle[: max(0, len(_parents) + 1 - MOST_PARENTS)]:
            _parents.pop(old).close()
        if not _parents:
            atexit.register(lambda: [parent.close() for parent in _parents.values()])
        _parents[key] = Parent(env)
    return _parents[key].start(args, log, late)


# -- inside the parent -------------------------------------------------------------------------------------------------


def serve(args: List[str], log: str, env: Dict[str, str]) -> None:
    """In the fork: become the server; does not return."""
    code = 1
    try:
        files = os.open(os.devnull, os.O_RDONLY), os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        for target, source in ((0, files[0]), (1, files[1]), (2, files[1])):
            os.dup2(source, target)
        os.closerange(3, 256)
        os.environ.update(env)
        import multiprocessing
        import runpy

        # SGLang asks for "spawn", whose children would import everything again.
        set_method = multiprocessing.set_start_method

        def fork(method=None, force=False):
            check_one_thread()
            set_method("fork", force=True)

        multiprocessing.set_start_method = fork
        sys.argv = ["sglang.launch_server", *args]
        runpy.run_module("sglang.launch_server", run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def check_one_thread() -> None:
    threads = len(os.listdir("/proc/self/task"))
    if threads != 1:
        raise SystemExit(f"{threads} threads: not safe to fork")


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what imports print is no answer
    from sglang.srt.plugins import load_plugins

    load_plugins()
    import sglang.srt.entrypoints.http_server  # noqa: F401
    import sglang.srt.managers.detokenizer_manager  # noqa: F401
    import sglang.srt.managers.scheduler  # noqa: F401
    import sglang.srt.models.registry  # noqa: F401

    check_one_thread()
    for line in sys.stdin:
        question = json.loads(line)
        if "start" in question:
            pid = os.fork()
            if pid == 0:
                os.setsid()
                serve(question["start"], question["log"], question["env"])
            while os.getpgid(pid) != pid:  # whoever hears of it may end its group
                time.sleep(0.001)
            answer = pid
        else:
            pid, status = os.waitpid(question["poll"], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if pid else None
        print(json.dumps(answer), file=answers)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the tests' process decides
    main()
