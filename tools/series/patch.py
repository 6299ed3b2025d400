"""One patch file: a header that a reviewer reads, then hunks on existing files.

    Subject: Keep decode's latent KV in host memory
    Problem: One or more lines; further ones are indented.
     .
     A line that holds only a full stop is a blank line.
    Change: ...
    Evidence: ...
    Upstream-Status: ...
    Owns:
     python/sglang/srt/mem_cache/new_file.py
     test/srt/test_new_file.py

    diff --git a/python/sglang/srt/server_args.py b/python/sglang/srt/server_args.py
    ...
"""

import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from .errors import SeriesError

SECTIONS = ("Problem", "Change", "Evidence", "Upstream-Status")
FIELDS = ("Subject", "From", *SECTIONS, "Owns")
OWNED_ROOTS = ("python/sglang/", "test/srt/")
HUNK_ROOT = "python/sglang/"

_FIELD = re.compile(r"([A-Za-z][A-Za-z-]*):[ \t]*(.*)")
_DIFF = re.compile(r"diff --git a/(\S+) b/(\S+)")
_FIX = re.compile(r"(\d+-)?fix-")
_OTHER_THAN_EDIT = (
    "new file mode",
    "deleted file mode",
    "rename ",
    "copy ",
    "old mode",
    "GIT binary patch",
    "Binary files",
)


@dataclass(frozen=True)
class Patch:
    """A parsed patch: its name, its header's fields, its hunks as text."""

    name: str
    header: str
    fields: dict[str, str]
    owns: tuple[str, ...]
    touches: tuple[str, ...]
    hunks: str

    @property
    def subject(self) -> str:
        """The title line."""
        return self.fields["Subject"]

    @property
    def is_fix(self) -> bool:
        """Whether it mends a fault of the base, and so does not count as touching."""
        return _FIX.match(self.name) is not None

    def message(self) -> str:
        """Return the commit message: the title, then every section in order."""
        parts = [self.subject]
        for name in SECTIONS:
            parts.append(f"{name}: {self.fields[name]}")
        return "\n\n".join(parts) + "\n"

    def with_hunks(self, hunks: str) -> str:
        """Return the patch file's text with `hunks` in place of its own."""
        header = self.header.rstrip("\n") + "\n"
        return f"{header}\n{hunks}" if hunks else header


def parse(name: str, text: str) -> Patch:
    """Parse the text of patch `name`.

    Raises SeriesError when the header lacks a section or has an unknown one,
    when an owned path is outside the new files' folders or stands twice, and
    when the hunks do anything but edit files below ``python/sglang``.
    """
    start = re.search(r"^(diff --git |--- )", text, re.MULTILINE)
    cut = start.start() if start else len(text)
    header, hunks = text[:cut], text[cut:]
    fields = _fields(name, header)
    for field in ("Subject", *SECTIONS):
        if not fields.get(field):
            raise SeriesError(f"{name}: the header has no {field}")
    if "\n" in fields["Subject"]:
        raise SeriesError(f"{name}: the Subject is longer than one line")
    owns = tuple(fields.get("Owns", "").split())
    for path in owns:
        if not path.startswith(OWNED_ROOTS) or ".." in PurePosixPath(path).parts:
            raise SeriesError(
                f"{name}: owns {path}, which is under neither of {', '.join(OWNED_ROOTS)}"
            )
    if len(set(owns)) != len(owns):
        raise SeriesError(f"{name}: a path stands twice under Owns")
    touches = _touches(name, hunks)
    if not owns and not touches:
        raise SeriesError(f"{name}: neither owns a file nor has a hunk")
    return Patch(name, header, fields, owns, touches, hunks)


def load(path: Path) -> Patch:
    """Read the patch file at `path`; its name is the file's, less ``.patch``."""
    try:
        text = path.read_bytes().decode()
    except FileNotFoundError:
        raise SeriesError(f"{path}: listed in the series, but not there") from None
    except UnicodeDecodeError:
        raise SeriesError(f"{path}: not UTF-8") from None
    return parse(path.stem, text)


def _fields(name: str, header: str) -> dict[str, str]:
    """Return the header's fields by name, continuation lines joined by newlines."""
    fields: dict[str, list[str]] = {}
    current = None
    for number, line in enumerate(header.splitlines(), start=1):
        if not line.strip():
            continue
        if line[0] in " \t":
            if current is None:
                raise SeriesError(f"{name}: line {number} continues no field")
            content = line[1:].rstrip()
            current.append("" if content == "." else content)
            continue
        match = _FIELD.fullmatch(line.rstrip())
        if not match:
            raise SeriesError(
                f"{name}: line {number} is neither a field nor indented: {line.strip()}"
            )
        field, value = match.groups()
        if field not in FIELDS:
            raise SeriesError(f"{name}: unknown field {field}; known: {', '.join(FIELDS)}")
        if field in fields:
            raise SeriesError(f"{name}: field {field} stands twice")
        current = fields[field] = [value] if value else []
    return {field: "\n".join(lines).strip() for field, lines in fields.items()}


def _touches(name: str, hunks: str) -> tuple[str, ...]:
    """Return the paths that `hunks` edits, in their order."""
    paths: list[str] = []
    for line in hunks.split("\n"):
        match = _DIFF.fullmatch(line)
        if match:
            if match[1] != match[2]:
                raise SeriesError(f"{name}: {match[1]} and {match[2]} differ in one diff")
            paths.append(match[1])
        elif line.startswith(_OTHER_THAN_EDIT):
            raise SeriesError(
                f"{name}: '{line}': hunks only edit existing files; new ones go under Owns"
            )
    if hunks and not paths:
        raise SeriesError(f"{name}: hunks without a 'diff --git a/PATH b/PATH' line")
    for path in paths:
        if not path.startswith(HUNK_ROOT) or ".." in PurePosixPath(path).parts:
            raise SeriesError(f"{name}: edits {path}, which is not under {HUNK_ROOT}")
        if paths.count(path) > 1:
            raise SeriesError(f"{name}: has two diffs of {path}")
    headers = re.findall(r"^(?:---|\+\+\+) [ab]/(\S+)$", hunks, re.MULTILINE)
    stray = [path for path in headers if path not in paths]
    if stray:
        raise SeriesError(f"{name}: {stray[0]} has no 'diff --git' line")
    return tuple(paths)
