"""Memory that a transfer engine could not register."""

from __future__ import annotations

import resource
from typing import Sequence


def check_registered(code: int, lengths: Sequence[int], what: str) -> None:
    """Refuse to start with memory that no prefill node can write to.

    Args:
        code: what the engine answered, 0 for done.
        lengths: bytes of each region.
        what: is in them, for the message.

    Raises:
        RuntimeError: names the bytes, the limit of locked memory and the remedy.
    """
    if code == 0:
        return
    raise RuntimeError(
        f"The transfer engine could not register {sum(lengths) / 1e9:.2f} GB of {what} "
        f"({len(lengths)} regions, code {code}): no transfer would succeed. {remedy()}"
    )


def remedy() -> str:
    """What helps: each network card locks all of it."""
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    words = "unlimited" if limit == resource.RLIM_INFINITY else f"{limit / 1e9:.3f} GB"
    return (
        f"Locked memory is limited to {words} (`ulimit -l`), and each network card locks all of it: "
        "raise the limit (in a container `--ulimit memlock=-1`), name fewer cards with "
        "--disaggregation-ib-device, or give the pool less memory."
    )
