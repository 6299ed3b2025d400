"""Check that every prefix of the series stands on its own."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from . import stack
from .errors import SeriesError
from .patch import Patch
from .project import Project
from .tree import Tree

ENVIRONMENT = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "HF_HUB_OFFLINE": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
}
TREE = "build/sglang"

# Imports each module named on the command line; prints a JSON map of name to fault.
_IMPORTER = """
import importlib, json, sys
faults = {}
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except BaseException as error:
        faults[name] = f"{type(error).__name__}: {error}"
sys.__stdout__.write("\\n" + json.dumps(faults) + "\\n")
sys.__stdout__.flush()
"""


@dataclass(frozen=True)
class Options:
    """What to run on each prefix, and with what.

    `tests` runs the tests that each patch owns once it is applied; `every_test`
    runs all that are owned so far. `stubs` goes ahead of the tree on PYTHONPATH.
    """

    stubs: Path
    imports: bool = True
    tests: bool = False
    every_test: bool = False
    test_timeout: int = 3600


def layout(project: Project) -> None:
    """Raise SeriesError unless each new file has an owner and each owned file is there."""
    owned = {path for item in project.series for path in item.owns}
    for path in sorted(owned):
        project.owned_file(path)
    for path in project.new_files():
        if path not in owned:
            raise SeriesError(f"{path}: owned by no patch; add it under Owns of one")


def prefixes(project: Project, options: Options, say: Callable[[str], None]) -> None:
    """Walk a copy of the base through the series, checking it after each patch.

    The copy lies in ``build/check``, a stand-in for this repository at that prefix.

    `say` is told one line a patch. Raises SeriesError at the first prefix that
    does not apply, import or pass.
    """
    series = project.series
    states = stack.fold(project.base, series)
    top = project.root / "build" / "check"
    tree = top / TREE
    _stand_in(project, top)
    broken = _baseline(top, series, options) if options.imports and series else {}
    for name, fault in broken.items():
        say(f"  {name} does not import from the base either, so it is left out: {fault}")
    for index, item in enumerate(series):
        stack.write(tree, {path: states[index + 1][path] for path in item.touches})
        for path in item.owns:
            content = project.owned_file(path).read_bytes()
            stack.write(top if path.startswith("test/") else tree, {path: content})
        done = [f"{len(item.touches)} edited", f"{len(item.owns)} new"]
        if options.imports:
            names = [name for name in _modules(series[: index + 1]) if name not in broken]
            _import_all(top, item, names, options)
            done.append(f"{len(names)} modules import")
        tests = _tests(series[: index + 1] if options.every_test else (item,))
        if options.tests and tests:
            done.append(_run_tests(top, item, tests, options))
        say(f"  {item.name}: {', '.join(done)}")
    shutil.rmtree(top, ignore_errors=True)


def same_as_tree(project: Project, tree: Tree) -> None:
    """Raise SeriesError unless `tree` holds exactly the base with the whole series."""
    final = stack.fold(project.base, project.series)[-1]
    owned = sorted(path for item in project.series for path in item.owns)
    state = tree.state()
    for path in tree.differences(final):
        raise SeriesError(f"{tree.folder / path}: differs from the series; build or refresh")
    if state.links != owned:
        raise SeriesError(f"{tree.folder}: lacks or has links beyond the series; build it")


def _stand_in(project: Project, top: Path) -> None:
    """Make `top` look like this repository with an empty series, built.

    What the tests share (``test/conftest.py``, helpers) is copied, so that it
    finds the tree of the prefix by its own place and not the full one.
    """
    shutil.rmtree(top, ignore_errors=True)
    shutil.copytree(project.base.python / "sglang", top / TREE / "python" / "sglang")
    skipped = ("srt", "project", "__pycache__")
    if (project.root / "test").is_dir():
        ignore = shutil.ignore_patterns(*skipped)
        shutil.copytree(project.root / "test", top / "test", ignore=ignore)
    for name in ("pytest.ini", "cpu_reference"):
        if (project.root / name).exists():
            (top / name).symlink_to(project.root / name)


def _baseline(top: Path, series: tuple[Patch, ...], options: Options) -> dict[str, str]:
    """Return the touched modules that the unpatched base cannot import, with the fault."""
    touched = sorted({_module(path) for item in series for path in item.touches})
    return _faults(top, [name for name in touched if name], options)


def _modules(patches: tuple[Patch, ...]) -> list[str]:
    """Return the modules that `patches` touch or add."""
    paths = {path for item in patches for path in (*item.touches, *item.owns)}
    return sorted(name for name in map(_module, paths) if name)


def _module(path: str) -> str | None:
    """Return the module that an upstream path is imported as, or None."""
    pure = PurePosixPath(path)
    if pure.suffix != ".py" or pure.parts[0] != "python":
        return None
    parts = pure.with_suffix("").parts[1:]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _tests(patches: tuple[Patch, ...]) -> list[str]:
    """Return the test files that `patches` own."""
    return [
        path
        for item in patches
        for path in item.owns
        if path.startswith("test/") and PurePosixPath(path).match("test_*.py")
    ]


def _import_all(top: Path, item: Patch, names: list[str], options: Options) -> None:
    """Import `names` in one fresh interpreter. Raises SeriesError on the first fault."""
    for name, fault in _faults(top, names, options).items():
        raise SeriesError(f"{item.name}: after it, {name} does not import: {fault}")


def _faults(top: Path, names: list[str], options: Options) -> dict[str, str]:
    """Return what went wrong on importing each of `names` from the build tree in `top`."""
    if not names:
        return {}
    command = [sys.executable, "-c", _IMPORTER, *names]
    done = _python(command, top, options, timeout=600)
    try:
        return json.loads(done.stdout.strip().splitlines()[-1])
    except (IndexError, ValueError):
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise SeriesError(f"importing {names[0]} and others ended python: {last}") from None


def _run_tests(top: Path, item: Patch, tests: list[str], options: Options) -> str:
    """Run test files with pytest and return its closing line."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]
    done = _python(command, top, options, timeout=options.test_timeout)
    lines = [line for line in done.stdout.splitlines() if line.strip()]
    if done.returncode:
        log = top.with_name("check.log")
        log.write_text(done.stdout + done.stderr)
        last = lines[-1].strip("= ") if lines else f"exit status {done.returncode}"
        raise SeriesError(f"{item.name}: its tests fail: {last}; see {log}")
    return lines[-1].strip("= ")


def _python(command: list[str], top: Path, options: Options, timeout: int):
    """Run `command` in `top`, with the stubs and its build tree on PYTHONPATH."""
    path = os.pathsep.join([str(options.stubs.absolute()), str(top.absolute() / TREE / "python")])
    env = {**os.environ, **ENVIRONMENT, "PYTHONPATH": path}
    try:
        return subprocess.run(
            command, cwd=top, env=env, capture_output=True, text=True, timeout=timeout, check=False
        )
    except subprocess.TimeoutExpired:
        raise SeriesError(f"{' '.join(command[1:4])} ... took more than {timeout} s") from None
