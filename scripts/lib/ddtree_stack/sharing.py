"""Writing upstream/next: every patch is shared with patches/ that can be."""

from __future__ import annotations

import shutil
from dataclasses import dataclass

from . import series, upcoming
from .files import replace_dir, temp_dir
from .git import Git
from .patchfile import Patch, split_mail
from .paths import Stack
from .pin import Pin
from .refresh import next_revision


def differing(git: Git, commits: list[str], patches: list[Patch], own: list[Patch]) -> list[Patch]:
    """The patches of which the one of the same name in `own` would not do.

    It does if it says the same and, applied to the commit before as `git am` applies it (at any
    offset, without fuzz), gives the same tree.
    """
    by_name = {p.name: p for p in own}
    index = git.git_dir() / "ddtree-sharing-index"
    env = {"GIT_INDEX_FILE": str(index)}
    found = []
    try:
        for commit, patch in zip(commits, patches, strict=True):
            mine = by_name.get(patch.name)
            if mine and split_mail(mine.raw)[0] == split_mail(patch.raw)[0]:
                git.raw("read-tree", f"{commit}~1", env=env)
                done = git.call("apply", "--cached", "-", data=split_mail(mine.raw)[1], env=env)
                same = git.out("write-tree", env=env) == git.tree_of(commit)
                if done.returncode == 0 and same:
                    continue
            found.append(patch)
    finally:
        index.unlink(missing_ok=True)
    return found


@dataclass(frozen=True)
class Written:
    """What upstream/next came to hold."""

    pin: Pin
    overrides: list[str]
    changed: list[str]  # files that were not so before


def write(
    stack: Stack,
    git: Git,
    base: str,
    tip: str,
    patches: list[Patch],
    dropped: list[str],
    pin: Pin,
    check: bool = False,
) -> Written:
    """Make upstream/next say what the commits base..tip say; other files there stay.

    With `check` nothing is written, only told.
    """
    own = series.load(Stack(stack.root))
    names = {p.name: upcoming.blob(p) for p in own}
    ours = differing(git, git.commits(base, tip), patches, own)
    record = upcoming.Record(names, {n: names[n] for n in dropped if n in names})
    tree = git.tree_of(tip)
    pin = pin.with_stack(next_revision(stack, tree, pin), tree)
    want = {f"patches/{p.name}": p.raw for p in ours}
    want |= {"record.toml": record.render().encode(), "pin.toml": pin.render().encode()}
    at = stack.next_dir
    have = {f"patches/{n}": p.raw for n, p in upcoming.overrides(stack).items()}
    have |= {n: (at / n).read_bytes() for n in ("record.toml", "pin.toml") if (at / n).is_file()}
    changed = sorted(n for n in want.keys() | have.keys() if want.get(n) != have.get(n))
    if changed and not check:
        with temp_dir(at) as temp:
            new = temp / "next"
            if at.is_dir():
                shutil.copytree(at, new, ignore=shutil.ignore_patterns("patches"))
            (new / "patches").mkdir(parents=True)
            for name, data in want.items():
                (new / name).write_bytes(data)
            replace_dir(new, at)
    return Written(pin, [p.name for p in ours], changed)
