"""apply: the base commit, then one commit per patch."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory

from . import series, state, upcoming
from .errors import CHECK_FAILED, CONFLICT, TOOL, UNSAVED, USAGE, StackError
from .fetch import BASE, BRANCH, fetch, hide_generated
from .git import Git, first
from .patchfile import Patch, canonical_name, inject_name, split_mail
from .paths import Stack
from .ui import say

_AM = ("am", "-q", "--keep-cr", "--keep-non-patch", "--no-gpg-sign", "--no-3way")


def commit_patches(tree: Path, patches: list[Patch]) -> None:
    """git am on top of HEAD; stops on a conflict with git's state kept."""
    if not patches:
        return
    git = Git(tree)
    start = git.out("rev-parse", "HEAD")
    for p in patches:
        if not p.diff:
            raise StackError(CHECK_FAILED, f"{p.name} changes nothing", hint=f"rm patches/{p.name}")
    with TemporaryDirectory() as temp:
        mails = []
        for p in patches:
            mails.append(Path(temp) / p.name)
            mails[-1].write_bytes(inject_name(p.raw, p.name))
        done = git.call(*_AM, "--committer-date-is-author-date", *map(str, mails))
    count = len(git.commits(start, "HEAD"))
    if done.returncode:
        _conflict(git, patches[min(count, len(patches) - 1)], done.stderr.decode(errors="replace"))
    # am returns 0 for patches it skipped, so the commits are counted.
    if count != len(patches):
        raise StackError(CHECK_FAILED, f"{len(patches)} patches gave {count} commits")


def _conflict(git: Git, patch: Patch, stderr: str) -> None:
    diff = split_mail(patch.raw)[1]
    merged = git.call("apply", "--check", "--reverse", data=diff).returncode == 0
    facts = [x for x in stderr.splitlines() if x.startswith("error:")] or [stderr.strip()]
    if merged:
        raise StackError(
            CONFLICT,
            f"{patch.name}: its change is already in the tree",
            [*first(facts), "upstream has it, or an earlier patch does: drop the patch"],
            f"git -C {git.cwd} am --skip",
        )
    raise StackError(
        CONFLICT,
        f"{patch.name} does not apply",
        [
            *first(facts),
            f"stopped inside git am in {git.cwd}; the patches before it are commits",
            "edit and git add the files, git am --continue, then scripts/refresh.sh",
        ],
        f"git -C {git.cwd} am --show-current-patch=diff",
    )


def select(patches: list[Patch], upto: str | None) -> list[Patch]:
    """The series up to and including one patch."""
    if not upto:
        return patches
    name = canonical_name(os.path.basename(upto))
    found = [i for i, p in enumerate(patches) if p.name == name]
    if not found:
        raise StackError(USAGE, f"no patch {name} in the series", hint="cat patches/series")
    return patches[: found[0] + 1]


def apply(stack: Stack, upto: str | None = None, force: bool = False, plain: bool = False) -> str:
    """Bring .work/vllm to the series; returns the tree id."""
    patches = series.load(stack)
    chosen = select(patches, upto)
    fetch(stack)
    git = Git(stack.tree)
    if facts := state.unsaved(stack):
        if not force:
            raise StackError(
                UNSAVED,
                f"{stack.shown(stack.tree)} holds work that is not in patches/",
                [*first(facts), "--force keeps it under a backup branch and goes on"],
                f"scripts/refresh.sh{stack.flag}",
            )
        say(f"the work is kept as branch {state.backup(git)} in {stack.shown(stack.tree)}")
        for what, abort in (
            ("git am", "am"),
            ("git rebase", "rebase"),
            ("git cherry-pick", "cherry-pick"),
        ):
            if git.busy() == what:
                git.call(abort, "--quit")
    base = git.out("rev-parse", BASE)
    git.raw("checkout", "-q", "-f", "-B", BRANCH, base)
    git.raw("clean", "-q", "-fd")
    if plain:
        _patch_only(stack, chosen)
        state.save(git, state.Saved(git.out("rev-parse", "HEAD"), state.digests(chosen), "", True))
        git.raw("add", "-A", "-f", "--", *{f for p in chosen for f in p.files})
        tree = git.out("write-tree")
    else:
        commit_patches(stack.tree, chosen)
        partial = chosen[-1].name if len(chosen) < len(patches) else ""
        head = git.out("rev-parse", "HEAD")
        state.save(git, state.Saved(head, state.digests(chosen), partial))
        tree = git.tree_of("HEAD")
    hide_generated(git)
    if len(chosen) == len(patches):
        expect_tree(stack, tree)
        tag(stack, git)
    return tree


def tag(stack: Stack, git: Git) -> None:
    """A version tag, so that `pip install .work/vllm` finds our version by itself."""
    for old in git.out("tag", "--list", "v*+ddtree.*").split():
        git.raw("tag", "-d", old)
    git.raw("tag", f"v{stack.pin.built_version('cuda')}")


def expect_tree(stack: Stack, tree: str) -> None:
    """The pin knows what the whole series gives."""
    if stack.upcoming and (moved := upcoming.moved(stack)):
        say(f"{len(moved)} of patches/ changed since {stack.shown(stack.pin_file)} was written")
        return
    if tree != stack.pin.tree:
        raise StackError(
            CHECK_FAILED,
            "the series does not give the pinned tree",
            [f"tree expected {stack.pin.tree}", f"tree found    {tree}"],
            f"scripts/refresh.sh{stack.flag}",
        )


def _patch_only(stack: Stack, patches: list[Patch]) -> None:
    """patch(1) for those without git; -F0 -N, for fuzz applies merged lines a second time."""
    tool = shutil.which("patch")
    if not tool:
        raise StackError(TOOL, "patch(1) is not installed", hint="apt-get install patch")
    for p in patches:
        done = subprocess.run(
            [tool, "-p1", "-F0", "-N", "-s", "--no-backup-if-mismatch", "--binary"],
            cwd=stack.tree,
            input=split_mail(p.raw)[1],
            capture_output=True,
        )
        if done.returncode:
            facts = first((done.stdout + done.stderr).decode(errors="replace").splitlines())
            raise StackError(CONFLICT, f"{p.name} does not apply with patch(1)", facts)
