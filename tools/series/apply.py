"""Apply the series to a target, undo it, and tell how things stand.

Everything is computed and checked before the first write. What was there, and
what was written, is kept in a folder within the target's package, which makes
``reverse`` exact and lets it clear up after an ``apply`` that was cut short.
"""

import enum
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from . import stack
from .base import digest
from .errors import SeriesError
from .project import Project
from .target import Target

RECORD = ".nsa_offload_series"


class Standing(enum.Enum):
    """How a target stands to the series."""

    PRISTINE = "not applied"
    APPLIED = "applied"
    OTHER = "applied from another state of the series"
    PARTIAL = "applied in part; apply again or reverse"


@dataclass(frozen=True)
class Manifest:
    """What ``apply`` wrote: hashes by upstream path, the folders it made, and the release it was."""

    edited: dict[str, str]
    originals: dict[str, str]
    added: dict[str, str]
    folders: list[str]
    version: str = ""


def status(project: Project, target: Target) -> Standing:
    """Tell how `target` stands.

    Raises SeriesError when it is another release, or a file that the series
    touches is neither as the base nor as ``apply`` left it.
    """
    target.check_version(project.pin)
    manifest = _manifest(target)
    if manifest is None:
        _plan(project, target)
        return Standing.PRISTINE
    if not _is_whole(target, manifest):
        return Standing.PARTIAL
    edited, added = _wanted(project, target)
    same = manifest.edited == _digests(edited) and manifest.added == _digests(added)
    return Standing.APPLIED if same else Standing.OTHER


def apply(project: Project, target: Target) -> bool:
    """Put the series into `target`; return False when it already was there.

    A target that holds another state of the series is brought to this one.
    Raises SeriesError as `status` does, with the target untouched.
    """
    standing = status(project, target)
    if standing is Standing.APPLIED:
        return False
    if standing is not Standing.PRISTINE:
        reverse(target)
    manifest, edited, added = _plan(project, target)
    if not edited and not added:
        return False
    record = target.package / RECORD
    for path in edited:
        backup = record / "original" / path
        backup.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(target.place(path), backup)
    _replace(record / "manifest.json", json.dumps(vars(manifest), indent=1).encode())
    for path, content in {**added, **edited}.items():
        place = target.place(path)
        place.parent.mkdir(parents=True, exist_ok=True)
        _replace(place, content)
    return True


def reverse(target: Target) -> bool:
    """Restore every file as it was before ``apply``; return False when nothing was applied.

    Raises SeriesError, with nothing restored, when a file was changed since.
    """
    manifest = _manifest(target)
    if manifest is None:
        return False
    _is_whole(target, manifest)
    record = target.package / RECORD
    for path in manifest.edited:
        place = target.place(path)
        if digest(place.read_bytes()) != manifest.originals[path]:
            _replace(place, (record / "original" / path).read_bytes())
    for path in manifest.added:
        place = target.place(path)
        place.unlink(missing_ok=True)
        for compiled in place.parent.glob(f"__pycache__/{place.stem}.*.pyc"):
            compiled.unlink()
    for folder in manifest.folders:
        place = target.place(folder)
        if (place / "__pycache__").is_dir() and not any((place / "__pycache__").iterdir()):
            (place / "__pycache__").rmdir()
        if place.is_dir() and not any(place.iterdir()):
            place.rmdir()
    shutil.rmtree(record)
    return True


def _wanted(project: Project, target: Target) -> tuple[dict[str, bytes], dict[str, bytes]]:
    """Return the upstream files as patched, and the new files that belong into `target`."""
    edited = stack.fold(project.base, project.series)[-1]
    added = {}
    for item in project.series:
        for path in item.owns:
            content = project.owned_file(path).read_bytes()
            if target.place(path) is not None:
                added[path] = content
    return edited, added


def _plan(project: Project, target: Target):
    """Return the manifest and contents for an ``apply`` to a pristine target.

    Raises SeriesError when a file to edit is not the base's or one to add exists.
    """
    edited, added = _wanted(project, target)
    for path in edited:
        place = target.place(path)
        if not place.is_file():
            raise SeriesError(f"{place}: not there, though the base has it")
        if digest(place.read_bytes()) != project.base.files[path]:
            raise SeriesError(
                f"{place}: differs from {project.pin.name} {project.pin.version}; "
                "restore it or start from a fresh copy"
            )
    folders = set()
    for path in added:
        place = target.place(path)
        if os.path.lexists(place):
            raise SeriesError(f"{place}: exists already, though it is new in the series")
        for parent in Path(path).parents:
            if target.place(f"{parent}/") and not target.place(f"{parent}/").exists():
                folders.add(parent.as_posix())
    originals = {path: project.base.files[path] for path in edited}
    deepest_first = sorted(folders, reverse=True)
    version = target.version(project.pin.name) or ""
    manifest = Manifest(_digests(edited), originals, _digests(added), deepest_first, version)
    return manifest, edited, added


def _manifest(target: Target) -> Manifest | None:
    """Return what an earlier ``apply`` recorded, or None.

    A record without a manifest is from an ``apply`` that had written nothing yet.
    """
    record = target.package / RECORD
    try:
        return Manifest(**json.loads((record / "manifest.json").read_bytes()))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError):
        raise SeriesError(f"{record}: damaged; reinstall this copy of sglang") from None


def _is_whole(target: Target, manifest: Manifest) -> bool:
    """Whether every recorded file is as ``apply`` wrote it.

    Raises SeriesError when one is neither that nor as it was before.
    """
    whole = True
    for path, after in {**manifest.edited, **manifest.added}.items():
        place = target.place(path)
        found = digest(place.read_bytes()) if place.is_file() else None
        if found != after:
            whole = False
            if found != manifest.originals.get(path):
                _check_release(target, manifest)
                raise SeriesError(
                    f"{place}: changed since the series was applied; put back what it was then, or install SGLang anew"
                )
    return whole


def _check_release(target: Target, manifest: Manifest) -> None:
    """Raise SeriesError where pip has put another release over the one that the series was applied to."""
    found = target.version("sglang")
    if not manifest.version or found in (None, manifest.version):
        return
    raise SeriesError(
        f"{target.folder}: the series was applied to sglang {manifest.version}, and {found} was installed over "
        f"it. Remove {target.package}, which still holds files of the series, and install {found} anew; "
        "another time, reverse the series before pip"
    )


def _digests(files: dict[str, bytes]) -> dict[str, str]:
    """Return the hash of each content."""
    return {path: digest(content) for path, content in files.items()}


def _replace(place: Path, content: bytes) -> None:
    """Give `place` a new content in one step, keeping its mode and breaking hard links."""
    partial = place.with_name(f"{place.name}.partial")
    partial.write_bytes(content)
    if place.exists():
        shutil.copymode(place, partial)
    partial.replace(place)
