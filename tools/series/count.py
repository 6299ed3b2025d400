"""How much of upstream's existing files the feature touches."""

import tempfile
from pathlib import Path

from . import git, stack
from .patch import Patch
from .project import Project

PEER = "HiSparse: 22 files, about 645 lines"


def count(project: Project, apart: str | None = None) -> dict[str, tuple[int, int]]:
    """Return lines added and removed by upstream path, fixes of the base aside.

    It is the net difference between the base with its fixes and the whole series, or the
    series without the patch `apart`.
    """
    states = stack.fold(project.base, _without(project, apart))
    fixes = sum(item.is_fix for item in project.series)
    return _difference(states[fixes], states[-1])


def count_apart(project: Project, apart: str) -> dict[str, tuple[int, int]]:
    """Return lines that the patch `apart` adds and removes, by upstream path."""
    without = stack.fold(project.base, _without(project, apart))[-1]
    after = stack.fold(project.base, project.series)[-1]
    return _difference({path: project.base.read(path) for path in after} | without, after)


def _without(project: Project, apart: str | None) -> tuple[Patch, ...]:
    if apart is None:
        return project.series
    index = project.index(apart)
    return project.series[:index] + project.series[index + 1 :]


def _difference(before, after) -> dict[str, tuple[int, int]]:
    """Return lines added and removed by path, from two maps of path to content."""
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
    files, changed = totals(counts)
    said = f"this series: {files} files, {changed} lines (fixes of the base aside)"
    return "\n".join([*_rows(counts), said, PEER])


def table_apart(apart: str, counts: dict[str, tuple[int, int]]) -> str:
    """Return the same of a patch that is counted apart."""
    files, changed = totals(counts)
    return "\n".join([*_rows(counts), f"apart, {apart}: {files} files, {changed} lines"])


def _rows(counts: dict[str, tuple[int, int]]) -> list[str]:
    lines = [f"{'added':>6} {'removed':>8}  file"]
    for path, (added, removed) in sorted(counts.items()):
        lines.append(f"{added:>6} {removed:>8}  {path}")
    return lines


def totals(counts: dict[str, tuple[int, int]]) -> tuple[int, int]:
    """Return the number of files and of lines added and removed."""
    return len(counts), sum(added + removed for added, removed in counts.values())
