"""How much of upstream's existing files the feature touches."""

import tempfile
from pathlib import Path

from . import git, stack
from .project import Project

PEER = "HiSparse: 22 files, about 645 lines"


def count(project: Project) -> dict[str, tuple[int, int]]:
    """Return lines added and removed by upstream path, fixes of the base aside.

    It is the net difference between the base with its fixes and the whole series.
    """
    states = stack.fold(project.base, project.series)
    fixes = sum(item.is_fix for item in project.series)
    before, after = states[fixes], states[-1]
    changed = [path for path in after if before[path] != after[path]]
    if not changed:
        return {}
    with tempfile.TemporaryDirectory() as name:
        top = Path(name)
        for side, state in (("a", before), ("b", after)):
            stack.write(top / side, {path: state[path] for path in changed})
        found = {}
        for path in changed:
            sides = (f"a/{path}", f"b/{path}")
            line = git.run("diff", "--no-index", "--numstat", *sides, cwd=top, ok=(0, 1))
            added, removed = line.decode().split("\t")[:2]
            found[path] = (int(added), int(removed))
    return found


def table(counts: dict[str, tuple[int, int]]) -> str:
    """Return `counts` as lines of text, with the sum and the peer's figures."""
    lines = [f"{'added':>6} {'removed':>8}  file"]
    for path, (added, removed) in sorted(counts.items()):
        lines.append(f"{added:>6} {removed:>8}  {path}")
    files, changed = totals(counts)
    lines.append(f"this series: {files} files, {changed} lines (fixes of the base aside)")
    lines.append(PEER)
    return "\n".join(lines)


def totals(counts: dict[str, tuple[int, int]]) -> tuple[int, int]:
    """Return the number of files and of lines added and removed."""
    return len(counts), sum(added + removed for added, removed in counts.values())
