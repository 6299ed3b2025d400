"""``python -m demo``: run both dtypes, print the table and the verdict; exit 1 where evidence is missing."""

import argparse
import sys
import time
from pathlib import Path
from typing import List

from demo import report
from demo.evidence import gather
from demo.judge import failures
from demo.pair import run_pair
from demo.workload import phases
from harness.environment import MODELS, ROOT
from harness.server import ServerError
from tiny_model import TinySpec, write_checkpoint

DTYPES = ("bfloat16", "fp8_e4m3")
SHOWN = 10


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m demo", description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "demo", help="folder of report, tokens and logs")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=DTYPES)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    model = MODELS / "tiny"
    write_checkpoint(model, TinySpec())
    start = time.monotonic()
    work = phases()
    requests = [request for phase in work for request in phase.requests]
    print(report.headline(len(requests)), flush=True)
    try:
        evidences = [gather(run_pair(dtype, model, work, args.out), requests) for dtype in args.dtypes]
    except (ServerError, OSError) as error:
        print(f"\nFAILED: {error}\nLogs are in {args.out}.", file=sys.stderr)
        return 1
    lacks: List[str] = [text for evidence in evidences for text in failures(evidence)]
    seconds = time.monotonic() - start
    path = args.out / "report.json"
    report.write(path, evidences, lacks, seconds)
    print(f"\n{report.table(evidences)}\n")
    for text in lacks[:SHOWN]:
        print(f"FAILED: {text}")
    if len(lacks) > SHOWN:
        print(f"FAILED: and {len(lacks) - SHOWN} more")
    verdict = "FAILED" if lacks else "PASSED: tokens are equal, and every kind of row was fetched"
    print(f"{verdict} ({seconds:.0f} s). {path.relative_to(ROOT) if path.is_relative_to(ROOT) else path}")
    return 1 if lacks else 0


if __name__ == "__main__":
    sys.exit(main())
