"""Where things lie: everything is derived from the repository root."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from .pin import Pin


def default_cache() -> Path:
    """Downloads outlive clones: the user's cache, unless DDTREE_CACHE says otherwise."""
    if own := os.environ.get("DDTREE_CACHE"):
        return Path(own)
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "vllm-ddtree"


@dataclass
class Stack:
    """A checkout of this repository and the work it has on disk."""

    root: Path
    upcoming: bool = False  # the stack on the release it moves to next, in upstream/next/

    @classmethod
    def here(cls) -> Stack:
        """The checkout these scripts lie in (DDTREE_ROOT points the unit tests elsewhere)."""
        own = os.environ.get("DDTREE_ROOT")
        return cls(Path(own).resolve() if own else Path(__file__).resolve().parents[3])

    def next(self) -> Stack:
        """The same checkout on the next release."""
        return Stack(self.root, upcoming=True)

    @property
    def flag(self) -> str:
        """What a verb in a hint must carry to mean this stack."""
        return " --next" if self.upcoming else ""

    @property
    def patches(self) -> Path:
        return self.root / "patches"

    @property
    def saved_in(self) -> Path:
        """Where refresh.sh writes what the work tree says."""
        return self.next_dir if self.upcoming else self.patches

    @property
    def next_dir(self) -> Path:
        """The next release's pin, record, and the patches that differ there."""
        return self.root / "upstream" / "next"

    @property
    def series_file(self) -> Path:
        return self.patches / "series"

    @property
    def readme(self) -> Path:
        return self.root / "README.md"

    @property
    def pin_file(self) -> Path:
        return (self.next_dir if self.upcoming else self.root / "upstream") / "pin.toml"

    @property
    def work(self) -> Path:
        return self.root / ".work"

    @property
    def tree(self) -> Path:
        """Upstream's tree with one commit per patch."""
        return self.work / ("vllm-next" if self.upcoming else "vllm")

    @property
    def rebase_tree(self) -> Path:
        """Where a rebase works: both releases in one object store, apart from the other trees."""
        return self.work / "rebase"

    @property
    def venv(self) -> Path:
        return self.root / ".venv"

    @property
    def cache(self) -> Path:
        return default_cache()

    @cached_property
    def pin(self) -> Pin:
        return Pin.load(self.pin_file)

    def shown(self, path: Path) -> str:
        """A path as the user would type it from the root."""
        try:
            return str(path.relative_to(self.root))
        except ValueError:
            return str(path)
