"""Many requests against real servers on the CPU reference: random lengths, disconnects and aborts, a tiny pool.

    PYTHONPATH=test python benchmark/kv_offload/soak.py --requests 2000 --out soak.json          # one server
    PYTHONPATH=test python benchmark/kv_offload/soak.py --requests 2000 --pd --out soak_pd.json  # prefill and decode node

Every answer, whole or cut short, is compared with the tokens of a server without offloading. The servers' own strict idle
checks stop them where anything leaks; their memory is sampled as they go, and must stay flat.
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
from contextlib import closing
from pathlib import Path
from typing import Dict, List, Optional

import harness  # noqa: F401  (sets the environment; before sglang)
import psutil
from harness import environment, offload, pd
from harness.server import Server, ServerError
from tqdm import tqdm

LENGTHS = (1, 5, 40, 64, 129, 200, 300, 450)
COMMON = (*offload.command_line(), "--log-level", "info", "--context-length", "1024")
REQUEST_S = 300
WAYS = {"finish": 0.6, "disconnect": 0.2, "abort_request": 0.2}
EARLY = 0.3  # of those cut short: before the first token, when a pair's request waits or is being transferred
EARLY_S = 0.6


class Soak:
    """The load on one server or on a pair, and what it found.

    Args:
        server: it streams the tokens; of a pair, the decode node.
        pair: None for one server.
    """

    def __init__(self, server: Server, pair: Optional[pd.Pair], prompts, expected: List[List[int]], args) -> None:
        self.server, self.pair, self.prompts, self.expected = server, pair, prompts, expected
        self.counts: Counter = Counter()
        self.faults: List[str] = []
        self._seed, self._max_new_tokens = args.seed, args.max_new_tokens
        self._lock = threading.Lock()

    @property
    def nodes(self) -> Dict[str, Server]:
        return self.pair.servers if self.pair else {"server": self.server}

    def one(self, number: int) -> None:
        """One request; its course depends on the seed and its number alone."""
        rng = random.Random(self._seed * 1_000_003 + number)
        index, n = rng.randrange(len(self.prompts)), rng.randint(1, self._max_new_tokens)
        way = rng.choices(list(WAYS), list(WAYS.values()))[0]
        patience = 0 if rng.random() < EARLY else rng.randint(1, n)
        try:
            tokens, ended = self._converse(f"soak-{number:07d}", index, n, way, patience, rng)
        except (OSError, ServerError, http.client.HTTPException, ValueError) as error:
            self._note(f"request {number} ({way}): {error!r}")
            return
        right = tokens == self.expected[index][: len(tokens)]
        whole = ended in ("abort", "left") or len(tokens) == n
        early = " before a token" if ended in ("abort", "left") and not tokens else ""
        with self._lock:
            self.counts[f"{way}: {ended}{early}"] += 1
            self.counts["tokens"] += len(tokens)
        if not right:
            self._note(f"request {number}: wrong tokens {tokens[:8]}...")
        if not whole or (ended == "abort" and way == "finish"):
            self._note(f"request {number} ({way}): {len(tokens)} of {n} tokens, ended by {ended}")

    def _converse(self, rid, index, n, way, patience, rng):
        """Tokens of a streamed answer, and how it ended; cut short after ``patience`` tokens where ``way`` says so."""
        # Of requests that may stop early the server admits too many, so that decode retracts.
        sampling = {"temperature": 0, "max_new_tokens": n, "ignore_eos": False}
        body = {"input_ids": self.prompts[index], "sampling_params": sampling, "stream": True, "rid": rid}
        tokens, aborted = [], False
        with closing(_connect(self.server)) as connection, closing(_connect(self.nodes.get("prefill"))) as half:
            if self.pair:
                body.update(self.pair.place())
                _send(half, {**body, "stream": False})
            _send(connection, body)
            if patience == 0 and way != "finish":
                time.sleep(EARLY_S * rng.random())
                if way == "disconnect":
                    return tokens, "left"
                self._abort(rid, rng)
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
                reason, latest = event["meta_info"]["finish_reason"], event.get("output_ids") or []
                # All tokens so far; but of a request aborted while it waits, retracted too, the last token or none.
                if not (reason and reason["type"] == "abort" and latest == tokens[len(tokens) - len(latest) :]):
                    tokens = latest
                if reason is not None:
                    if self.pair and reason["type"] != "abort" and half.getresponse().status != 200:
                        raise ServerError("the prefill node's half failed")
                    return tokens, reason["type"]
                if way == "finish" or len(tokens) < patience or aborted:
                    continue
                if way == "disconnect":
                    return tokens, "left"
                self._abort(rid, rng)
                aborted = True
            return tokens, "abort" if aborted else "cut"

    def _abort(self, rid: str, rng) -> None:
        """On every node, as a router does, in either order; or on the one that streams alone."""
        nodes = list(self.nodes.values())
        rng.shuffle(nodes)
        for node in nodes if rng.random() < 0.5 else [self.server]:
            node.post("/abort_request", {"rid": rid})

    def _note(self, fault: str) -> None:
        with self._lock:
            self.faults.append(fault)
        tqdm.write(fault)


def _connect(server: Optional[Server]) -> http.client.HTTPConnection:
    return http.client.HTTPConnection("127.0.0.1", server.port if server else 0, timeout=REQUEST_S)


def _send(connection, body) -> None:
    connection.request("POST", "/generate", json.dumps(body), {"content-type": "application/json"})


def memory_mb(server: Server) -> Dict[str, float]:
    """RSS of the scheduler process, and of all the server's processes, in MB."""
    parent = psutil.Process(server.process.pid)
    sizes = {p: p.memory_info().rss / 1e6 for p in [parent, *parent.children(recursive=True)]}
    schedulers = [rss for p, rss in sizes.items() if "scheduler" in " ".join([p.name(), *p.cmdline()])]
    return {"scheduler": round(max(schedulers or sizes.values())), "all": round(sum(sizes.values()))}


def growth_mb(samples: List[dict], name: str) -> float:
    """How much a node's scheduler grew from the second quarter of the soak to the last."""
    sizes = [sample[name]["scheduler"] for sample in samples]
    quarter = max(1, len(sizes) // 4)
    return round(statistics.mean(sizes[-quarter:]) - statistics.mean(sizes[quarter : 2 * quarter]), 1)


def reference(model: str, prompts, n: int, logs: Path) -> List[List[int]]:
    """Tokens of one server without offloading."""
    with Server(model, logs / "reference.log", (*COMMON, "--disable-radix-cache", "--skip-tokenizer-init")) as server:
        return [answer["output_ids"] for answer in server.generate_all(prompts, n)]


def start(model: str, logs: Path, args):
    """The server, or the pair, under load."""
    flags = [*offload.offload_command_line(), "--max-total-tokens", str(args.total_tokens)]
    flags += ["--max-running-requests", str(args.running)]
    if args.normal_loop:
        flags += ["--disable-overlap-schedule"]
    env = {}
    if args.retract_every:
        env = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": str(args.retract_every)}
    if not args.pd:
        flags += ["--disable-radix-cache", "--chunked-prefill-size", "128", "--schedule-conservativeness", "0.1"]
        return Server(model, logs / "server.log", (*COMMON, "--skip-tokenizer-init", *flags), env)
    flags += ["--num-reserved-decode-tokens", "8"]
    if args.decode_radix:
        flags += ["--disaggregation-decode-enable-radix-cache"]
    return pd.Pair(
        model,
        logs,
        args=[*COMMON, "--skip-tokenizer-init"],
        prefill_args=["--disable-radix-cache", "--chunked-prefill-size", "128", "--max-total-tokens", "4096"],
        decode_args=flags,
        env=env,
    )


def load(soak: Soak, args, samples: List[dict]) -> None:
    """Send all requests; sample memory and check health as they go."""
    every = max(1, args.requests // 40)

    def sample(done: int) -> None:
        samples.append({"requests": done, **{name: memory_mb(node) for name, node in soak.nodes.items()}})

    with ThreadPoolExecutor(args.at_once) as pool, tqdm(total=args.requests, unit="request", mininterval=10) as bar:
        sample(0)
        for done, _ in enumerate(pool.map(soak.one, range(args.requests)), start=1):
            bar.update()
            for name, node in soak.nodes.items():
                if node.process.poll() is not None:
                    soak.faults.append(f"the {name} node died: exit code {node.process.returncode}")
                    pool.shutdown(cancel_futures=True)
                    return
            if done % every == 0:
                sample(done)
                for name, node in soak.nodes.items():
                    soak.counts[f"health checks, {name}"] += 1
                    if not node.healthy():
                        soak.faults.append(f"the {name} node is not healthy after {done} requests")


def retracted_by(log: str, why: str) -> int:
    """Requests retracted, by the server's log."""
    return sum(int(n) for n in re.findall(re.escape(why) + r".*?#retracted_reqs: (\d+)", log))


def afterwards(soak: Soak, args) -> bool:
    """Whether all nodes live, answer rightly and flush; faults are noted."""
    time.sleep(12)  # until aborted transfers have drained, and some idle rounds with their leak checks have passed
    for name, node in soak.nodes.items():
        if node.process.poll() is not None or not node.healthy():
            soak.faults.append(f"the {name} node is down: " + node.log_tail(30))
            return False
    answers = (soak.pair or soak.server).generate_all(soak.prompts, args.max_new_tokens)
    if [answer["output_ids"] for answer in answers] != soak.expected:
        soak.faults.append("wrong tokens after the soak")
    for node in soak.nodes.values():
        node.flush()
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--at-once", type=int, default=16)
    parser.add_argument("--running", type=int, default=8, help="requests that run at a time; the others wait")
    parser.add_argument("--max-new-tokens", type=int, default=40)
    parser.add_argument("--total-tokens", type=int, default=2048, help="of all requests; small, so that decode retracts")
    parser.add_argument("--retract-every", type=int, default=25, help="forwards between two forced retractions; 0 for none")
    parser.add_argument("--normal-loop", action="store_true", help="without the overlapped event loop")
    parser.add_argument("--pd", action="store_true", help="a decode node behind a stock prefill node, over mooncake")
    parser.add_argument("--decode-radix", action="store_true", help="with --pd: a prefix cache on the decode node")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("soak.json"))
    args = parser.parse_args()

    from tiny_model import TinySpec, write_checkpoint

    model = environment.MODELS / "tiny"
    write_checkpoint(model, TinySpec())
    logs = Path(tempfile.mkdtemp(prefix="soak-"))
    prompts = offload.prompts(LENGTHS, seed=5)
    expected = reference(str(model), prompts, args.max_new_tokens, logs)

    samples: List[dict] = []
    with start(str(model), logs, args) as servers:
        pair = servers if args.pd else None
        soak = Soak(pair.decode if pair else servers, pair, prompts, expected, args)
        begin = time.monotonic()
        load(soak, args, samples)
        seconds = time.monotonic() - begin
        alive = afterwards(soak, args)
        log = soak.server.log.read_text(errors="replace")
    settings = {name: value for name, value in vars(args).items() if name != "out"}
    result = {
        **settings,
        "requests_sent": sum(count for name, count in soak.counts.items() if ":" in name),
        "seconds": round(seconds, 1),
        "retractions_pool_full": retracted_by(log, "KV cache pool is full. Retract requests."),
        "retractions_forced": retracted_by(log, "Testing retraction."),
        "ends": dict(sorted(soak.counts.items())),
        "alive_after": alive,
        "faults": soak.faults,
        "scheduler_rss_growth_mb": {name: growth_mb(samples, name) for name in soak.nodes},
        "rss_mb": samples,
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({k: v for k, v in result.items() if k != "rss_mb"}, indent=1))
    if soak.faults:
        raise SystemExit(f"{len(soak.faults)} faults; logs in {logs}")


if __name__ == "__main__":
    main()
