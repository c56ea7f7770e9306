"""rebase: the stack on another upstream release, as upstream/next.

It works in a repository of its own, .work/rebase, which holds every release concerned as one
commit. patches/, upstream/next and the other trees are read; only a rebase that came to its end
writes, and then all at once. Where upstream/next exists, its patches are what is rebased, with
what changed in patches/ since put on top of them: what was adapted once stays adapted.
"""

from __future__ import annotations

import fcntl
import json
import shlex
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from . import release, series, sharing, state, upcoming
from .apply import apply, commit_patches
from .errors import CHECK_FAILED, CONFLICT, UNSAVED, USAGE, StackError
from .export import export, name_of
from .fetch import settle
from .files import temp_dir, write_atomic
from .git import Git, first
from .patchfile import Patch
from .paths import Stack
from .pin import Pin
from .ui import result, say, step

_BRANCH = "rebase"
_CONTINUE = "scripts/rebase.sh --continue"


@dataclass
class Job:
    """A rebase under way, as .work/rebase/.git/ddtree-rebase.json keeps it."""

    version: str
    pin: str  # the text of the new release's pin
    old: str  # base and tip of the stack on the present release
    old_tip: str
    new: str  # base on the new release
    picked: list[str] = field(default_factory=list)  # names of the patches, in order
    dropped: list[str] = field(default_factory=list)  # left out from the start
    made_from: dict[str, str] = field(default_factory=dict)
    started: float = 0.0


def _file(git: Git) -> Path:
    return git.git_dir() / "ddtree-rebase.json"


def _load(stack: Stack) -> Job | None:
    if not (stack.rebase_tree / ".git").exists():
        return None
    try:
        return Job(**json.loads(_file(Git(stack.rebase_tree)).read_text()))
    except (OSError, ValueError, TypeError):
        return None


def _need(stack: Stack) -> Job:
    job = _load(stack)
    if job is None:
        raise StackError(USAGE, "no rebase is under way", hint="scripts/rebase.sh VERSION")
    return job


@contextmanager
def _alone(stack: Stack) -> Iterator[None]:
    """One process at a time."""
    stack.work.mkdir(parents=True, exist_ok=True)
    with (stack.work / "rebase.lock").open("w") as f:
        try:
            fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as err:
            raise StackError(
                UNSAVED, "another rebase.sh is running", hint="scripts/rebase.sh --status"
            ) from err
        yield


def _refuse_unsaved(stack: Stack) -> None:
    for one in (stack, stack.next()):
        if not one.pin_file.is_file() or not (one.tree / ".git").exists():
            continue
        if facts := state.unsaved(one):
            raise StackError(
                UNSAVED,
                f"{one.shown(one.tree)} holds work that is not in {one.shown(one.saved_in)}/",
                [*first(facts), "a rebase would go without it"],
                f"scripts/refresh.sh{one.flag}",
            )


def _repository(stack: Stack) -> Git:
    """The repository of rebases; resolutions made in it are reused by later ones (rerere)."""
    at = stack.rebase_tree
    git = Git(at)
    if not (at / ".git").exists():
        at.mkdir(parents=True, exist_ok=True)
        git.raw("init", "-q", "-b", _BRANCH)
        settle(at)
    for key, value in (
        ("rerere.enabled", "true"),
        ("rerere.autoUpdate", "true"),
        ("merge.conflictStyle", "diff3"),
        ("core.commentChar", ";"),  # a line of a patch's message may start with '#'
    ):
        git.raw("config", key, value)
    # Left by a process that was ended before its job was written: nobody has worked on it.
    if what := git.busy():
        git.call(what.removeprefix("git "), "--quit")
    return git


def start(stack: Stack, version: str, offline: bool = False) -> None:
    """Begin, and go on until the end or the first conflict."""
    with _alone(stack):
        if job := _load(stack):
            raise StackError(
                UNSAVED,
                f"a rebase onto {job.version} is under way",
                ["--continue goes on with it, --abort gives it up"],
                "scripts/rebase.sh --status",
            )
        own = series.load(stack)
        _refuse_unsaved(stack)
        pin = release.describe(stack, version, offline)
        git = _repository(stack)
        old = release.bring(stack, git, stack.pin, offline)
        new = release.bring(stack, git, pin, offline)
        with step(f"apply {len(own)} patches to {stack.pin.version}"):
            _switch(git, old)
            commit_patches(git.cwd, own)
            tip = git.out("rev-parse", "HEAD")
        todo, picked, dropped = _plan(stack, git, own, old, tip, offline)
        job = Job(
            version=pin.version,
            pin=pin.render(),
            old=old,
            old_tip=tip,
            new=new,
            picked=picked,
            dropped=dropped,
            made_from={p.name: upcoming.blob(p) for p in own},
            started=time.time(),
        )
        _switch(git, tip)
        git.raw("checkout", "-q", "-B", _BRANCH)
        git.raw("update-ref", "refs/ddtree/base", new)
        write_atomic(_file(git), json.dumps(vars(job), indent=1).encode())
        with temp_dir(git.cwd) as temp:
            (temp / "todo").write_text("".join(f"{line}\n" for line in todo))
            done = git.call(
                *("rebase", "-q", "-i", "--onto", new, "--empty=drop", "--no-autosquash"),
                *("--committer-date-is-author-date", old, _BRANCH),
                env={
                    "GIT_SEQUENCE_EDITOR": f"cp {shlex.quote(str(temp / 'todo'))}",
                    "GIT_EDITOR": "true",
                },
            )
        _drive(stack, git, job, done.returncode, done.stderr)


def _switch(git: Git, commit: str) -> None:
    git.raw("checkout", "-q", "-f", "--detach", commit)
    git.raw("clean", "-q", "-fd")


def _plan(
    stack: Stack, git: Git, own: list[Patch], old: str, tip: str, offline: bool
) -> tuple[list[str], list[str], list[str]]:
    """The rebase's list, the names on it, and the names left out.

    A patch that upstream/next has no version of is picked as it is. One that it has is picked from
    there, followed by what changed in patches/ since that version was made.
    """
    mine = dict(zip((p.name for p in own), git.commits(old, tip), strict=True))
    record, adapted = upcoming.load(stack), upcoming.overrides(stack)
    blobs = {p.name: upcoming.blob(p) for p in own}
    dropped = [n for n in blobs if record.dropped.get(n) == blobs[n]]
    for name in dropped:
        say(f"{name}: still left out, the next release has it")
    for name in [n for n in adapted if n in record.made_from and n not in blobs]:
        say(f"{name}: gone from patches/, and with it its version in upstream/next")
        del adapted[name]
    if not adapted:
        picked = [n for n in blobs if n not in dropped]
        return [f"pick {mine[n]} {n}" for n in picked], picked, dropped
    with step("apply upstream/next as it was written"):
        before, before_next = _as_recorded(stack, git, record, old, offline)

    def message(commit: str) -> str:
        return git.out("log", "-1", "--format=%B", commit)

    todo, picked = [], []
    previous = old
    for name in sorted(blobs.keys() | adapted.keys()):
        if name in dropped:
            previous = mine[name]
            continue
        picked.append(name)
        if name not in adapted:
            todo.append(f"pick {mine[name]} {name}")
        else:
            todo.append(f"pick {before_next[name]} {name}, as upstream/next has it")
            if name in blobs and record.made_from.get(name) != blobs[name]:
                since = _since(git, name, before[name], mine[name], previous)
                # The message is the newer one, unless the release has its own.
                kept = message(before[name]) != message(before_next[name])
                how = "fixup" if kept else "fixup -C"
                todo.append(f"{how} {since} {name}, what changed since")
        previous = mine.get(name, previous)
    return todo, picked, dropped


def _as_recorded(
    stack: Stack, git: Git, record: upcoming.Record, old: str, offline: bool
) -> tuple[dict[str, str], dict[str, str]]:
    """Commits, by patch name, of patches/ and of upstream/next as they were when it was written."""
    was = []
    now = {upcoming.blob(p): p.raw for p in series.load(stack)}
    for name, blob in record.made_from.items():
        raw = now.get(blob)
        if raw is None:
            done = Git(stack.root).call("cat-file", "blob", blob)
            if done.returncode:
                raise StackError(
                    CHECK_FAILED,
                    f"the {name} that upstream/next was made from is not in git's history",
                    [
                        f"its blob is {blob}; a shallow clone lacks it",
                        "without it, what changed since cannot be told",
                    ],
                    "git fetch --unshallow",
                )
            raw = done.stdout
        was.append(Patch(name, raw))
    told = []
    next_base = release.bring(stack, git, stack.next().pin, offline)
    for base, patches in ((old, was), (next_base, upcoming.overlay(stack, was))):
        _switch(git, base)
        try:
            commit_patches(git.cwd, patches)
        except StackError as err:
            git.call("am", "--quit")
            raise StackError(
                CHECK_FAILED, "upstream/next is not as it was written", [err.what, *err.facts]
            ) from err
        commits = git.commits(base, "HEAD")
        told.append(dict(zip((p.name for p in patches), commits, strict=True)))
    return told[0], told[1]


def _since(git: Git, name: str, was: str, now: str, previous: str) -> str:
    """A commit of what changed in one patch: its parent is the old text in the new place."""
    _switch(git, previous)
    done = git.call("cherry-pick", "--allow-empty", "--keep-redundant-commits", was)
    if done.returncode == 0:
        parent, tree = git.out("rev-parse", "HEAD"), git.tree_of(now)
    else:
        git.call("cherry-pick", "--abort")
        say(f"{name}: changed together with patches before it; expect a conflict")
        parent, tree = was, _with_files(git, was, now)
    message = git.raw("log", "-1", "--format=%B", now)
    return git.out("commit-tree", tree, "-p", parent, data=message)


def _with_files(git: Git, was: str, now: str) -> str:
    """The tree of `was` with those files of `now` that either commit changes."""
    index = git.git_dir() / "ddtree-since-index"
    env = {"GIT_INDEX_FILE": str(index)}
    files: set[str] = set()
    for commit in (was, now):
        changed = git.out("diff", "--name-only", "--no-renames", "-z", f"{commit}~1", commit)
        files |= {f for f in changed.split("\0") if f}
    try:
        git.raw("read-tree", was, env=env)
        for file in sorted(files):
            git.raw("update-index", "--force-remove", "--", file, env=env)
        there = git.raw("ls-tree", "-r", "-z", now, "--", *sorted(files))
        git.raw("update-index", "-z", "--index-info", data=there, env=env)
        return git.out("write-tree", env=env)
    finally:
        index.unlink(missing_ok=True)


def _unmerged(git: Git) -> list[str]:
    return git.out("diff", "--name-only", "--diff-filter=U").splitlines()


def _at(git: Git) -> str | None:
    """The patch at which the rebase stopped."""
    commit = git.rev("REBASE_HEAD")
    if commit is None:
        return None
    return name_of(git, commit) or git.out("log", "-1", "--format=%s", commit)


def _drive(stack: Stack, git: Git, job: Job, status: int, stderr: bytes) -> None:
    """Go on while known resolutions carry it; finish, or stop with exit 3."""
    while git.busy():
        at = _at(git)
        if left := _unmerged(git):
            raise StackError(
                CONFLICT,
                f"{at} conflicts with {job.version}",
                [
                    *first([f"conflict: {git.cwd / f}" for f in left], 20),
                    f"see why: git -C {git.cwd} diff; what the patch is: "
                    f"git -C {git.cwd} show REBASE_HEAD",
                    f"edit them, git -C {git.cwd} add the files, then go on; or --abort",
                ],
                _CONTINUE,
            )
        if status == 0:  # stopped by an edit of the list, not by a conflict
            raise StackError(CONFLICT, f"stopped after {at}", hint=_CONTINUE)
        if b"CONFLICT" not in stderr and b"could not apply" not in stderr.lower():
            raise StackError(CONFLICT, f"git stopped at {at}", first(_lines(stderr)), _CONTINUE)
        say(f"{at}: its conflict was resolved before in the same way; reused")
        done = git.call("rebase", "--continue", env={"GIT_EDITOR": "true"})
        status, stderr = done.returncode, done.stderr + done.stdout
    if status or git.call("merge-base", "--is-ancestor", job.new, "HEAD").returncode:
        raise StackError(
            CHECK_FAILED,
            "git did not bring the stack onto the new release",
            first(_lines(stderr)),
            "scripts/rebase.sh --abort",
        )
    _finish(stack, git, job)


def _lines(stderr: bytes) -> list[str]:
    return [x for x in stderr.decode(errors="replace").splitlines() if x.strip()]


def resume(stack: Stack) -> None:
    """--continue: after a conflict was resolved."""
    with _alone(stack):
        job, git = _need(stack), Git(stack.rebase_tree)
        if not git.busy():  # ended by hand
            _drive(stack, git, job, 0, b"")
            return
        if left := _unmerged(git):
            git.call("rerere")
            raise StackError(
                CONFLICT,
                f"{len(left)} files of {_at(git)} are not resolved",
                first([f"conflict: {git.cwd / f}" for f in left], 20),
                f"git -C {git.cwd} add {shlex.quote(left[0])}",
            )
        if edited := git.out("diff", "--name-only").splitlines():
            raise StackError(
                CONFLICT,
                "edits are not added yet",
                first([f"edited: {git.cwd / f}" for f in edited]),
                f"git -C {git.cwd} add -u",
            )
        told = git.call("diff", "--cached", "--check").stdout.decode(errors="replace")
        if marks := [x for x in told.splitlines() if "leftover conflict marker" in x]:
            raise StackError(
                CONFLICT, "conflict markers are left", first(marks), f"git -C {git.cwd} diff HEAD"
            )
        done = git.call("rebase", "--continue", env={"GIT_EDITOR": "true"})
        _drive(stack, git, job, done.returncode, done.stderr + done.stdout)


def abort(stack: Stack) -> None:
    """--abort: everything is as before; resolutions and edits made so far are kept aside."""
    with _alone(stack):
        job, git = _need(stack), Git(stack.rebase_tree)
        git.call("rerere")
        kept = state.backup(git)
        git.call("rebase", "--abort")
        if what := git.busy():
            git.call(what.removeprefix("git "), "--quit")
        _switch(git, job.old)
        _file(git).unlink()
        result(f"the rebase onto {job.version} is given up; patches/ and upstream/ are untouched")
        result(f"what was done is kept as branch {kept} in {stack.shown(git.cwd)}")


def status(stack: Stack) -> None:
    """--status: where it stands, and the next step."""
    job = _load(stack)
    if job is None:
        result("no rebase is under way")
        if stack.next().pin_file.is_file():
            pin = stack.next().pin
            result(f"upstream/next is {pin.built_version('cuda')}, tree {pin.tree}")
            late = upcoming.stale(stack)
            for name in upcoming.moved(stack):
                word = "changed below its version there" if name in late else "changed since"
                result(f"{name}: {word}")
        return
    git = Git(stack.rebase_tree)
    done = len(git.commits(job.new, "HEAD"))
    result(f"onto {job.version}: {done} of {len(job.picked)} patches are there")
    if git.busy():
        result(f"stopped at {_at(git)}")
        for f in _unmerged(git):
            result(f"conflict: {git.cwd / f}")
    result(f"next: resolve and git add in {stack.shown(git.cwd)}, then {_CONTINUE} (or --abort)")


def _finish(stack: Stack, git: Git, job: Job) -> None:
    """Name what became empty, export, write upstream/next, show what changed."""
    if facts := git.dirty():
        raise StackError(
            CONFLICT, "edits are in no commit yet", first(facts), f"git -C {git.cwd} status"
        )
    own = series.load(stack)
    if {p.name: upcoming.blob(p) for p in own} != job.made_from:
        raise StackError(
            UNSAVED,
            "patches/ changed since the rebase began",
            ["the resolutions are kept: --abort, then begin again"],
            "scripts/rebase.sh --abort",
        )
    patches = export(git.cwd, job.new)
    there = {p.name for p in patches}
    subjects = {p.name: p.subject for p in [*own, *upcoming.overrides(stack).values()]}
    empty = [n for n in job.picked if n not in there]
    for name in empty:
        result(f"dropped: {name} ({subjects[name]}): {job.version} leaves nothing of it to do")
    for name in _only_tests_left(own, patches):
        say(f"{name}: only its tests are left, {job.version} has the rest: see its Drop-When")
    with temp_dir(git.cwd) as temp:
        (temp / "pin.toml").write_text(job.pin)
        pin = Pin.load(temp / "pin.toml")
    pin = release.with_tree(pin, git.tree_of(job.new))
    upcoming_stack = stack.next()
    told = sharing.write(upcoming_stack, git, job.new, "HEAD", patches, [*job.dropped, *empty], pin)
    compared = git.raw(
        *("range-diff", "--no-color", f"{job.old}..{job.old_tip}", f"{job.new}..HEAD")
    )
    kept = stack.work / f"rebase-{job.version}.range-diff"
    write_atomic(kept, compared)
    for line in compared.decode(errors="replace").splitlines():
        if line[:1] not in ("", " ") or line[:4].strip().rstrip(":").isdigit():
            result(f"  {line}")
    _file(git).unlink()
    git.raw("update-ref", f"refs/ddtree/done/{job.version}", "HEAD")
    for name in told.overrides:
        result(f"differs there: upstream/next/patches/{name}")
    result(
        f"{len(patches)} patches on {job.version}, {len(patches) - len(told.overrides)} shared "
        f"with patches/, tree {told.pin.tree}"
    )
    result(f"range-diff: {stack.shown(kept)}")
    for line in series.check_headers(patches, [*job.dropped, *empty]):
        say(f"warning: {line}")
    try:
        apply(upcoming_stack)
    except StackError as err:
        if err.code == CHECK_FAILED:
            raise
        say(err.render("apply.sh --next"))


def _only_tests_left(own: list[Patch], patches: list[Patch]) -> list[str]:
    """Patches that changed the program before and now change nothing but tests."""

    def program(patch: Patch) -> bool:
        return any(not f.startswith("tests/") for f in patch.files)

    before = {p.name for p in own if program(p)}
    return [p.name for p in patches if p.name in before and not program(p)]


def rebase(stack: Stack, version: str | None, action: str | None, offline: bool) -> None:
    """The verb."""
    if (version is None) == (action is None):
        raise StackError(
            USAGE,
            "say a version, or one of --continue, --abort and --status",
            hint="scripts/rebase.sh --help",
        )
    if version:
        start(stack, version, offline)
    else:
        {"continue": resume, "abort": abort, "status": status}[action](stack)
