"""The pristine SGLang release: fetched as a wheel, verified, unpacked for reading."""

import base64
import csv
import hashlib
import io
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from .errors import SeriesError


def digest(content: bytes) -> str:
    """Return the SHA-256 of `content` in hexadecimal."""
    return hashlib.sha256(content).hexdigest()


@dataclass(frozen=True)
class Pin:
    """Which release is the base, and what each of its wheels must hash to."""

    name: str
    version: str
    tag: str
    sha256: dict[str, str]

    @classmethod
    def load(cls, path: Path) -> "Pin":
        """Read the pin at `path`. Raises SeriesError when it is missing or malformed."""
        try:
            return cls(**tomllib.loads(path.read_text()))
        except FileNotFoundError:
            raise SeriesError(f"{path}: not found") from None
        except (tomllib.TOMLDecodeError, TypeError) as error:
            raise SeriesError(f"{path}: {error}") from None


@dataclass(frozen=True)
class Base:
    """An unpacked wheel. Paths are upstream's: ``python/sglang/...``."""

    folder: Path
    wheel_sha256: str

    @property
    def python(self) -> Path:
        """The folder that would stand on PYTHONPATH."""
        return self.folder / "python"

    @cached_property
    def files(self) -> dict[str, str]:
        """The SHA-256 of every file of the package, by path, from the wheel's RECORD."""
        (record,) = self.python.glob("*.dist-info/RECORD")
        found = {}
        for name, hashed, _size in csv.reader(io.StringIO(record.read_text())):
            if hashed and name.startswith("sglang/"):
                code = hashed.removeprefix("sha256=")
                found[f"python/{name}"] = base64.urlsafe_b64decode(code + "==").hex()
        return found

    def read(self, path: str) -> bytes:
        """Return the content of one upstream file.

        Raises SeriesError when the base has no such file or it was changed.
        """
        expected = self.files.get(path)
        if expected is None:
            raise SeriesError(f"{path}: not a file of the base")
        content = (self.folder / path).read_bytes()
        if digest(content) != expected:
            raise SeriesError(f"{self.folder / path}: changed; remove {self.folder}")
        return content


def obtain(pin: Pin, cache: Path) -> Base:
    """Return the base, downloading and unpacking its wheel into `cache` if need be.

    A wheel already in `cache` is used, so one may be put there by hand.
    Raises SeriesError when pip cannot fetch it or its hash is not the pin's.
    """
    python_tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
    expected = pin.sha256.get(python_tag)
    if expected is None:
        known = ", ".join(sorted(pin.sha256))
        raise SeriesError(f"{pin.name} {pin.version} has wheels for {known}, not {python_tag}")
    folder = cache / expected[:16]
    if not folder.is_dir():
        wheel = _wheel(pin, python_tag, cache) or _download(pin, python_tag, cache)
        found = digest(wheel.read_bytes())
        if found != expected:
            raise SeriesError(f"{wheel}: SHA-256 is {found}, the pin says {expected}")
        _unpack(wheel, folder)
    return Base(folder, expected)


def _wheel(pin: Pin, python_tag: str, cache: Path) -> Path | None:
    """Return the cached wheel for `python_tag`, or None."""
    wheels = sorted(cache.glob(f"{pin.name}-{pin.version}-{python_tag}-*.whl"))
    return wheels[0] if wheels else None


def _download(pin: Pin, python_tag: str, cache: Path) -> Path:
    """Fetch the wheel with pip and return its path."""
    cache.mkdir(parents=True, exist_ok=True)
    requirement = f"{pin.name}=={pin.version}"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--only-binary", ":all:", "--dest", str(cache), requirement]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheel = _wheel(pin, python_tag, cache)
    if done.returncode or wheel is None:
        lines = (done.stderr or done.stdout).strip().splitlines() or ["no reason given"]
        raise SeriesError(
            f"pip could not fetch {requirement}: {lines[-1]} (or put its wheel into {cache})"
        )
    return wheel


def _unpack(wheel: Path, folder: Path) -> None:
    """Unpack `wheel` below ``folder/python``; `folder` appears only when complete."""
    partial = folder.with_name(f"{folder.name}.{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(partial / "python")
        for item in archive.infolist():
            mode = item.external_attr >> 16 & 0o777  # extractall leaves it out
            if mode and not item.is_dir():
                (partial / "python" / item.filename).chmod(mode)
    try:
        partial.rename(folder)
    except OSError:
        shutil.rmtree(partial)
        if not folder.is_dir():
            raise
