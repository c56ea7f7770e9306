"""refresh: commits of the work tree become patches/, its table, and the pin's [stack]."""

from __future__ import annotations

from dataclasses import dataclass

from . import apply as applying
from . import features, series, state, upcoming
from .errors import CHECK_FAILED, UNSAVED, StackError
from .export import export
from .fetch import BASE
from .files import replace_dir, temp_dir
from .git import Git, first
from .patchfile import Patch
from .paths import Stack
from .pin import Pin
from .ui import say


def render(patches: list[Patch]) -> dict[str, bytes]:
    """Every file of patches/."""
    files = {p.name: p.raw for p in patches}
    files["series"] = "".join(f"{p.name}\n" for p in patches).encode()
    files["README.md"] = series.table(patches).encode()
    return files


def next_revision(stack: Stack, tree: str, pin: Pin) -> int:
    """N of +ddtree.N: one more than the committed pin's when the tree is another one.

    Two trees that were ever committed thus never share a version. `pin` is what counts where none
    is committed for its release.
    """
    done = Git(stack.root).call("show", f"HEAD:./{stack.pin_file.relative_to(stack.root)}")
    if done.returncode == 0:
        with temp_dir(stack.pin_file) as temp:
            (temp / "pin.toml").write_bytes(done.stdout)
            committed = Pin.load(temp / "pin.toml")
        if committed.version != pin.version:
            committed = pin
    else:
        committed = pin
    return committed.revision + (committed.tree != tree)


@dataclass
class Difference:
    """What a refresh would change."""

    files: list[str]
    pin: Pin | None


def compare(stack: Stack, patches: list[Patch], tree: str) -> Difference:
    """Differences between patches/ + pin and what the commits say."""
    want = render(patches)
    have = {p.name: p.read_bytes() for p in stack.patches.iterdir() if p.is_file()}
    lines = [f"new: patches/{n}" for n in want if n not in have]
    lines += [f"gone: patches/{n}" for n in sorted(have) if n not in want]
    lines += [f"differs: patches/{n}" for n, b in want.items() if n in have and have[n] != b]
    pin = None
    if stack.pin.tree != tree:
        pin = stack.pin.with_stack(next_revision(stack, tree, stack.pin), tree)
        lines.append(f"differs: upstream/pin.toml (tree {stack.pin.tree[:12]} -> {tree[:12]})")
    return Difference(lines, pin)


def _guard(stack: Stack, patches: list[Patch]) -> None:
    """Refuse when writing would lose what someone else put into patches/."""
    saved = state.load(Git(stack.tree))
    if saved.plain or saved.upto:
        raise StackError(
            CHECK_FAILED,
            f"the work tree holds the series only up to {saved.upto}"
            if saved.upto
            else "the work tree was made with --plain and has no commits",
            ["a refresh would drop the rest"],
            f"scripts/apply.sh{stack.flag}",
        )
    have, mine = state.on_disk(stack), state.digests(patches)
    # A file may be replaced if it is what was applied, or already what would be written.
    foreign = [n for n, d in have.items() if saved.patches.get(n) != d and mine.get(n) != d]
    foreign += [n for n in saved.patches if n not in have and n in mine]
    if foreign:
        raise StackError(
            UNSAVED,
            "patches/ changed since it was applied; a refresh would undo that",
            [
                *first([f"changed: patches/{n}" for n in sorted(foreign)]),
                "apply with --force keeps your commits on a backup branch; cherry-pick them after",
            ],
            f"scripts/apply.sh{stack.flag} --force",
        )


def refresh(stack: Stack, check: bool = False) -> list[str]:
    """Write (or with `check` only list) what differs; returns the list."""
    git = Git(stack.tree)
    if not (stack.tree / ".git").exists():
        raise StackError(
            CHECK_FAILED, "there is no work tree yet", hint=f"scripts/apply.sh{stack.flag}"
        )
    if what := git.busy():
        raise StackError(
            UNSAVED, f"an unfinished {what} in the work tree", hint=f"git -C {stack.tree} status"
        )
    if dirty := git.dirty():
        raise StackError(
            UNSAVED,
            "the work tree has edits that are in no commit",
            first(dirty),
            f"git -C {stack.tree} commit -a --fixup COMMIT",
        )
    patches = export(stack.tree, BASE)
    if stack.upcoming:
        return _refresh_next(stack, git, patches, check)
    if not check:
        _guard(stack, patches)
    difference = compare(stack, patches, git.tree_of("HEAD"))
    if check:
        return difference.files
    if difference.files:
        with temp_dir(stack.patches) as temp:
            new = temp / "patches"
            new.mkdir()
            for name, data in render(patches).items():
                (new / name).write_bytes(data)
            replace_dir(new, stack.patches)
        if difference.pin:
            difference.pin.save(stack.pin_file)
            stack.__dict__.pop("pin", None)
    state.save(git, state.Saved(git.out("rev-parse", "HEAD"), state.digests(patches)))
    applying.tag(stack, git)
    if readme := features.in_readme(stack):
        stack.readme.write_text(readme)
    for line in series.check_headers(patches):
        say(f"warning: {line}")
    return difference.files


def _refresh_next(stack: Stack, git: Git, patches: list[Patch], check: bool) -> list[str]:
    """The same for upstream/next, where a patch is written only if patches/ has none that does."""
    from .sharing import write

    _guard(stack, patches)
    if late := upcoming.stale(stack):
        raise StackError(
            UNSAVED,
            "patches/ changed below patches of upstream/next; a refresh would hide that",
            first(late),
            f"scripts/rebase.sh {stack.pin.version}",
        )
    names = {p.name for p in patches}
    dropped = [p.name for p in series.load(Stack(stack.root)) if p.name not in names]
    for name in (n for n in dropped if n not in upcoming.load(stack).dropped):
        say(f"dropped: {name}, no commit of the work tree has it")
    told = write(stack, git, BASE, "HEAD", patches, dropped, stack.pin, check)
    lines = [f"differs: upstream/next/{n}" for n in told.changed]
    if check:
        return lines
    stack.__dict__.pop("pin", None)
    saved = state.digests(series.load(stack))
    state.save(git, state.Saved(git.out("rev-parse", "HEAD"), saved))
    applying.tag(stack, git)
    return lines
