"""What the work tree holds that patches/ does not: the guard before anything is replaced."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from pathlib import Path

from . import series
from .errors import StackError
from .export import export
from .fetch import BASE
from .files import write_atomic
from .git import Git
from .patchfile import Patch
from .paths import Stack


def digests(patches: list[Patch]) -> dict[str, str]:
    return {p.name: p.sha256 for p in patches}


@dataclass
class Saved:
    """The last moment at which work tree and patches/ said the same."""

    head: str = ""
    patches: dict[str, str] = field(default_factory=dict)
    upto: str = ""  # set when only a part of the series was applied
    plain: bool = False


def _file(git: Git) -> Path:
    return git.git_dir() / "ddtree-state.json"


def load(git: Git) -> Saved:
    try:
        return Saved(**json.loads(_file(git).read_text()))
    except (OSError, ValueError, TypeError):
        return Saved()


def save(git: Git, saved: Saved) -> None:
    write_atomic(_file(git), json.dumps(vars(saved), indent=1).encode())


def on_disk(stack: Stack) -> dict[str, str]:
    """Digests of the patch files as they lie there, whatever the series says."""
    if stack.upcoming:
        return digests(series.load(stack))
    return {p.name: Patch(p.name, p.read_bytes()).sha256 for p in stack.patches.glob("*.patch")}


def unsaved(stack: Stack) -> list[str]:
    """Facts about work that only the work tree has; empty when it can be replaced."""
    git = Git(stack.tree)
    if what := git.busy():
        return [f"unfinished {what}"]
    facts = [f"edited: {line}" for line in git.dirty()]
    head, base = git.rev("HEAD"), git.rev(BASE)
    if head in (load(git).head, base):
        return facts
    try:
        mine = digests(export(stack.tree, BASE))
    except StackError:
        mine = {}
    have = on_disk(stack)
    if mine and all(have.get(n) == d for n, d in mine.items()):
        return facts
    commits = git.commits(BASE, "HEAD")
    known = dict(zip(commits, mine.items(), strict=False)) if mine else {}
    lost = [c for c in commits if c not in known or have.get(known[c][0]) != known[c][1]]
    return facts + [f"not in patches/: {git.out('log', '-1', '--format=%h %s', c)}" for c in lost]


def backup(git: Git) -> str:
    """Keep commits and edits under a branch before they are replaced; returns its name."""
    index = git.git_dir() / "ddtree-backup-index"
    env = {"GIT_INDEX_FILE": str(index)}
    try:
        git.raw("read-tree", "HEAD", env=env)
        git.raw("add", "-A", env=env)
        tree = git.out("write-tree", env=env)
    finally:
        index.unlink(missing_ok=True)
    kept = head = git.out("rev-parse", "HEAD")
    if tree != git.tree_of("HEAD"):
        kept = git.out("commit-tree", tree, "-p", head, "-m", "Edits that were not committed")
    name = f"backup/{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{kept[:8]}"
    git.raw("branch", "-f", name, kept)
    return name
