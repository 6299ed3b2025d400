"""Many requests against a real server on the CPU reference: random lengths, disconnects and aborts, a tiny pool.

    PYTHONPATH=test python benchmark/kv_offload/soak.py --requests 2000 --out soak.json

Every answer, whole or cut short, is compared with the tokens of a server without offloading. The server's own strict idle
checks stop it where anything leaks; its memory is sampled as it goes, and must stay flat.
"""

import argparse
import http.client
import json
import random
import re
import statistics
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Dict, List

import harness  # noqa: F401  (sets the environment; before sglang)
import psutil
from harness import environment, offload
from harness.server import Server, ServerError
from tqdm import tqdm

LENGTHS = (1, 5, 40, 64, 129, 200, 300, 450)
MAX_NEW_TOKENS = 100
COMMON = ("--kv-cache-dtype", "bfloat16", "--nsa-decode-backend", "flashmla_sparse", "--disable-radix-cache")
COMMON += ("--skip-tokenizer-init", "--log-level", "info", "--context-length", "1024")
REQUEST_S = 300
WAYS = {"finish": 0.6, "disconnect": 0.2, "abort_request": 0.2}


class Soak:
    """The load on one server, and what it found."""

    def __init__(self, server: Server, prompts: List[List[int]], expected: List[List[int]], seed: int) -> None:
        self.server, self.prompts, self.expected = server, prompts, expected
        self.counts: Counter = Counter()
        self.faults: List[str] = []
        self._seed = seed
        self._lock = threading.Lock()

    def one(self, number: int) -> None:
        """One request; its course depends on the seed and its number alone."""
        rng = random.Random(self._seed * 1_000_003 + number)
        index, n = rng.randrange(len(self.prompts)), rng.randint(1, MAX_NEW_TOKENS)
        way = rng.choices(list(WAYS), list(WAYS.values()))[0]
        patience = rng.randint(0, n)
        try:
            tokens, ended = self._converse(f"soak-{number:07d}", index, n, way, patience)
        except (OSError, ServerError, http.client.HTTPException, ValueError) as error:
            self._note(f"request {number} ({way}): {error!r}")
            return
        right = tokens == self.expected[index][: len(tokens)]
        whole = ended in ("abort", "left") or len(tokens) == n
        with self._lock:
            self.counts[f"{way}: {ended}"] += 1
            self.counts["tokens"] += len(tokens)
        if not right:
            self._note(f"request {number}: wrong tokens {tokens[:8]}...")
        if not whole or (ended == "abort" and way == "finish"):
            self._note(f"request {number} ({way}): {len(tokens)} of {n} tokens, ended by {ended}")

    def _converse(self, rid, index, n, way, patience):
        """Tokens of a streamed answer, and how it ended; cut short after ``patience`` tokens where ``way`` says so."""
        connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=REQUEST_S)
        # Of requests that may stop early the server admits too many, so that decode retracts.
        sampling = {"temperature": 0, "max_new_tokens": n, "ignore_eos": False}
        body = {"input_ids": self.prompts[index], "sampling_params": sampling, "stream": True, "rid": rid}
        tokens, aborted = [], False
        try:
            connection.request("POST", "/generate", json.dumps(body), {"content-type": "application/json"})
            if patience == 0 and way == "disconnect":
                time.sleep(0.05)
                return tokens, "left"
            if patience == 0 and way == "abort_request":
                self._abort(rid)
                aborted = True
            answer = connection.getresponse()
            if answer.status != 200:
                text = answer.read(500).decode(errors="replace")
                if aborted:
                    return tokens, "abort"
                raise ServerError(f"{answer.status} {text}")
            for line in answer:
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    if aborted:
                        return tokens, "abort"
                    raise ServerError(str(event))
                reason, latest = event["meta_info"]["finish_reason"], event["output_ids"]
                # All tokens so far; but of a request aborted while it waits, retracted too, the last token alone.
                if not (reason and reason["type"] == "abort" and latest and latest == tokens[-len(latest) :]):
                    tokens = latest
                if reason is not None:
                    return tokens, reason["type"]
                if len(tokens) >= patience and way == "disconnect":
                    return tokens, "left"
                if len(tokens) >= patience and way == "abort_request" and not aborted:
                    self._abort(rid)
                    aborted = True
            return tokens, "abort" if aborted else "cut"
        finally:
            connection.close()

    def _abort(self, rid: str) -> None:
        self.server.post("/abort_request", {"rid": rid})

    def _note(self, fault: str) -> None:
        with self._lock:
            self.faults.append(fault)
        tqdm.write(fault)


def memory_mb(server: Server) -> Dict[str, float]:
    """RSS of the scheduler process, and of all the server's processes, in MB."""
    parent = psutil.Process(server.process.pid)
    sizes = {p: p.memory_info().rss / 1e6 for p in [parent, *parent.children(recursive=True)]}
    schedulers = [rss for p, rss in sizes.items() if "scheduler" in " ".join([p.name(), *p.cmdline()])]
    return {"scheduler": round(max(schedulers or sizes.values())), "all": round(sum(sizes.values()))}


def reference(model: str, prompts, logs: Path) -> List[List[int]]:
    """Tokens without offloading."""
    with Server(model, logs / "reference.log", COMMON) as server:
        return [answer["output_ids"] for answer in server.generate_all(prompts, MAX_NEW_TOKENS)]


def retracted_by(log: str, why: str) -> int:
    """Requests retracted, by the server's log."""
    return sum(int(n) for n in re.findall(re.escape(why) + r".*?#retracted_reqs: (\d+)", log))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--at-once", type=int, default=16)
    parser.add_argument("--running", type=int, default=8, help="requests that run at a time; the others wait")
    parser.add_argument("--total-tokens", type=int, default=1536, help="of all requests; small, so that decode retracts")
    parser.add_argument("--retract-every", type=int, default=25, help="forwards between two forced retractions; 0 for none")
    parser.add_argument("--normal-loop", action="store_true", help="without the overlapped event loop")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("soak.json"))
    args = parser.parse_args()

    from tiny_model import TinySpec, write_checkpoint

    model = environment.MODELS / "tiny"
    write_checkpoint(model, TinySpec())
    logs = Path(tempfile.mkdtemp(prefix="soak-"))
    prompts = offload.prompts(LENGTHS, seed=5)
    expected = reference(str(model), prompts, logs)

    config = offload.offload_args()["decode_nsa_kv_offload_config"]
    flags = (*COMMON, "--enable-decode-nsa-kv-offload", "--decode-nsa-kv-offload-config", config)
    flags += ("--max-total-tokens", str(args.total_tokens), "--max-running-requests", str(args.running))
    flags += ("--chunked-prefill-size", "128", "--schedule-conservativeness", "0.1")
    if args.normal_loop:
        flags += ("--disable-overlap-schedule",)
    env = {}
    if args.retract_every:
        env = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": str(args.retract_every)}
    samples = []
    with Server(str(model), logs / "server.log", flags, env) as server:
        soak = Soak(server, prompts, expected, args.seed)
        begin = time.monotonic()
        with ThreadPoolExecutor(args.at_once) as pool, tqdm(total=args.requests, unit="request") as bar:
            samples.append({"requests": 0, **memory_mb(server)})
            every = max(1, args.requests // 40)
            for done, _ in enumerate(pool.map(soak.one, range(args.requests)), start=1):
                bar.update()
                if server.process.poll() is not None:
                    soak.faults.append(f"the server died: exit code {server.process.returncode}")
                    break
                if done % every == 0:
                    samples.append({"requests": done, **memory_mb(server)})
        seconds = time.monotonic() - begin
        time.sleep(3)  # some idle rounds, with their leak checks
        alive = server.process.poll() is None and server.healthy()
        if not alive:
            soak.faults.append("the server is down: " + server.log_tail(30))
        else:
            after = [answer["output_ids"] for answer in server.generate_all(prompts, MAX_NEW_TOKENS)]
            if after != expected:
                soak.faults.append("wrong tokens after the soak")
            server.flush()
        log = server.log.read_text(errors="replace")
    late = [s["scheduler"] for s in samples[len(samples) // 4 :]]
    quarter = max(1, len(late) // 3)
    growth = statistics.mean(late[-quarter:]) - statistics.mean(late[:quarter])
    result = {
        "requests": args.requests,
        "at_once": args.at_once,
        "running": args.running,
        "total_tokens": args.total_tokens,
        "retract_every": args.retract_every,
        "loop": "normal" if args.normal_loop else "overlap",
        "seed": args.seed,
        "seconds": round(seconds, 1),
        "retractions_pool_full": retracted_by(log, "KV cache pool is full. Retract requests."),
        "retractions_forced": retracted_by(log, "Testing retraction."),
        "ends": dict(sorted(soak.counts.items())),
        "alive_after": alive,
        "faults": soak.faults,
        "scheduler_rss_growth_mb_after_first_quarter": round(growth, 1),
        "rss_mb": samples,
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({k: v for k, v in result.items() if k != "rss_mb"}, indent=1))
    if soak.faults:
        raise SystemExit(f"{len(soak.faults)} faults; logs in {logs}")


if __name__ == "__main__":
    main()
