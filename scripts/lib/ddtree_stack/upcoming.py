"""upstream/next: the stack on the release it moves to next.

pin.toml is that release's pin. patches/ there holds only the patches that must differ from those
of the same name in the root's patches/; every other one is shared, so that work on the stack
reaches both. record.toml says what of patches/ they were made from, and what upstream has by now.
"""

from __future__ import annotations

import hashlib
import tomllib
from dataclasses import dataclass, field

from .errors import CHECK_FAILED, StackError
from .patchfile import Patch
from .paths import Stack

_HEAD = """\
# What upstream/next was made from. Written by rebase.sh and refresh.sh --next, never by hand.
# made_from: every patch of patches/ and its git blob; dropped: those the release makes needless.
"""


def blob(patch: Patch) -> str:
    """The git blob id, by which git's history of patches/ gives the text back."""
    return hashlib.sha1(b"blob %d\0" % len(patch.raw) + patch.raw).hexdigest()


@dataclass
class Record:
    """record.toml."""

    made_from: dict[str, str] = field(default_factory=dict)
    dropped: dict[str, str] = field(default_factory=dict)

    def render(self) -> str:
        """The file's text."""
        lines = [_HEAD + "[made_from]", *(f'"{n}" = "{b}"' for n, b in self.made_from.items())]
        lines += ["", "[dropped]", *(f'"{n}" = "{b}"' for n, b in self.dropped.items())]
        return "\n".join(lines) + "\n"


def load(stack: Stack) -> Record:
    """The record; an empty one where there is no next release."""
    path = stack.next_dir / "record.toml"
    if not path.is_file():
        return Record()
    try:
        data = tomllib.loads(path.read_text())
        return Record(dict(data["made_from"]), dict(data["dropped"]))
    except (OSError, KeyError, TypeError, ValueError) as err:
        raise StackError(
            CHECK_FAILED,
            f"{stack.shown(path)} cannot be read",
            [f"{type(err).__name__}: {err}"],
            f"git checkout {stack.shown(path)}",
        ) from err


def overrides(stack: Stack) -> dict[str, Patch]:
    """The patches of upstream/next/patches."""
    files = sorted((stack.next_dir / "patches").glob("*.patch"))
    return {p.name: Patch(p.name, p.read_bytes()) for p in files}


def overlay(stack: Stack, own: list[Patch]) -> list[Patch]:
    """The series on the next release: `own`, less what is dropped, with its overrides."""
    record = load(stack)
    found = {p.name: p for p in own if p.name not in record.dropped}
    for name, patch in overrides(stack).items():
        # One made from a patch that is gone goes with it; one made from none is the release's own.
        if name in found or name not in record.made_from:
            found[name] = patch
    return [found[n] for n in sorted(found)]


def moved(stack: Stack) -> list[str]:
    """Patches that are new, gone or other than upstream/next was made from."""
    from .series import load as series

    now = {p.name: blob(p) for p in series(Stack(stack.root))}
    was = load(stack).made_from
    return sorted(n for n in now.keys() | was.keys() if now.get(n) != was.get(n))


def stale(stack: Stack) -> list[str]:
    """Those among them that the next release has its own version of, or had dropped."""
    record = load(stack)
    mine = overrides(stack).keys() | record.dropped.keys()
    return [n for n in moved(stack) if n in mine and n in record.made_from]
