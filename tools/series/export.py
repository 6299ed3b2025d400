"""Write the series as a branch of git commits, and as mails for ``git am``."""

import os
import shutil
import time
from email.utils import parseaddr
from pathlib import Path

from . import git, stack
from .errors import SeriesError
from .project import Project

BRANCH = "decode-nsa-kv-offload"
COVER = "cover-letter.txt"


def export(project: Project, folder: Path, mails: bool = False) -> list[str]:
    """Make `folder` a git repository with one commit a patch on top of the base.

    The base commit holds the wheel's ``python/sglang``. With `mails` the commits
    are also written to ``folder/mails``. The cover letter, where ``patches`` has
    one, is copied beside them: ``git am`` takes no mail without a diff. Returns the
    commits' titles.

    Raises SeriesError when `folder` exists and is not an empty folder.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise SeriesError(f"{folder}: exists and is not an empty folder")
    base = project.base
    states = stack.fold(base, project.series)
    shutil.copytree(base.python / "sglang", folder / "python" / "sglang")
    git.run("init", "--quiet", f"--initial-branch={BRANCH}", cwd=folder)
    pin = project.pin
    author = git.identity(project.root)
    _commit(folder, ["."], f"{pin.name} {pin.version}, as released\n", author)
    git.run("tag", "base", cwd=folder)
    for item, state in zip(project.series, states[1:]):
        files = {path: state[path] for path in item.touches}
        files.update({path: project.owned_file(path).read_bytes() for path in item.owns})
        stack.write(folder, files)
        name, address = parseaddr(item.fields.get("From", ""))
        signed = (name, address) if name and address else author
        _commit(folder, sorted(files), item.message(), signed)
    if mails:
        options = ["--quiet", "--no-signature", "--output-directory", "mails"]
        git.run("format-patch", *options, "base", cwd=folder)
        cover = project.patches / COVER
        if cover.exists():
            shutil.copy(cover, folder / COVER)
    return [item.subject for item in project.series]


def _commit(folder: Path, paths: list[str], message: str, author: tuple[str, str]) -> None:
    """Commit `paths` as `author`, at SOURCE_DATE_EPOCH where that is set."""
    date = f"@{os.environ.get('SOURCE_DATE_EPOCH', int(time.time()))} +0000"
    env = {}
    for role in ("AUTHOR", "COMMITTER"):
        env[f"GIT_{role}_NAME"], env[f"GIT_{role}_EMAIL"] = author
        env[f"GIT_{role}_DATE"] = date
    git.run("add", "--force", "--", *paths, cwd=folder)
    git.run("commit", "--quiet", "--message", message, cwd=folder, env=env)
