"""test gpu: the feature's tests on a CUDA device, a process for each mode and file.

Standard library only, and nothing that a package index would have to be asked for: on a machine
without one, DDTREE_GPU_PYTHON names a Python that has the patched vLLM, torch and pytest.
"""

from __future__ import annotations

import os
import re
import runpy
import shutil
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from .errors import CHECK_FAILED, OK, UPSTREAM, USAGE, StackError
from .paths import Stack
from .ui import result, say

_PATCH_TESTS = "tests/v1/spec_decode/ddtree/"
_NOTHING_SELECTED = 5  # pytest's exit status
# Started first, or they are left alone at the end.
_LONG = (
    "test_fuzz.py",
    "test_shapes.py",
    "test_scheduling.py",
    "test_trace.py",
    "test_features.py",
    "test_tau.py",
)
_PROBE = "import torch; print(torch.cuda.get_device_name(), torch.__version__)"
# Each draws many trees for one property; under the sanitizer other tests' launches do.
_QUICK = "not brute_force and not num_candidates"
# The sanitizer's tools and the tests they run. Hazards show in small cases as in large ones.
_CHECKS = {"memcheck": _QUICK, "racecheck": f"{_QUICK} and not large and not whole_vocabulary"}
_SANITIZE_LIMIT = 480.0


@dataclass(frozen=True)
class Job:
    """A pytest process."""

    name: str
    command: list[str]
    env: dict[str, str]
    limit: float | None = None


def test(
    stack: Stack,
    pytest: list[str],
    modes: list[str] | None = None,
    workers: int | None = None,
    sanitize: bool = False,
) -> int:
    """Run the patches' tests and the modes' files; with `sanitize` the former under the tool.

    Args:
        pytest: options for pytest; names of files among them select those files.
        modes: of tests/tree/modes.py; `patches` are the patches' own tests. All by default.
        workers: processes at a time; they share the device.

    """
    python, env, reason = _python(stack)
    if reason:
        say(f"== gpu: skipped: {reason}")
        return OK
    with TemporaryDirectory() as temp:
        folder = Path(temp)
        files = patch_tests(stack, folder)
        if sanitize:
            tool, reason = _sanitizer(python, env)
            if reason:
                say(f"== gpu: sanitize is skipped: {reason}")
                return OK
            jobs = sanitize_jobs(tool, python, env, files, pytest)
        else:
            jobs = mode_jobs(stack, python, env, files, pytest, modes)
        if not jobs:
            raise StackError(USAGE, "no test is selected", hint="scripts/test.sh --help")
        workers = workers or max(1, min(8, (os.cpu_count() or 1) // 2))
        say(f"== gpu: {len(jobs)} processes, {min(workers, len(jobs))} at a time")
        return run_jobs(jobs, workers, folder)


def _python(stack: Stack) -> tuple[str, dict[str, str], str]:
    """Interpreter and environment, or why there is nothing to run on."""
    own = os.environ.get("DDTREE_GPU_PYTHON")
    if own:
        python, env = shutil.which(own) or own, dict(os.environ)
    else:
        from .build import detect_device
        from .install import environ, install

        if detect_device() != "cuda":
            return "", {}, "no CUDA device on this machine"
        install(stack, "cuda")
        python, env = str(stack.venv / "bin" / "python"), environ(stack)
    try:
        seen = subprocess.run([python, "-c", _PROBE], env=env, capture_output=True, text=True)
    except OSError as err:
        raise StackError(USAGE, f"DDTREE_GPU_PYTHON={own} cannot be run: {err}") from err
    if seen.returncode:
        return "", {}, f"no CUDA device: {(seen.stderr.splitlines() or ['?'])[-1]}"
    say(f"== gpu: {seen.stdout.strip()}, {python}")
    env.setdefault("OMP_NUM_THREADS", "1")
    env["VLLM_USE_V2_MODEL_RUNNER"] = "1"
    env.pop("TRITON_INTERPRET", None)
    # Many processes import the same modules: the first one compiles them.
    env.pop("PYTHONDONTWRITEBYTECODE", None)
    if not own:
        env |= _models(stack)
    return python, env, ""


def _models(stack: Stack) -> dict[str, str]:
    """Where the real models lie; tests of what cannot be had are skipped with the reason."""
    from .model import target_model
    from .testing import _gemma

    found = _gemma(stack)
    try:
        found["DDTREE_TARGET"] = str(target_model(stack))
    except StackError as err:
        if err.code != UPSTREAM:
            raise
        say(f"== gpu: the reference pair is skipped: {err.what}")
    return found


def patch_tests(stack: Stack, folder: Path) -> list[Path]:
    """Write the test files of the patches to `folder`; returns those that pytest collects.

    From the patches, so that neither git nor upstream's tree is needed.
    """
    files = added_files(stack, _PATCH_TESTS)
    for path, text in files.items():
        (folder / path.removeprefix(_PATCH_TESTS)).write_text(text)
    return sorted(folder / f for path in files if (f := Path(path).name).startswith("test_"))


def added_files(stack: Stack, prefix: str | tuple[str, ...]) -> dict[str, str]:
    """Python files the patches add at or below these paths, as the last patch leaves them."""
    found: dict[str, list[str]] = {}
    for name in stack.series_file.read_text().split():
        for part in (stack.patches / name).read_text().split("\ndiff --git ")[1:]:
            head, *hunks = re.split(r"\n@@ -", part)
            path = head.split("\n", 1)[0].rpartition(" b/")[2]
            if path.startswith(prefix) and path.endswith(".py"):
                found[path] = _patched(found.get(path, []), hunks)
    return {path: "".join(f"{line}\n" for line in lines) for path, lines in found.items()}


def _patched(old: list[str], hunks: list[str]) -> list[str]:
    """The lines of a file after the hunks of one patch, each as `START,COUNT +START,... @@`."""
    new: list[str] = []
    taken = 0
    for hunk in hunks:
        at = re.match(r"(\d+)(?:,(\d+))? \+\d+(?:,(\d+))? @@", hunk)
        assert at, hunk[:80]
        start, removed, added = max(0, int(at[1]) - 1), int(at[2] or 1), int(at[3] or 1)
        new += old[taken:start]
        taken = start
        for line in hunk.split("\n")[1:]:
            if not removed and not added:
                break
            mark, text = line[:1], line[1:]
            if mark != "+":
                assert old[taken] == text, f"{old[taken]!r} is not {text!r}"
                taken, removed = taken + 1, removed - 1
            if mark != "-":
                new.append(text)
                added -= 1
    return new + old[taken:]


def _selected(pytest: list[str]) -> tuple[dict[str, list[str]], list[str]]:
    """Files named among pytest's arguments, each with its `::` parts; and the other arguments."""
    files: dict[str, list[str]] = {}
    others = []
    for arg in pytest:
        path, _, node = arg.partition("::")
        if path.endswith(".py") and not arg.startswith("-"):
            nodes = files.setdefault(Path(path).name, [])
            nodes += [node] if node else []
        else:
            others.append(arg)
    return files, others


def _pytest(python: str, file: Path, nodes: list[str], *args: str) -> list[str]:
    what = [f"{file}::{n}" for n in nodes] or [str(file)]
    options = ["-p", "no:cacheprovider", "-v", "-rs", "--durations=3", "--rootdir"]
    return [python, "-m", "pytest", *options, str(file.parent), *args, *what]


def _patch_pytest(python: str, file: Path, nodes: list[str], *args: str) -> list[str]:
    options = ["--import-mode=importlib", "--confcutdir", str(file.parent)]
    return _pytest(python, file, nodes, *options, *args)


def mode_jobs(
    stack: Stack,
    python: str,
    env: dict[str, str],
    files: list[Path],
    pytest: list[str],
    modes: list[str] | None,
) -> list[Job]:
    """A process for each mode and file, the longest first; then one for each patch's file."""
    tests = stack.root / "tests" / "tree"
    known = runpy.run_path(str(tests / "modes.py"), run_name="modes")["MODES"]
    on_gpu = {name: mode.files for name, mode in known.items() if mode.on_gpu}
    if unknown := set(modes or ()) - {*on_gpu, "patches"}:
        raise StackError(
            USAGE, f"no such mode: {', '.join(unknown)}", [f"modes: {', '.join(on_gpu)}, patches"]
        )
    chosen, others = _selected(pytest)
    jobs = []
    for mode, own in on_gpu.items():
        if modes and mode not in modes:
            continue
        # A mode that is asked for runs whatever file is asked for.
        wanted = list(chosen) if modes and chosen else [f for f in own if not chosen or f in chosen]
        for name in wanted:
            if (file := tests / name).is_file():
                command = _pytest(python, file, chosen.get(name, []), *others)
                jobs.append(Job(f"{mode} {file.stem}", command, env | {"DDTREE_MODE": mode}))
            elif not chosen:
                raise StackError(CHECK_FAILED, f"tests/tree/{name} of mode {mode} is missing")
    jobs.sort(key=lambda job: f"{job.name.split()[1]}.py" not in _LONG)
    for file in files:
        if (not modes or "patches" in modes) and (not chosen or file.name in chosen):
            command = _patch_pytest(python, file, chosen.get(file.name, []), *others)
            jobs.append(Job(f"patches {file.stem}", command, env))
    return jobs


def _sanitizer(python: str, env: dict[str, str]) -> tuple[str, str]:
    """The tool, or why there is none."""
    tool = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not Path(tool).is_file():
        return "", "compute-sanitizer is not installed (it comes with the CUDA toolkit)"
    probe = "import torch; torch.zeros(8, device='cuda').add_(1).cpu()"
    seen = subprocess.run([tool, python, "-c", probe], env=env, capture_output=True, text=True)
    if seen.returncode or "ERROR SUMMARY: 0 errors" not in seen.stdout:
        lines = (seen.stdout + seen.stderr).splitlines()
        return "", f"compute-sanitizer does not work here: {' / '.join(lines[:4])}"
    return tool, ""


def sanitize_jobs(
    tool: str, python: str, env: dict[str, str], files: list[Path], pytest: list[str]
) -> list[Job]:
    """memcheck and racecheck over each file that launches kernels; no engines."""
    chosen, others = _selected(pytest)
    given = any(arg.startswith("-k") for arg in others)
    # Every tensor an allocation of its own: a row too far is an error, not a neighbour's.
    env = env | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    jobs = []
    for check, quick in _CHECKS.items():
        some = [] if given else ["-k", quick]
        options = ["--tool", check, "--target-processes", "application-only"]
        options += ["--error-exitcode", "99", "--print-limit", "10"]
        for file in files:
            if file.name in chosen or (not chosen and "DEVICE" in file.read_text()):
                command = _patch_pytest(python, file, chosen.get(file.name, []), *some, *others)
                name = f"{check} {file.stem}"
                jobs.append(Job(name, [tool, *options, *command], env, _SANITIZE_LIMIT))
    return jobs


def run_jobs(jobs: list[Job], workers: int, folder: Path) -> int:
    """Run them and print what they print; then a line for each. Fails if one of them did."""

    def run(job: Job) -> tuple[str, bool]:
        started = time.monotonic()
        process = subprocess.Popen(
            # Outside the tree: what is tested is what is installed.
            ["timeout", "-k", "5", str(job.limit), *job.command] if job.limit else job.command,
            cwd=folder,
            env=job.env | {"PYTHONUNBUFFERED": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        closing = ""
        for line in process.stdout or ():
            line = line.rstrip()
            if " in " in line and line.endswith("="):
                closing = line.strip("= ")
            if line:
                result(f"[{job.name}] {line}")
        status = process.wait()
        good = status in (0, _NOTHING_SELECTED)
        if job.limit and status in (124, 137):
            closing = f"stopped after {job.limit:.0f} s"
        took = time.monotonic() - started
        told = f"{'ok  ' if good else 'FAIL'} {job.name}: {closing or f'status {status}'}"
        told += "" if good else f", status {status}"
        result(f"[{job.name}] == {told}")
        return f"{told} ({took:.0f} s with start-up)", good

    with ThreadPoolExecutor(workers) as pool:
        done = list(pool.map(run, jobs))
    for told, _ in sorted(done, key=lambda one: not one[1]):
        result(told)
    failed = sum(not good for _, good in done)
    result(f"gpu: {len(done) - failed} processes passed, {failed} failed")
    return CHECK_FAILED if failed else OK
