"""Run git so that neither the user's settings nor an outer repository matter."""

import os
import subprocess
from pathlib import Path

from .errors import SeriesError


def run(*args: str, cwd: Path, ok=(0,), env: dict | None = None) -> bytes:
    """Run ``git args`` in `cwd` and return what it printed.

    `cwd` is taken as the top: a repository above it is not looked for, since
    ``git apply`` below the top of a work tree silently skips files.

    Raises SeriesError when git is missing or its exit status is not in `ok`.
    """
    full_env = {
        name: value for name, value in os.environ.items() if not name.startswith("GIT_")
    }
    full_env.update(
        GIT_CONFIG_GLOBAL=os.devnull,
        GIT_CONFIG_NOSYSTEM="1",
        GIT_CEILING_DIRECTORIES=str(cwd.resolve().parent),
        LC_ALL="C",
    )
    full_env.update(env or {})
    try:
        done = subprocess.run(
            ["git", *args], cwd=cwd, env=full_env, capture_output=True, check=False
        )
    except FileNotFoundError:
        raise SeriesError("git is needed and was not found") from None
    if done.returncode not in ok:
        said = done.stderr.decode(errors="replace").strip().replace("\n", "; ")
        raise SeriesError(f"git {args[0]} failed: {said}")
    return done.stdout


def diff(old: dict[str, bytes], new: dict[str, bytes], scratch: Path) -> str:
    """Return the unified diff from `old` to `new`, two maps of path to content.

    Both must name the same paths. `scratch` is an empty folder to work in.
    """
    for side, files in (("a", old), ("b", new)):
        (scratch / side).mkdir()
        for path, content in files.items():
            target = scratch / side / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)
    options = ["--no-index", "--no-color", "--no-prefix", "--abbrev=12"]
    return run("diff", *options, "a", "b", cwd=scratch, ok=(0, 1)).decode()


def identity(root: Path) -> tuple[str, str]:
    """Return the name and address that git would sign with in `root`.

    Where git knows none, a neutral one stands in.
    """
    values = []
    for key, default in (("user.name", "Series"), ("user.email", "series@localhost")):
        done = subprocess.run(
            ["git", "config", key], cwd=root, capture_output=True, text=True, check=False
        )
        values.append(done.stdout.strip() or default)
    return values[0], values[1]
