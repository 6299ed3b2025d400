"""Where things lie in this repository, and the series as a whole."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from . import base, patch
from .errors import SeriesError


@dataclass(frozen=True)
class Project:
    """A repository of new files, patches and a pinned base.

    ``base.toml``           the pin
    ``patches/series``      patch names in order, one a line; ``#`` starts a comment
    ``patches/NAME.patch``  see :mod:`tools.series.patch`
    ``python/``, ``test/srt/``  the new files, at upstream's paths
    ``build/``              everything that can be made again
    """

    root: Path

    @property
    def patches(self) -> Path:
        """The folder of patches."""
        return self.root / "patches"

    @property
    def default_tree(self) -> Path:
        """Where the build tree is unless a command is told otherwise."""
        return self.root / "build" / "sglang"

    @cached_property
    def pin(self) -> base.Pin:
        """The pinned release."""
        return base.Pin.load(self.root / "base.toml")

    @cached_property
    def base(self) -> base.Base:
        """The pristine release, fetched on first use."""
        return base.obtain(self.pin, self.root / "build" / "base")

    @cached_property
    def series(self) -> tuple[patch.Patch, ...]:
        """Every patch in order.

        Raises SeriesError when a patch is malformed, listed twice or not listed,
        when a fix stands behind another patch, or a file has two owners.
        """
        names = self._names()
        for name in names:
            if names.count(name) > 1:
                raise SeriesError(f"patches/series: {name} stands twice")
        loaded = tuple(patch.load(self.patches / f"{name}.patch") for name in names)
        for stray in sorted(self.patches.glob("*.patch")):
            if stray.stem not in names:
                raise SeriesError(f"patches/{stray.name}: not listed in patches/series")
        owners: dict[str, str] = {}
        feature = None
        for item in loaded:
            if item.is_fix and feature:
                raise SeriesError(f"{item.name}: a fix must come before {feature}")
            feature = feature or (None if item.is_fix else item.name)
            for path in item.owns:
                if path in owners:
                    raise SeriesError(f"{path}: owned by both {owners[path]} and {item.name}")
                owners[path] = item.name
        return loaded

    def prefix(self, upto: str | None) -> tuple[patch.Patch, ...]:
        """Return the series up to and with the patch named `upto`, or all of it."""
        if upto is None:
            return self.series
        return self.series[: self.index(upto) + 1]

    def index(self, name: str) -> int:
        """Return the place of a patch; `name` may be its path.

        Raises SeriesError when the series has no such patch.
        """
        wanted = Path(name).name.removesuffix(".patch")
        for index, item in enumerate(self.series):
            if item.name == wanted:
                return index
        raise SeriesError(f"{wanted}: no such patch in patches/series")

    def new_files(self) -> list[str]:
        """Return the path of every file under ``python/`` and ``test/srt/``."""
        found = []
        for top in ("python", "test/srt"):
            for path in sorted((self.root / top).rglob("*")):
                if path.is_file() and "__pycache__" not in path.parts:
                    found.append(path.relative_to(self.root).as_posix())
        return found

    def owned_file(self, path: str) -> Path:
        """Return where a new file lies.

        Raises SeriesError when it does not exist, or is a file of the base.
        """
        source = self.root / path
        if not source.is_file():
            raise SeriesError(f"{path}: listed under Owns of a patch, but not there")
        if path in self.base.files:
            raise SeriesError(f"{path}: a file of the base; edit it by hunks instead")
        return source

    def _names(self) -> list[str]:
        """Read ``patches/series``; a missing one is an empty series."""
        listing = self.patches / "series"
        if not listing.is_file():
            return []
        lines = (line.split("#")[0].strip() for line in listing.read_text().splitlines())
        return [line.removesuffix(".patch") for line in lines if line]
