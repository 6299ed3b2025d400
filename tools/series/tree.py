"""The build tree: the base with the series applied, to import and to edit.

Upstream's files are copies; the new files are links into this repository, so an
edit of them is live. A state file remembers what was written, which tells edits
from leftovers of an earlier build.
"""

import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from . import stack
from .base import digest
from .errors import SeriesError
from .patch import Patch
from .project import Project

STATE = ".series.json"


@dataclass
class State:
    """What the last build put into a tree."""

    wheel: str
    upto: str | None = None
    inputs: str = ""
    touched: dict[str, str] = field(default_factory=dict)
    links: list[str] = field(default_factory=list)


class Tree:
    """One build tree of `project` at `folder`."""

    def __init__(self, project: Project, folder: Path):
        self.project = project
        self.folder = folder

    def build(self, upto: str | None = None, force: bool = False) -> list[str]:
        """Bring the tree up to the series, or to its prefix that ends with `upto`.

        Returns the upstream paths whose unrefreshed edits were left in place
        because this build had nothing to write there.

        Raises SeriesError, with the tree unchanged, when it would have to
        overwrite such an edit and `force` is not given. With `force` every edit
        is discarded.
        """
        patches = self.project.prefix(upto)
        with self._locked():
            state = self._prepare()
            inputs = _inputs(patches)
            edits = self.edits(state)
            owned = self._owned(patches, upto)
            if inputs == state.inputs and not (force and edits) and self._links_stand(state, owned):
                state.upto = upto
                self._save(state)
                return edits
            final = stack.fold(self.project.base, patches)[-1]
            wanted = {path: digest(content) for path, content in final.items()}
            keep = [] if force else self._keep(edits, wanted, state)
            self._write(final, edits, keep, state, force)
            self._link(owned, state)
            state.touched, state.inputs, state.upto = wanted, inputs, upto
            self._save(state)
            return keep

    def state(self) -> State:
        """Return what the last build wrote. Raises SeriesError when there was none."""
        try:
            return State(**json.loads((self.folder / STATE).read_text()))
        except FileNotFoundError:
            raise SeriesError(f"{self.folder}: not built; run the build command") from None

    def edits(self, state: State) -> list[str]:
        """Return the upstream paths that differ from what the last build wrote.

        Deleted files and files that are neither upstream's nor links count too.
        """
        return self._unlike(state.touched)

    def differences(self, final: dict[str, bytes]) -> list[str]:
        """Return the upstream paths that differ from the base with `final` put over it."""
        return self._unlike({path: digest(content) for path, content in final.items()})

    def _unlike(self, touched: dict[str, str]) -> list[str]:
        """Return the paths that differ from the base where `touched` overrides its hashes."""
        expected = self.project.base.files | touched
        found = []
        present = set()
        for path in self._files():
            present.add(path)
            if path not in expected or digest((self.folder / path).read_bytes()) != expected[path]:
                found.append(path)
        return sorted(found + [path for path in expected if path not in present])

    def _files(self) -> Iterator[str]:
        """Yield the path of each regular file of the package, links left out."""
        for top, folders, names in os.walk(self.folder / "python"):
            folders[:] = [name for name in folders if name != "__pycache__"]
            for name in names:
                path = os.path.join(top, name)
                if not os.path.islink(path):
                    yield os.path.relpath(path, self.folder)

    def _prepare(self) -> State:
        """Return the tree's state, copying the base first where there is no tree yet."""
        wheel = self.project.base.wheel_sha256
        if (self.folder / STATE).is_file():
            state = self.state()
            if state.wheel != wheel:
                raise SeriesError(f"{self.folder}: built from another base; remove it first")
            return state
        partial = self.folder / "python.partial"
        shutil.rmtree(partial, ignore_errors=True)
        if any(path.name != f"{STATE}.lock" for path in self.folder.iterdir()):
            raise SeriesError(f"{self.folder}: not empty and not a build tree")
        shutil.copytree(self.project.base.python / "sglang", partial / "sglang")
        partial.rename(self.folder / "python")
        state = State(wheel)
        self._save(state)
        return state

    def _keep(self, edits: list[str], wanted: dict[str, str], state: State) -> list[str]:
        """Return the edits to leave alone. Raises SeriesError when one is in the way."""
        base = self.project.base.files
        keep = []
        for path in edits:
            before = state.touched.get(path, base.get(path))
            after = wanted.get(path, base.get(path))
            here = self.folder / path
            if here.is_file() and digest(here.read_bytes()) == after:
                continue
            if before != after:
                raise SeriesError(
                    f"{here}: has an unrefreshed edit that this build would overwrite; "
                    "refresh its patch, or discard the edit with --force"
                )
            keep.append(path)
        return keep

    def _write(self, final, edits, keep, state: State, force: bool) -> None:
        """Write every upstream file whose content changes and is not in `keep`."""
        for path in sorted({*final, *state.touched, *(edits if force else ())}):
            if path in keep:
                continue
            target = self.folder / path
            if path in final:
                content = final[path]
            elif path in self.project.base.files:
                content = self.project.base.read(path)
            else:
                target.unlink()
                continue
            if not target.is_file() or target.read_bytes() != content:
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(content)

    def _owned(self, patches: tuple[Patch, ...], upto: str | None) -> dict[str, Path]:
        """Return where the new files lie that belong into the tree.

        A tree of the whole series also gets new files that no patch owns yet.
        """
        paths = {path for item in patches for path in item.owns}
        if upto is None:
            paths.update(self.project.new_files())
        return {path: self.project.owned_file(path) for path in sorted(paths)}

    def _link(self, owned: dict[str, Path], state: State) -> None:
        """Make the links to the files in `owned`, and drop all others."""
        for path in state.links:
            link = self.folder / path
            if link.is_symlink():
                link.unlink()
            _drop_empty(link.parent, self.folder)
        for path, source in owned.items():
            link = self.folder / path
            link.parent.mkdir(parents=True, exist_ok=True)
            if link.exists() and not link.is_symlink():
                raise SeriesError(f"{link}: in the way of the new file {path}")
            link.unlink(missing_ok=True)
            link.symlink_to(source.resolve())
        state.links = sorted(owned)

    def _links_stand(self, state: State, owned: dict[str, Path]) -> bool:
        """Whether the links of the last build are those to `owned`, and all in place."""
        return state.links == sorted(owned) and all(
            (self.folder / path).is_symlink()
            and (self.folder / path).resolve() == source.resolve()
            for path, source in owned.items()
        )

    def _save(self, state: State) -> None:
        """Write the state file in one step."""
        partial = self.folder / f"{STATE}.partial"
        partial.write_text(json.dumps(vars(state), indent=1, sort_keys=True) + "\n")
        partial.replace(self.folder / STATE)

    @contextmanager
    def _locked(self):
        """Hold the tree against other builds."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with open(self.folder / f"{STATE}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def _inputs(patches: tuple[Patch, ...]) -> str:
    """Return a digest of all that decides a tree's content, owned files' content aside."""
    parts = [f"{item.name}\n{' '.join(item.owns)}\n{item.hunks}" for item in patches]
    return digest("\0".join(parts).encode())


def _drop_empty(folder: Path, stop: Path) -> None:
    """Remove `folder` and its parents below `stop` while they hold nothing of worth."""
    while folder != stop and folder.is_dir():
        if any(path.name != "__pycache__" for path in folder.iterdir()):
            return
        shutil.rmtree(folder)
        folder = folder.parent
