"""How much host memory a process may still take: the machine's, and what its control groups leave it."""

from __future__ import annotations

import logging
import mmap
import resource
from pathlib import Path
from typing import Iterator, NamedTuple, Optional

import psutil

logger = logging.getLogger(__name__)

HUGE_PAGE_BYTES = 2 << 20
_PROC = Path("/proc")
_CGROUPS = Path("/sys/fs/cgroup")


class _Files(NamedTuple):
    """Names of a control group's files, and of the counts in its ``memory.stat``."""

    limit: str
    usage: str
    page_cache: tuple[str, ...]
    not_clean: tuple[str, ...]


# https://docs.kernel.org/admin-guide/cgroup-v2.html and cgroup-v1/memory.html: usage holds the page
# cache, which the kernel gives back before it refuses anything. What is dirty or under way to a disk
# has to be written first. Version 1 counts the groups below in the names that begin with "total".
_V2 = _Files(
    "memory.max",
    "memory.current",
    ("active_file", "inactive_file", "slab_reclaimable"),
    ("file_dirty", "file_writeback"),
)
_V1 = _Files(
    "memory.limit_in_bytes",
    "memory.usage_in_bytes",
    ("total_active_file", "total_inactive_file"),
    ("total_dirty", "total_writeback"),
)


def available_host_bytes() -> int:
    """Bytes this process may still take: what the machine and each of its control groups have left.

    Page cache that the kernel would give back counts as free, such as that of a checkpoint that was
    just read. The reserve for other processes is not subtracted.
    """
    available = psutil.virtual_memory().available
    for folder, files in _groups():
        left = _left(folder, files)
        if left is not None:
            available = min(available, left)
    return available


def free_huge_bytes() -> Optional[int]:
    """Free memory of this machine in blocks of 2 MB and more, or None where the kernel does not say.

    Memory of a machine that has run for long lies in fragments; the GPU then maps managed memory in
    small pages, and scattered rows of it are read more slowly.
    """
    order = (HUGE_PAGE_BYTES // mmap.PAGESIZE).bit_length() - 1
    try:
        zones = [line.split()[4:] for line in (_PROC / "buddyinfo").read_text().splitlines()]
        blocks = [[int(count) for count in zone] for zone in zones]
    except (OSError, ValueError):
        return None
    pages = sum(count << place for zone in blocks for place, count in enumerate(zone) if place >= order)
    return pages * mmap.PAGESIZE


def locked_memory_limit() -> str:
    """``ulimit -l`` in words, for messages."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return "unlimited" if soft == resource.RLIM_INFINITY else f"{soft / 1e9:.3f} GB"


def _groups() -> Iterator[tuple[Path, _Files]]:
    """Folders of this process's memory groups and of all above them.

    A container sees its own group as the root of the mount, or finds the host's path in
    ``/proc/self/cgroup`` and not in the mount: both are looked at.
    """
    paths = {_V2: "/", _V1: "/"}
    try:
        for line in (_PROC / "self" / "cgroup").read_text().splitlines():
            number, controllers, path = line.split(":", 2)
            if number == "0" and not controllers:
                paths[_V2] = path
            elif "memory" in controllers.split(","):
                paths[_V1] = path
    except (OSError, ValueError):
        pass
    for files, mount in ((_V2, _CGROUPS), (_V1, _CGROUPS / "memory")):
        folder = mount / paths[files].lstrip("/")
        while folder != mount and mount in folder.parents:
            yield folder, files
            folder = folder.parent
        yield mount, files


def _left(folder: Path, files: _Files) -> Optional[int]:
    """Bytes that a group has left; None without a limit."""
    try:
        limit = int((folder / files.limit).read_text())  # "max" is none
        usage = int((folder / files.usage).read_text())
    except (OSError, ValueError):
        return None
    return max(0, limit - usage + min(usage, _reclaimable(folder, files)))


def _reclaimable(folder: Path, files: _Files) -> int:
    try:
        words = (folder / "memory.stat").read_text().split()
        counts = dict(zip(words[::2], map(int, words[1::2])))
    except (OSError, ValueError):
        return 0
    cache = sum(counts.get(name, 0) for name in files.page_cache)
    return max(0, cache - sum(counts.get(name, 0) for name in files.not_clean))
