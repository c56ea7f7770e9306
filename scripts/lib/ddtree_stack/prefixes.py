"""Every prefix of the series imports, and its last patch's Tests: pass: the stack is bisectable."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections import deque
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from .errors import CHECK_FAILED, StackError
from .fetch import BASE, EGG_INFO
from .git import Git, first
from .install import environ, install, site_packages
from .patchfile import Patch
from .paths import Stack
from .ui import result, say

_JOBS = 2  # each needs a core and some 2 GB

# Imports each module named on stdin and prints {module: error or null}; its own process, for an
# import may leave torch in a state that others notice.
_IMPORT = """
import importlib, json, sys, traceback
import vllm
print(vllm.__file__, file=sys.stderr)
told = {}
for name in json.load(sys.stdin):
    try:
        importlib.import_module(name)
        told[name] = None
    except BaseException as err:
        told[name] = f"{type(err).__name__}: {err}"
print("\\n" + json.dumps(told))
"""


def module_name(path: str) -> str | None:
    """The module a file of vllm/ is imported as."""
    p = Path(path)
    if p.parts[0] != "vllm" or p.suffix != ".py":
        return None
    parts = p.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


class Checkout:
    """A checkout that runs: the tree's Python, the installed wheel's binaries and metadata."""

    def __init__(self, stack: Stack, tree: Path, tip: str) -> None:
        self.tree, self.git = tree, Git(tree)
        self.env = environ(stack)
        self.env["PYTHONPATH"] = str(tree)
        # The installed build is the CPU's: its kernels run in Triton's interpreter, which has to
        # be chosen before upstream's conftest.py imports vllm.
        self.env["TRITON_INTERPRET"] = "1"
        self.python = str(stack.venv / "bin" / "python")
        self.site = site_packages(stack.venv)
        self.binaries = self._binaries(tip)
        if stack.upcoming:
            # The installed wheel is of another release, whose Python does not belong here.
            self.binaries = [n for n in self.binaries if n.endswith(".so")]

    def switch(self, commit: str) -> None:
        """Check out a commit and make it importable."""
        self.git.raw("checkout", "-q", "-f", "--detach", commit)
        # Its version would hide the installed one, whose `cpu` part upstream's platform looks for.
        shutil.rmtree(self.tree / EGG_INFO, ignore_errors=True)
        for name in self.binaries:
            link = self.tree / name
            if not link.is_symlink():
                link.parent.mkdir(parents=True, exist_ok=True)
                link.symlink_to(self.site / name)

    def _binaries(self, tip: str) -> list[str]:
        """Files of the installed wheel that neither upstream's source nor a patch has."""
        source: set[str] = set()
        for commit in (BASE, tip):
            source |= set(self.git.out("ls-tree", "-r", "--name-only", commit, "vllm").splitlines())
        rows = (next(self.site.glob("vllm-*.dist-info")) / "RECORD").read_text().splitlines()
        names = (x.split(",", 1)[0] for x in rows)
        return [n for n in names if n.startswith("vllm/") and n not in source and ".pyc" not in n]

    def imports(self, modules: list[str]) -> dict[str, str | None]:
        """Module to error (or None). `import vllm` itself failing is an error of the check."""
        done = subprocess.run(
            [self.python, "-c", _IMPORT],
            cwd=self.tree.parent,
            env=self.env,
            input=json.dumps(modules),
            capture_output=True,
            text=True,
        )
        if done.returncode or str(self.tree) not in done.stderr:
            raise StackError(CHECK_FAILED, "import vllm fails", done.stderr.splitlines()[-8:])
        return json.loads(done.stdout.splitlines()[-1])

    def compiles(self, files: list[str]) -> list[str]:
        """Syntax errors, as lines."""
        there = [f for f in files if (self.tree / f).is_file()]
        if not there:
            return []
        done = subprocess.run(
            [self.python, "-m", "compileall", "-q", "-f", *there],
            cwd=self.tree,
            env=self.env,
            capture_output=True,
            text=True,
        )
        return done.stdout.splitlines() if done.returncode else []

    def tests(self, nodes: list[str]) -> tuple[int, str, list[str]]:
        """Status, closing line and last lines of pytest in the tree.

        Upstream's conftest.py above the tests is left out: it imports all there is, for ten
        seconds, and what a patch brings has no use for it.
        """
        folders = [(self.tree / n.partition("::")[0]).parent for n in nodes]
        cut = f"--confcutdir={os.path.commonpath(folders)}"
        done = subprocess.run(
            [self.python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-x", cut, *nodes],
            cwd=self.tree,
            env=self.env,
            capture_output=True,
            text=True,
        )
        lines = (done.stdout + done.stderr).splitlines()
        closing = next(
            (x for x in reversed(done.stdout.splitlines()) if " in " in x), "no closing line"
        )
        if done.returncode < 0:
            lines.append(f"pytest was ended by signal {-done.returncode}")
        return done.returncode, closing, lines[-40:]


def prefixes(stack: Stack, tree: Path, tip: str, patches: list[Patch], tests: str) -> None:
    """Every prefix, two at a time where there are two cores."""
    install(stack, "cpu")
    first_one = Checkout(stack, tree, tip)
    commits = first_one.git.commits(BASE, tip)
    known = _base_failures(first_one, patches)
    jobs = max(1, min(_JOBS, os.cpu_count() or 1, len(patches)))
    checkouts = [first_one]
    for i in range(1, jobs):
        other = tree.with_name(f"{tree.name}-{i}")
        first_one.git.raw("worktree", "add", "-q", "--detach", str(other), BASE)
        checkouts.append(Checkout(stack, other, tip))
    threads = str(max(1, (os.cpu_count() or 1) // jobs))
    todo = deque(enumerate(zip(commits, patches, strict=True), 1))
    failed: list[Exception] = []

    def worker(at: Checkout) -> None:
        at.env["OMP_NUM_THREADS"] = threads
        while todo and not failed:
            number, (commit, patch) = todo.popleft()
            started = time.monotonic()
            say(f"[{number}/{len(patches)}] {patch.name} ...")
            try:
                told = _prefix(at, commit, patch, known, tests)
            except Exception as err:
                failed.append(err)
                return
            seconds = time.monotonic() - started
            say(f"[{number}/{len(patches)}] {patch.name}: imports, {told} ({seconds:.0f} s)")

    with ThreadPoolExecutor(jobs) as pool:
        for done in [pool.submit(worker, at) for at in checkouts]:
            done.result()
    if failed:
        raise failed[0]
    every = list(dict.fromkeys(n for p in patches for n in p.tests))
    if tests == "all" and every:
        first_one.switch(tip)
        say(f"all Tests: on the whole stack: {run_tests(first_one, 'the whole stack', every)}")
    result(f"prefixes: {len(patches)} import; Tests: {tests}")


def _prefix(at: Checkout, commit: str, patch: Patch, known: dict[str, str], tests: str) -> str:
    """One prefix; returns what became of its tests."""
    at.switch(commit)
    if bad := at.compiles([f for f in patch.files if f.endswith(".py")]):
        raise StackError(CHECK_FAILED, f"{patch.name}: does not compile", first(bad))
    if bad := judge_imports(at.imports(_modules(at, patch)), known):
        raise StackError(CHECK_FAILED, f"{patch.name}: a module does not import", first(bad))
    if not patch.tests:
        return "no tests"
    return "tests not run" if tests == "none" else run_tests(at, patch.name, patch.tests)


def _modules(at: Checkout, patch: Patch) -> list[str]:
    there = [f for f in patch.files if (at.tree / f).is_file()]
    return [m for f in there if (m := module_name(f))]


def _base_failures(at: Checkout, patches: list[Patch]) -> dict[str, str]:
    """Modules of unpatched upstream that do not import here (a GPU library is missing, say)."""
    at.switch(BASE)
    names = sorted({m for p in patches for m in _modules(at, p)})
    return {n: e for n, e in at.imports(names).items() if e}


def judge_imports(told: Mapping[str, str | None], known: Mapping[str, str | None]) -> list[str]:
    """Of what `imports` told, errors that upstream's own modules (`known`) do not have.

    Those that they have are said.
    """
    failed = {m: e for m, e in told.items() if e}
    if bad := [f"{m}: {e}" for m, e in failed.items() if known.get(m) != e]:
        return bad
    for m, e in failed.items():
        say(f"  {m}: does not import, nor does upstream's ({e})")
    return []


def run_tests(at: Checkout, name: str, nodes: list[str]) -> str:
    """pytest's closing line; a failure is a failed check."""
    status, closing, tail = at.tests(nodes)
    if status:
        hint = (
            "scripts/check.sh --tests none"
            if name == "the whole stack"
            else f"scripts/apply.sh --to {name}"
        )
        raise StackError(CHECK_FAILED, f"{name}: its Tests: fail", tail, hint)
    return closing.strip("= ")
