"""What each patch makes of the upstream files it touches."""

import tempfile
from pathlib import Path

from . import git
from .base import Base
from .errors import SeriesError
from .patch import Patch


def fold(base: Base, patches: tuple[Patch, ...]) -> list[dict[str, bytes]]:
    """Return the touched files' contents before the first patch and after each one.

    Entry ``k`` maps every path that any of `patches` touches to its content once
    ``k`` patches are applied; entry 0 is the base.

    Raises SeriesError, naming the patch, when a path is not in the base or a
    hunk does not apply exactly (it may sit at another line, never with fuzz).
    """
    paths = sorted({path for item in patches for path in item.touches})
    for item in patches:
        for path in item.touches:
            if path not in base.files:
                raise SeriesError(f"{item.name}: edits {path}, which the base does not have")
    states = [{path: base.read(path) for path in paths}]
    with tempfile.TemporaryDirectory() as name:
        top = Path(name)
        write(top, states[0])
        for item in patches:
            state = states[-1]
            if item.touches:
                _apply(top, item)
                changed = {path: (top / path).read_bytes() for path in item.touches}
                state = state | changed
            states.append(state)
    return states


def write(top: Path, files: dict[str, bytes]) -> None:
    """Write `files`, a map of path to content, below `top`."""
    for path, content in files.items():
        target = top / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)


def _apply(top: Path, item: Patch) -> None:
    """Apply the hunks of `item` below `top`."""
    hunks = top / "hunks.patch"
    hunks.write_bytes(item.hunks.encode())
    try:
        git.run("apply", "--whitespace=nowarn", hunks.name, cwd=top)
    except SeriesError as error:
        raise SeriesError(f"{item.name}: does not apply: {error}") from None
