"""test upstream: upstream's own tests on the unpatched pin and on the patched tree.

Only what got worse fails. The unpatched pin's outcomes are stored, so that a run costs one tree
and, of that, only the tests which pass there. Standard library only: `--gpu` runs on machines that
have neither tools nor a package index, from the source distribution in the cache.
"""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import subprocess
import time
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from .errors import CHECK_FAILED, CONFLICT, OK, USAGE, StackError
from .fetch import EGG_INFO, unpack
from .files import sha256_bytes, temp_dir, write_atomic
from .git import clean_env, first
from .index import fetch_artifact
from .paths import Stack
from .standins import write_hub
from .ui import result, say, step

_LIB = str(Path(__file__).resolve().parents[1])  # upstream_plugin lies there
MINIMUM = 1500  # tests that pass on a CPU; fewer, and something is wrong with the machine
_COLLECTING = 600  # seconds on the clock that importing a module may take
_GOOD = "passed"
_NOT_RUN = ("skipped", "not collected")
# Where a test says why it does not run here; the first that fits counts.
_REASONS = (
    ("time", r"over the time limit|Timeout"),
    ("GPU", r"cuda|gpu|rocm|xpu|nvidia|hopper|blackwell|\bsm_?\d\d|accelerator|aiter|flashinfer"),
    (
        "GPU",
        r"flash.?attn|flashmla|_C_stable_libtorch|cutlass|quack|deep.?gemm|tilelang|capability",
    ),
    (
        "download",
        r"offline|repository id|hub|outgoing|connect|safetensors|no .*weights|huggingface",
    ),
    (
        "library",
        r"No module named|Could not import|cannot import name|not installed|requires .*lib",
    ),
)
_KINDS = {
    "GPU": "need a GPU",
    "download": "need a download",
    "library": "need a library",
    "time": "over a limit",
    "other": "do not pass for another reason",
}
_ADDED = re.compile(r"^\+\+\+ b/(.+?)\r?$", re.MULTILINE)


@dataclass
class Suite:
    """upstream/tests/suite.toml."""

    areas: list[str]
    file_limit: float
    test_limit: float
    left_out: dict[str, str] = field(default_factory=dict)

    @classmethod
    def load(cls, stack: Stack) -> Suite:
        try:
            return cls(**tomllib.loads((_folder(stack) / "suite.toml").read_text()))
        except (OSError, TypeError, tomllib.TOMLDecodeError) as err:
            raise StackError(
                CHECK_FAILED, f"upstream/tests/suite.toml cannot be read: {err}"
            ) from err

    def files(self, tree: Path) -> list[str]:
        """The test files of the areas that this tree has."""
        found = [p for area in self.areas for p in (tree / area).glob("**/test_*.py")]
        names = sorted({p.relative_to(tree).as_posix() for p in found})
        return [n for n in names if n not in self.left_out]


@dataclass
class Outcome:
    """What became of one test, or of a file that could not be collected."""

    outcome: str
    why: str = ""


@dataclass
class Python:
    """The interpreter under test, and where its vLLM keeps what no source tree has."""

    path: str
    env: dict[str, str]
    package: Path
    device: str
    timeout: bool = True  # has it pytest-timeout?


def _folder(stack: Stack) -> Path:
    return stack.root / "upstream" / "tests"


def base_file(stack: Stack, device: str) -> Path:
    """Where the unpatched pin's outcomes lie."""
    return _folder(stack) / f"base-{stack.pin.version}-{device}.json"


def key(stack: Stack, device: str) -> dict[str, str]:
    """What the stored outcomes are valid for."""
    texts = [(_folder(stack) / n).read_bytes() for n in ("suite.toml", "models.json")]
    return {
        "version": stack.pin.version,
        "sdist": stack.pin.sdist.sha256,
        "device": device,
        "suite": sha256_bytes(b"".join(texts))[:16],
    }


# Trees


@contextmanager
def trees(stack: Stack, python: Python) -> Iterator[Path]:
    """The unpatched source over the installed binaries; `patch_tree` makes it the stack's."""
    archive = fetch_artifact(stack.pin.sdist, stack.cache)
    with temp_dir(stack.work / "upstream") as temp:
        with step(f"unpack {archive.name}"):
            tree = unpack(archive, temp)
        # Its version would hide the installed one, whose `cpu` part upstream's platform looks for.
        shutil.rmtree(tree / EGG_INFO, ignore_errors=True)
        mine = {f for p in _patches(stack) for f in _ADDED.findall(p.read_text())}
        for path in sorted(python.package.rglob("*")):
            name = f"vllm/{path.relative_to(python.package).as_posix()}"
            at = tree / name
            if path.is_file() and path.suffix != ".pyc" and name not in mine and not at.exists():
                at.parent.mkdir(parents=True, exist_ok=True)
                at.symlink_to(path)
        yield tree


def _patches(stack: Stack) -> list[Path]:
    return [stack.patches / n for n in stack.series_file.read_text().split()]


def patch_tree(stack: Stack, tree: Path) -> None:
    """Put the stack on the unpacked source."""
    for path in _patches(stack):
        # A repository around the tree would make git skip every file that lies outside its own.
        env = clean_env({"GIT_CEILING_DIRECTORIES": str(tree.parent)})
        done = subprocess.run(
            ["git", "apply", "-p1", str(path)], cwd=tree, env=env, capture_output=True, text=True
        )
        if done.returncode:
            facts = first(done.stderr.splitlines())
            raise StackError(CONFLICT, f"{path.name} does not apply", facts, "scripts/apply.sh")


# Running


def run(
    stack: Stack,
    python: Python,
    tree: Path,
    suite: Suite,
    files: list[str],
    only: Iterable[str] | None = None,
    pytest: list[str] = [],
    jobs: int = 2,
) -> dict[str, Outcome]:
    """Run files in a tree; returns node id to outcome (a file's own id if it is not collected).

    Each of the `jobs` processes has its share of the files. One that ends is started again after
    the file that ended it: the workers of pytest-xdist wait for one that is gone.
    """
    with temp_dir(stack.work / "upstream-report") as temp:
        hub = temp / "hub"
        write_hub(_folder(stack) / "models.json", hub)
        chosen = temp / "only.json" if only is not None else None
        if chosen:
            chosen.write_text(json.dumps(sorted(only or ())))
        env = python.env | {
            "PYTHONPATH": os.pathsep.join(
                # After the tree: a GPU machine may have what vLLM imports there.
                filter(None, [str(tree), _LIB, python.env.get("PYTHONPATH")])
            ),
            "PYTHONHASHSEED": "0",  # or sets give parameters in another order
            "HF_HUB_OFFLINE": "1",
            "HF_HUB_CACHE": str(hub),
            "HF_HOME": str(temp / "home"),
            "VLLM_NO_USAGE_STATS": "1",
        }
        command = [python.path, "-m", "pytest", "-p", "upstream_plugin", "-p", "no:cacheprovider"]
        command += ["-q", "--tb=line", "--no-header", "-W", "ignore", "--disable-warnings"]
        command += ["--continue-on-collection-errors"]
        command += [f"--timeout={suite.test_limit:g}"] if python.timeout else []
        command += pytest

        def share(number: int) -> dict[str, Outcome]:
            found: dict[str, Outcome] = {}
            left = sorted(files, key=lambda f: (tree / f).stat().st_size if f in there else 0)
            left = left[number::jobs]
            while left:
                report = temp / f"{number}.jsonl"
                report.write_text("")
                told = {"report": str(report), "limit": suite.file_limit}
                told |= {"only": str(chosen) if chosen else None}
                status, tail = _pytest(
                    [*command, *left],
                    tree,
                    env | {"DDTREE_UPSTREAM": json.dumps(told)},
                    report,
                    2 * suite.test_limit + _COLLECTING,
                )
                now, ended_by = _read(report)
                found |= now
                if ended_by is None:
                    if status not in (0, 1, 2, 5):
                        raise StackError(CHECK_FAILED, f"pytest ended with status {status}", tail)
                    break
                at = left.index(_file(ended_by))
                say(f"  {ended_by} ended its process")
                # While it collects nothing has run yet.
                left = left[:at] + left[at + 1 :] if "::" not in ended_by else left[at + 1 :]
            return found

        there = {f for f in files if (tree / f).is_file()}
        with ThreadPoolExecutor(jobs) as pool:
            shares = list(pool.map(share, range(jobs)))
        return {node: one for found in shares for node, one in found.items()}


def _pytest(
    command: list[str], tree: Path, env: dict[str, str], report: Path, patience: float
) -> tuple[int, list[str]]:
    """Run until it ends, or reports nothing for `patience` seconds; status and last lines."""
    with report.with_suffix(".log").open("w+", errors="replace") as log:
        process = subprocess.Popen(command, cwd=tree, env=env, stdout=log, stderr=log)
        try:
            seen, since = 0, time.monotonic()
            while process.poll() is None:
                time.sleep(0.2)
                if (size := report.stat().st_size) != seen:
                    seen, since = size, time.monotonic()
                elif time.monotonic() - since > patience:
                    process.kill()
        finally:
            if process.poll() is None:
                process.kill()
            status = process.wait()
        log.seek(0)
        return status, log.read().splitlines()[-20:]


def _read(report: Path) -> tuple[dict[str, Outcome], str | None]:
    """The outcomes in the plugin's file, and what ended its process before its end."""
    found: dict[str, Outcome] = {}
    begun: str | None = None
    for line in report.read_text().splitlines():
        row = json.loads(line)
        name, outcome = row["id"], row["outcome"]
        if outcome == "started":
            begun = name
        elif outcome == "ended":
            begun = None if begun == name else begun
        elif not _worse_seen(found.get(name), outcome):
            found[name] = Outcome(outcome, row["why"])
    if begun is not None:
        found[begun] = Outcome("crashed", "its process ended")
    return found, begun


def _worse_seen(seen: Outcome | None, outcome: str) -> bool:
    """A failed call is not undone by what comes after it (its teardown, or a flaky rerun)."""
    return seen is not None and seen.outcome == "failed" and outcome != "failed"


def _interpreter(stack: Stack, gpu: bool) -> Python | str:
    """What runs the tests, or why nothing can."""
    if gpu:
        from .gpu import _python

        path, env, reason = _python(stack)
        if reason:
            return reason
    else:
        from .install import environ, install

        install(stack, "cpu")
        path, env = str(stack.venv / "bin" / "python"), environ(stack)
        # Chosen before upstream's conftest.py imports vllm.
        env |= {"TRITON_INTERPRET": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        env.setdefault("OMP_NUM_THREADS", "1")
    code = (
        "import importlib.util as u; print(u.find_spec('vllm').submodule_search_locations[0]);"
        "print(u.find_spec('pytest_timeout') is not None)"
    )
    seen = subprocess.run(
        [path, "-c", code], cwd="/", env=env, capture_output=True, text=True, check=False
    )
    if seen.returncode:
        raise StackError(CHECK_FAILED, f"{path} has no vllm", seen.stderr.splitlines()[-3:])
    package, timeout = seen.stdout.splitlines()[-2:]
    return Python(path, env, Path(package), "cuda" if gpu else "cpu", timeout == "True")


def test(
    stack: Stack,
    pytest: list[str],
    gpu: bool = False,
    record: bool = False,
    jobs: int | None = None,
) -> int:
    """Compare the patched tree with the unpatched pin; 1 when a test got worse.

    Args:
        pytest: options for pytest; what begins with `tests/` selects folders, files or tests.
        gpu: the tests that the CPU's table says need a GPU, on a CUDA device.
        record: run the unpatched pin and store its outcomes, even if they are there.
        jobs: processes at a time; 2, on a GPU 1.

    """
    suite = Suite.load(stack)
    chosen = [x.rstrip("/") for x in pytest if x.startswith("tests/")]
    others = [x for x in pytest if not x.startswith("tests/")]
    python = _interpreter(stack, gpu)
    if isinstance(python, str):
        say(f"== upstream: skipped: {python}")
        return OK
    jobs = jobs or (1 if gpu else 2)
    with trees(stack, python) as tree:
        files = suite.files(tree)
        if unknown := [x for x in chosen if not any(_holds(x, f) for f in files)]:
            raise StackError(
                USAGE, f"not in the suite: {', '.join(unknown)}", suite.areas, "ls .work/vllm/tests"
            )
        if gpu:
            files = _gpu_files(stack, files)
        stored = load(stack, python.device)
        if stored is None or record:
            asked = [f for f in files if not chosen or any(_holds(x, f) for x in chosen)]
            with step(f"upstream's tests on the unpatched pin ({len(asked)} files)"):
                stored = run(stack, python, tree, suite, asked, None, others, jobs)
            if chosen or others:
                say("not stored: that takes the whole suite")
            else:
                _expect_enough(stored, python)
                save(stack, python.device, stored)
        good = {n for n, o in stored.items() if o.outcome == _GOOD}
        if chosen:
            good = {n for n in good if any(_holds(x, n) for x in chosen)}
        wanted = sorted({_file(n) for n in good})
        patch_tree(stack, tree)
        with step(f"upstream's tests on the patched tree ({len(wanted)} files)"):
            now = run(stack, python, tree, suite, wanted, good, others, jobs)
        if others:  # -k leaves tests out
            good &= set(now)
        worse = {n: _found(now, n) for n in sorted(good) if _found(now, n).outcome != _GOOD}
        if worse:
            say(f"{len(worse)} did not pass; they are run again, alone")
            again = run(stack, python, tree, suite, sorted({_file(n) for n in worse}), worse)
            worse = {n: _found(again, n) for n in worse if _found(again, n).outcome != _GOOD}
    if worse:
        # Some pass only beside tests that leave something behind for them.
        with trees(stack, python) as tree:
            alone = run(stack, python, tree, suite, sorted({_file(n) for n in worse}), worse)
        if dependent := {n for n in worse if _found(alone, n).outcome == "failed"}:
            say(
                f"not compared, for alone they fail on the pin, too: {', '.join(sorted(dependent))}"
            )
            good -= dependent
            worse = {n: o for n, o in worse.items() if n not in dependent}
    passed = len(good) - len(worse)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    say(f"{used.ru_utime + used.ru_stime:.0f} s of CPU")
    result(
        f"upstream: {passed} of {len(good)} tests in {len(wanted)} files pass as they do on "
        f"vLLM {stack.pin.version} unpatched; worse: {len(worse)}"
    )
    if worse:
        raise StackError(
            CHECK_FAILED,
            f"{len(worse)} of upstream's tests got worse",
            first([f"{n}: {o.outcome}: {o.why}" for n, o in worse.items()], 40),
            f"scripts/test.sh upstream {'--gpu ' if gpu else ''}-- {next(iter(worse))}",
        )
    return OK


def _file(node: str) -> str:
    return node.partition("::")[0]


def _holds(chosen: str, node: str) -> bool:
    """Is this test or file the chosen folder, file or test, or below it?"""
    if "::" in chosen and "::" not in node:
        return _file(chosen) == node
    return node == chosen or node.startswith((f"{chosen}/", f"{chosen}::", f"{chosen}["))


def _expect_enough(stored: dict[str, Outcome], python: Python) -> None:
    """A machine on which upstream's tests fail for its own reasons has nothing to tell."""
    passed = sum(o.outcome == _GOOD for o in stored.values())
    if python.device == "cpu" and passed < MINIMUM:
        few = first(sorted({o.why for o in stored.values() if o.outcome == "failed"}))
        raise StackError(CHECK_FAILED, f"only {passed} tests pass unpatched", few)


def _found(now: dict[str, Outcome], node: str) -> Outcome:
    """A test's outcome; its file's if that was not collected."""
    return now.get(node) or now.get(_file(node)) or Outcome("gone", "no such test any more")


# The stored outcomes


def load(stack: Stack, device: str) -> dict[str, Outcome] | None:
    """The unpatched pin's outcomes; None if there are none for this pin and suite."""
    try:
        data = json.loads(base_file(stack, device).read_text())
    except (OSError, ValueError):
        return None
    if data.get("key") != key(stack, device):
        return None
    return {
        f"{file}::{name}" if name else file: Outcome(outcome, why)
        for file, outcomes in data["files"].items()
        for outcome, reasons in outcomes.items()
        for why, names in reasons.items()
        for name in names
    }


def save(stack: Stack, device: str, outcomes: dict[str, Outcome]) -> None:
    """Write the outcomes (file: outcome: reason: tests) and the table that is made of them."""
    files: dict[str, dict[str, dict[str, list[str]]]] = {}
    for node in sorted(outcomes):
        one, (file, _, name) = outcomes[node], node.partition("::")
        reasons = files.setdefault(file, {}).setdefault(one.outcome, {})
        reasons.setdefault(_plain(one.why), []).append(name)
    data = {"key": key(stack, device), "files": files}
    write_atomic(base_file(stack, device), json.dumps(data, indent=0).encode() + b"\n")
    if on_cpu := load(stack, "cpu"):
        write_atomic(_folder(stack) / "README.md", table(stack, on_cpu).encode())


def _plain(why: str) -> str:
    """A reason without this machine's folders and addresses."""
    why = re.sub(r"(?<![\w/])(?:/[\w.+@-]+)+/(?=[\w.+-])", "", why)
    return re.sub(r"0x[0-9a-f]{6,}", "0x...", why)


def kind(one: Outcome) -> str:
    """Why a test does not pass on the unpatched pin: a key of _KINDS."""
    for name, pattern in _REASONS:
        if re.search(pattern, one.why, re.IGNORECASE):
            return name
    return "other"


def _gpu_files(stack: Stack, files: list[str]) -> list[str]:
    """Files with a test that the CPU's outcomes say needs a GPU."""
    stored = load(stack, "cpu")
    if stored is None:
        raise StackError(
            CHECK_FAILED,
            "which tests need a GPU is not known for this pin",
            [f"{stack.shown(base_file(stack, 'cpu'))} is missing or of another pin or suite"],
            "scripts/test.sh upstream --record",
        )
    need = {_file(n) for n, o in stored.items() if o.outcome != _GOOD and kind(o) == "GPU"}
    return [f for f in files if f in need]


def table(stack: Stack, outcomes: dict[str, Outcome]) -> str:
    """upstream/tests/README.md."""
    by_file: dict[str, Counter[str]] = defaultdict(Counter)
    reasons: dict[str, Counter[str]] = defaultdict(Counter)
    for node, one in outcomes.items():
        if one.outcome == _GOOD:
            by_file[_file(node)][_GOOD] += 1
            continue
        by_file[_file(node)][kind(one)] += 1
        reasons[_file(node)][one.why or one.outcome] += 1
    ran = sum(o.outcome not in _NOT_RUN for o in outcomes.values())
    total = Counter[str]()
    for counts in by_file.values():
        total += counts
    kinds = [k for k in _KINDS if total[k]]
    lines = [
        "# Upstream's own tests",
        "",
        "Written by `scripts/test.sh upstream --record` from what the tests of vLLM "
        f"{stack.pin.version} do unpatched, on a",
        "CPU; edits here are lost. `scripts/test.sh upstream` runs those that pass on the patched "
        "tree, and fails",
        "if one does not; `scripts/test.sh upstream --gpu` does the same on a GPU with the files "
        "that need one.",
        "Nothing is downloaded: configs and a byte tokenizer stand in for models "
        "([models.json](models.json)), and",
        "tests that load weights are left out. Other limits: [suite.toml](suite.toml). A module "
        "that is skipped or",
        "cannot be imported counts as one test.",
        "",
        f"Of {len(outcomes)} tests in {len(by_file)} files {ran} are run on the CPU and "
        f"{total[_GOOD]} pass; " + ", ".join(f"{total[k]} {_KINDS[k]}" for k in kinds) + ".",
        *_told_on_gpu(load(stack, "cuda") or {}),
        "",
        "| File | pass | " + " | ".join(_KINDS[k] for k in kinds) + " | reason |",
        "| --- | " + "--: | " * (len(kinds) + 1) + "--- |",
    ]
    for file in sorted(by_file):
        counts = by_file[file]
        cells = [str(counts[k] or "") for k in (_GOOD, *kinds)]
        why = reasons[file].most_common(1)
        text = _cell(why[0][0]) if why else ""
        if len(reasons[file]) > 1:
            text += f" (and {len(reasons[file]) - 1} other)"
        lines.append("| " + " | ".join([file.removeprefix("tests/"), *cells, text]) + " |")
    left = Suite.load(stack).left_out
    lines += [
        f"| {f.removeprefix('tests/')} |" + " |" * (len(kinds) + 1) + f" left out: {w} |"
        for f, w in sorted(left.items())
    ]
    return "\n".join(lines) + "\n"


def _told_on_gpu(outcomes: dict[str, Outcome]) -> list[str]:
    """A line on what the files that need a GPU do on one, where that has been recorded."""
    if not outcomes:
        return []
    passed = sum(o.outcome == _GOOD for o in outcomes.values())
    files = len({_file(n) for n in outcomes})
    return [f"On a GPU, {passed} of {len(outcomes)} tests pass in the {files} files that need one."]


def _cell(text: str, limit: int = 90) -> str:
    """A reason as a cell: short, without what breaks tables."""
    text = re.sub(r"[|<>`*_]", lambda m: "\\" + m[0], text)
    return text if len(text) <= limit else text[: limit - 3].rstrip("\\ ") + "..."


def problems(stack: Stack) -> list[str]:
    """What check.sh holds against the stored outcomes; nothing where a pin has no suite."""
    if not (_folder(stack) / "suite.toml").is_file():
        return []
    stored = load(stack, "cpu")
    if stored is None:
        return [f"{stack.shown(base_file(stack, 'cpu'))} is missing or of another pin or suite"]
    bad = []
    passed = sum(o.outcome == _GOOD for o in stored.values())
    if passed < MINIMUM:
        bad.append(f"{passed} tests pass on the unpatched pin; {MINIMUM} are wanted")
    readme = _folder(stack) / "README.md"
    if not readme.is_file() or readme.read_text() != table(stack, stored):
        bad.append("upstream/tests/README.md does not fit the outcomes")
    return bad
