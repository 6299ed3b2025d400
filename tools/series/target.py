"""A place that a user applies the series to: an installed package or a checkout."""

import importlib.util
import subprocess
from dataclasses import dataclass
from pathlib import Path

from .base import Pin
from .errors import SeriesError


@dataclass(frozen=True)
class Target:
    """A folder that holds SGLang, and how upstream's paths lie in it."""

    folder: Path
    is_checkout: bool

    def place(self, path: str) -> Path | None:
        """Return where upstream's `path` lies here, or None where it does not belong."""
        if self.is_checkout:
            return self.folder / path
        if path.startswith("python/"):
            return self.folder / path.removeprefix("python/")
        return None

    @property
    def package(self) -> Path:
        """The folder of the ``sglang`` package."""
        return self.place("python/sglang")

    def version(self, name: str) -> str | None:
        """Return the tag of a checkout, the release of an installed package; None where none is known."""
        return _nearest_tag(self.folder) if self.is_checkout else _installed_version(self.folder, name)

    def check_version(self, pin: Pin) -> None:
        """Raise SeriesError when this is known to be another release than `pin`.

        A checkout without tags tells no version; its touched files decide then.
        """
        found, wanted = self.version(pin.name), pin.tag if self.is_checkout else pin.version
        if found and found != wanted:
            raise SeriesError(f"{self.folder}: holds {pin.name} {found}; the series is for {wanted}")


def locate(folder: Path) -> Target:
    """Tell what `folder` is. Raises SeriesError when it is neither kind of target."""
    folder = folder.absolute()
    if (folder / "python" / "sglang" / "__init__.py").is_file():
        if (folder / "test").is_dir():
            return Target(folder, is_checkout=True)
        raise SeriesError(f"{folder}: has python/sglang but no test/, so it is no checkout")
    if (folder / "sglang" / "__init__.py").is_file():
        if any(folder.glob("sglang-*.dist-info")):
            return Target(folder, is_checkout=False)
        if folder.name == "python":
            return locate(folder.parent)
    raise SeriesError(
        f"{folder}: neither a site-packages folder with sglang and its sglang-*.dist-info, nor a checkout of it"
    )


def installed() -> Target:
    """Return the SGLang that this interpreter would import.

    Raises SeriesError when there is none.
    """
    spec = importlib.util.find_spec("sglang")
    if spec is None or spec.origin is None:
        raise SeriesError("sglang is not installed for this interpreter")
    return locate(Path(spec.origin).parent.parent)


def _installed_version(folder: Path, name: str) -> str:
    """Return the version that the package's metadata tells."""
    found = sorted(folder.glob(f"{name}-*.dist-info"))
    if len(found) > 1:
        raise SeriesError(f"{folder}: has metadata of several {name} releases")
    return found[0].name.removeprefix(f"{name}-").removesuffix(".dist-info")


def _nearest_tag(folder: Path) -> str:
    """Return the release tag that a checkout descends from, or an empty string."""
    command = ["git", "-C", str(folder), "describe", "--tags", "--abbrev=0", "--match", "v[0-9]*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return ""
    return done.stdout.strip() if (folder / ".git").exists() else ""
