"""bisect: the first bad patch of the stack, or the first bad commit of upstream under it.

Everything happens in a checkout of its own; .work/vllm and the clone of upstream stay as they are.
The command's exit status means what it means to `git bisect run`: 0 good, 125 skip, 1 to 127 bad.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from . import series
from .apply import commit_patches, select
from .check import scratch
from .errors import CHECK_FAILED, USAGE, StackError
from .export import name_of
from .fetch import BASE, fetch
from .files import temp_dir
from .git import Git, clean_env, first
from .install import installed
from .mirror import commit_map
from .patchfile import inject_name
from .paths import Stack
from .prefixes import Checkout
from .ui import result, say

_SKIP = 125
_AM = ("am", "-q", "-3", "--keep-cr", "--keep-non-patch", "--no-gpg-sign")


@dataclass
class Bench:
    """Where commits are tried: a checkout, the command, and what is put on each commit."""

    git: Git
    command: list[str]
    env: Mapping[str, str]
    switch: Callable[[str], None]
    prepare: Callable[[], str] = lambda: ""  # a reason to skip the commit, or nothing
    show: Callable[[str], str] = str

    def judge(self, commit: str) -> str:
        """good, bad or skip; the checkout is back at the commit afterwards."""
        self.clean(commit)
        if why := self.prepare():
            say(f"skip {self.show(commit)}: {why}")
            self.clean(commit)
            return "skip"
        try:
            status = subprocess.run(
                self.command, cwd=self.git.cwd, env=clean_env(self.env), stdout=2
            ).returncode
        except OSError as err:
            raise StackError(USAGE, f"{self.command[0]} cannot be run: {err}") from err
        if not 0 <= status < 128:
            raise StackError(
                CHECK_FAILED,
                f"the command ended with status {status}, which says neither good nor bad",
                [f"at {self.show(commit)}", "0 is good, 125 skips, 1 to 127 is bad"],
            )
        self.clean(commit)
        verdict = {0: "good", _SKIP: "skip"}.get(status, "bad")
        say(f"{verdict} {self.show(commit)}: status {status}")
        return verdict

    def clean(self, commit: str) -> None:
        """Drop what was put on the commit and what the command left."""
        self.git.raw("checkout", "-q", "-f", "--detach", commit)
        self.git.raw("clean", "-q", "-fd")
        self.switch(commit)


def bisect(
    stack: Stack, good: str, bad: str, command: list[str], upstream: Path | None = None
) -> str:
    """Find and print the first bad patch, or with `upstream` (a clone) the first bad commit.

    Args:
        good: a patch or `base`; with `upstream` a revision.
        bad: a later patch; with `upstream` a revision.
        command: run in the checkout. Where .venv holds the stack, `python` is its Python and
            imports the checkout's vllm.

    Raises:
        StackError: 1 if the ends are not what they are said to be or skips hide the answer.

    """
    if not command:
        raise StackError(
            USAGE,
            "no command to judge by",
            hint="scripts/bisect.sh --good base --bad PATCH -- python -m pytest FILE",
        )
    with (_upstream if upstream else _patches)(stack, good, bad, command, upstream) as at:
        bench, low, high = at
        try:
            found = _first_bad(bench, low, high)
        finally:
            bench.git.call("bisect", "reset", "HEAD")
        told = [bench.show(c) for c in found]
    if len(told) == 1:
        result(f"first bad: {told[0]}")
        return told[0]
    raise StackError(
        CHECK_FAILED, "skips hide which one is the first bad one", [f"one of: {x}" for x in told]
    )


def _first_bad(bench: Bench, low: str, high: str) -> list[str]:
    """git bisect, a verdict at a time; several commits when skips leave no single one."""
    for commit, want in ((low, "good"), (high, "bad")):
        if (verdict := bench.judge(commit)) != want:
            raise StackError(
                CHECK_FAILED,
                f"--{want} is {verdict}",
                [
                    bench.show(commit),
                    "both ends are tried first, so that the answer means something",
                ],
            )
    git = bench.git
    done = git.call("bisect", "start", high, low)
    while True:
        text = (done.stdout + done.stderr).decode(errors="replace")
        if done.returncode == 2:  # only skipped ones are left
            good = git.out("for-each-ref", "--format=%(objectname)", "refs/bisect/good-*").split()
            return git.out("rev-list", "--reverse", "refs/bisect/bad", "--not", *good).split()
        if done.returncode:
            raise StackError(CHECK_FAILED, "git bisect failed", first(text.splitlines()))
        if "is the first bad commit" in text:
            return [git.out("rev-parse", "refs/bisect/bad")]
        commit = git.out("rev-parse", "HEAD")
        done = git.call("bisect", bench.judge(commit), commit)


@contextmanager
def _patches(
    stack: Stack, good: str, bad: str, command: list[str], _: Path | None
) -> Iterator[tuple[Bench, str, str]]:
    """The stack's commits, checked out beside .work/vllm."""
    patches = series.load(stack)
    count = {x: 0 if x == "base" else len(select(patches, x)) for x in (good, bad)}
    if count[good] >= count[bad]:
        raise StackError(USAGE, f"{good} does not come before {bad}", hint="cat patches/series")
    with scratch(stack) as tree:
        commit_patches(tree, patches)
        git = Git(tree)
        base = git.out("rev-parse", BASE)
        commits = [base, *git.commits(base, "HEAD")]
        env, switch = _runnable(stack, tree)

        def show(commit: str) -> str:
            if commit == base:
                return f"base ({stack.pin.sdist.name})"
            return f"{name_of(git, commit)} ({git.out('log', '-1', '--format=%s', commit)})"

        bench = Bench(git, command, env, switch, show=show)
        yield bench, commits[count[good]], commits[count[bad]]


@contextmanager
def _upstream(
    stack: Stack, good: str, bad: str, command: list[str], clone: Path | None
) -> Iterator[tuple[Bench, str, str]]:
    """Upstream's commits in a scratch clone that borrows its objects, the stack put on each."""
    assert clone is not None
    if not clone.is_dir() or Git(clone).call("rev-parse", "--git-dir").returncode:
        raise StackError(USAGE, f"{clone} is no clone of upstream", hint="scripts/mirror.sh --help")
    revs = {x: Git(clone).rev(x) for x in (good, bad)}
    if missing := [x for x, rev in revs.items() if rev is None]:
        raise StackError(USAGE, f"{clone} has no revision {', '.join(missing)}")
    patches = series.load(stack)
    fetch(stack)
    with temp_dir(stack.work / "bisect") as temp:
        tree = temp / "vllm"
        Git(temp).raw("clone", "-q", "--shared", "--no-checkout", str(clone.absolute()), "vllm")
        git = Git(tree)
        # Blobs of the pinned release let git am merge three ways where upstream moved on.
        alternates = git.git_dir() / "objects" / "info" / "alternates"
        common = Path(
            Git(stack.tree).out("rev-parse", "--path-format=absolute", "--git-common-dir")
        )
        with alternates.open("a") as f:
            f.write(f"{common / 'objects'}\n")
        git.raw("update-ref", BASE, Git(stack.tree).out("rev-parse", BASE))
        git.raw("checkout", "-q", "-f", "--detach", revs[good] or "")
        mails = []
        for patch in patches:
            mails.append(temp / patch.name)
            mails[-1].write_bytes(inject_name(patch.raw, patch.name))

        def prepare() -> str:
            if not git.call(*_AM, *map(str, mails)).returncode:
                return ""
            number = int((git.git_dir() / "rebase-apply" / "next").read_text())
            git.call("am", "--abort")
            return f"{patches[number - 1].name} does not apply"

        env, switch = _runnable(stack, tree)
        ids = commit_map(Path(Git(clone).out("rev-parse", "--absolute-git-dir")))

        def show(commit: str) -> str:
            told = git.out("log", "-1", "--format=%h (%s)", commit)
            return f"{told}, upstream's {ids[commit][:12]}" if commit in ids else told

        yield Bench(git, command, env, switch, prepare, show), revs[good] or "", revs[bad] or ""


def _runnable(stack: Stack, tree: Path) -> tuple[Mapping[str, str], Callable[[str], None]]:
    """Environment and switch: .venv's Python and binaries under the checkout, where there are."""
    if not installed(stack):
        say("no .venv with the stack: the command gets your own Python (scripts/install.sh)")
        return {}, lambda commit: None
    at = Checkout(stack, tree, "HEAD")
    return at.env, at.switch
