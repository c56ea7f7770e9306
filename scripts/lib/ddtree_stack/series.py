"""patches/series: the order, and nothing else, decides what is applied."""

from __future__ import annotations

from collections.abc import Collection
from itertools import pairwise

from . import upcoming
from .errors import CHECK_FAILED, StackError
from .patchfile import Patch, problems
from .paths import Stack

GENERATED = {"series", "README.md"}


def names(stack: Stack) -> list[str]:
    """The names in the series file (comments and blank lines skipped, as quilt does)."""
    if not stack.series_file.is_file():
        raise StackError(
            CHECK_FAILED, "patches/series is missing", hint="git checkout patches/series"
        )
    lines = (x.partition("#")[0].strip() for x in stack.series_file.read_text().splitlines())
    return [x for x in lines if x]


def load(stack: Stack) -> list[Patch]:
    """The patches in order. A hole, a double, an orphan or a wrong order is an error."""
    if stack.upcoming:
        return upcoming.overlay(stack, load(Stack(stack.root)))
    listed = names(stack)
    on_disk = {p.name for p in stack.patches.iterdir() if p.name not in GENERATED}
    bad = [f"listed, not there: {n}" for n in listed if n not in on_disk]
    bad += [f"there, not listed: {n}" for n in sorted(on_disk - set(listed))]
    bad += [f"listed twice: {n}" for n in sorted({n for n in listed if listed.count(n) > 1})]
    if listed != sorted(listed):
        late = next(b for a, b in pairwise(listed) if b < a)
        bad.append(f"not sorted: {late} comes too late")
    numbers = [n[:4] for n in dict.fromkeys(listed)]
    bad += [f"number used twice: {n}" for n in sorted({n for n in numbers if numbers.count(n) > 1})]
    if bad:
        raise StackError(
            CHECK_FAILED,
            "patches/series does not fit the files in patches/",
            bad,
            "git status patches",
        )
    return [Patch(n, (stack.patches / n).read_bytes()) for n in listed]


def check_headers(patches: list[Patch], dropped: Collection[str] = ()) -> list[str]:
    """Every rule every patch breaks, as 'name: rule' lines. Upstream has those that are dropped."""
    bad, earlier = [], list(dropped)
    for patch in patches:
        bad += [f"{patch.name}: {x}" for x in problems(patch, earlier)]
        earlier.append(patch.name)
    return bad


def table(patches: list[Patch]) -> str:
    """patches/README.md, made from the headers."""
    rows = [
        "# The patches",
        "",
        "Written by `scripts/refresh.sh` from the patches' headers; edits here are lost.",
        "Each patch says in its body why it exists, what it does and what breaks without it.",
        "",
        "| Patch | What | Upstream-Status | Drop-When | Depends-On |",
        "| --- | --- | --- | --- | --- |",
    ]
    for p in patches:
        cells = [
            f"[{p.name.removesuffix('.patch')}]({p.name})",
            p.subject,
            "; ".join(p.values("Upstream-Status")),
            "; ".join(p.values("Drop-When")),
            ", ".join(x.removesuffix(".patch") for x in p.depends),
        ]
        rows.append("| " + " | ".join(c.replace("|", "\\|") for c in cells) + " |")
    return "\n".join(rows) + "\n"
