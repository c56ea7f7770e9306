"""test.sh gpu: which processes run, what they are made of, and what their end means."""

from __future__ import annotations

import difflib
import os
import sys
from pathlib import Path

import pytest

from ddtree_stack import gpu
from ddtree_stack.errors import CHECK_FAILED, OK, USAGE, StackError
from ddtree_stack.gpu import Job
from ddtree_stack.paths import Stack

REPO = Path(__file__).resolve().parents[2]
# What needs no engine, or is about the CPU build.
NO_GPU = {
    f"test_{x}.py"
    for x in (
        "block_tables",
        "compile_targets",
        "compiled",
        "installed",
        "near_ties",
        "train_dflash",
    )
}


def patch(path: str, *lines: str, new: bool = True) -> str:
    mode = "new file mode 100644\n--- /dev/null" if new else f"--- a/{path}"
    old = "0,0" if new else "1,1"
    head = f"diff --git a/{path} b/{path}\n{mode}\n+++ b/{path}\n"
    return (
        head + f"@@ -{old} +1,{len(lines)} @@\n" + "".join(f"+{x}\n" for x in lines) + "-- \n2.39\n"
    )


@pytest.fixture
def stack(tmp_path) -> Stack:
    patches = tmp_path / "root" / "patches"
    patches.mkdir(parents=True)
    (patches / "series").write_text("a.patch\nb.patch\n")
    folder = "tests/v1/spec_decode/ddtree/"
    (patches / "a.patch").write_text(
        "A subject\n\n"
        + patch(folder + "conftest.py", "import os")
        + patch("vllm/test_not_ours.py", "x = 1")
        + patch(folder + "test_a.py", "DEVICE = 1", "", "diff = '@@ -1 +1,9 @@'")
    )
    (patches / "b.patch").write_text("B\n\n" + patch(folder + "test_b.py", "y = 2"))
    return Stack(tmp_path / "root")


def real(pytest_args=(), modes=None) -> dict[str, Job]:
    """The jobs of this repository, without the patches' own."""
    jobs = gpu.mode_jobs(Stack(REPO), "py", {}, [], list(pytest_args), modes)
    return {job.name: job for job in jobs}


def test_tests_come_out_of_the_patches(stack, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    assert gpu.patch_tests(stack, out) == [out / "test_a.py", out / "test_b.py"]
    assert sorted(f.name for f in out.iterdir()) == ["conftest.py", "test_a.py", "test_b.py"]
    assert (out / "test_a.py").read_text() == "DEVICE = 1\n\ndiff = '@@ -1 +1,9 @@'\n"


def test_a_later_patch_changes_a_test(stack, tmp_path):
    old = [f"line {i}" for i in range(30)]
    new = ["first", *old[:10], *old[12:20], "two", "more", *old[20:29], "last"]
    diff = difflib.unified_diff(old, new, "a/x", "b/x", n=2, lineterm="")
    path = "tests/v1/spec_decode/ddtree/test_a.py"
    (stack.patches / "a.patch").write_text("A\n\n" + patch(path, *old))
    head = f"B\n\ndiff --git a/{path} b/{path}\n"
    (stack.patches / "b.patch").write_text(head + "\n".join(diff) + "\n-- \n2.39\n")
    assert gpu.patch_tests(stack, tmp_path) == [tmp_path / "test_a.py"]
    assert (tmp_path / "test_a.py").read_text().splitlines() == new


def test_every_engine_test_runs_on_the_gpu():
    tests = {f.name for f in (REPO / "tests" / "tree").glob("test_*.py")}
    with_graphs = {n.split()[1] + ".py" for n in real() if n.startswith("triton-graphs")}
    assert with_graphs == tests - NO_GPU
    modes = {n.split()[0]: job.env["DDTREE_MODE"] for n, job in real().items()}
    assert list(modes) == list(modes.values())
    # Both backends with and without graphs, compiled, and with both types of KV cache.
    for backend in ("triton", "flash"):
        names = {m for m in modes if m.startswith(backend)}
        kinds = ("eager", "graphs", "graphs-fp8", "compiled")
        assert {f"{backend}-{kind}" for kind in kinds} <= names


def test_files_nodes_and_modes_are_selected():
    files = ["tests/tree/test_poison.py", "test_stops.py::test_a", "test_stops.py::test_b", "-x"]
    jobs = real(files)
    assert {n.split()[1] for n in jobs} == {"test_poison", "test_stops"}
    # Not in every mode: its tests compare tokens.
    assert "flash-eager test_poison" in jobs and "flash-eager test_stops" not in jobs
    command = jobs["triton-eager test_stops"].command
    assert [c.rpartition("/")[2] for c in command[-2:]] == [
        f.rpartition("/")[2] for f in files[1:3]
    ]
    assert "-x" in command
    asked = real(files, modes=["flash-eager"])
    assert list(asked) == ["flash-eager test_poison", "flash-eager test_stops"]
    with pytest.raises(StackError, match="no such mode: cpu") as err:
        real(modes=["cpu"])
    assert err.value.code == USAGE


def test_the_longest_start_first():
    order = [n.split()[1] + ".py" for n in real()]
    long = [i for i, name in enumerate(order) if name in gpu._LONG]
    assert long == list(range(len(long))) and long


def test_sanitized_is_what_launches_kernels(stack, tmp_path):
    files = gpu.patch_tests(stack, tmp_path)
    jobs = gpu.sanitize_jobs("tool", "py", {"A": "1"}, files, [])
    assert [j.name for j in jobs] == ["memcheck test_a", "racecheck test_a"]
    assert jobs[0].command[:3] == ["tool", "--tool", "memcheck"] and jobs[0].limit
    assert jobs[1].env == {"A": "1", "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    asked = gpu.sanitize_jobs("tool", "py", {}, files, ["test_b.py", "-k", "one"])
    assert [j.name for j in asked] == ["memcheck test_b", "racecheck test_b"]
    assert asked[0].command.count("-k") == 1


def job(name: str, script: str, limit: float | None = None) -> Job:
    return Job(name, [sys.executable, "-c", script], dict(os.environ), limit)


def test_ends_are_told(tmp_path, capfd):
    good = [job("a f", "print('== 3 passed in 1s ==')"), job("b f", "raise SystemExit(5)")]
    assert gpu.run_jobs(good, 2, tmp_path) == OK
    out = capfd.readouterr().out
    assert "[a f] == 3 passed in 1s ==\n" in out and "ok   a f: 3 passed in 1s (" in out
    bad = [job("c f", "import time; time.sleep(60)", 0.5), job("d f", "raise SystemExit(1)")]
    assert gpu.run_jobs([*good, *bad], 4, tmp_path) == CHECK_FAILED
    lines = capfd.readouterr().out.splitlines()
    assert lines[-1] == "gpu: 2 processes passed, 2 failed"
    # Failures come last, where they are seen.
    assert lines[-3].startswith("FAIL c f: stopped after") and lines[-2].startswith("FAIL d f")


def test_without_a_device_it_is_skipped_with_the_reason(stack, monkeypatch, capfd):
    python = stack.root / "python"
    python.write_text("#!/bin/sh\necho 'RuntimeError: No CUDA GPUs are available' >&2; exit 1\n")
    python.chmod(0o755)
    monkeypatch.setenv("DDTREE_GPU_PYTHON", str(python))
    assert gpu.test(stack, []) == OK
    assert "skipped: no CUDA device: RuntimeError: No CUDA GPUs" in capfd.readouterr().err
    monkeypatch.setenv("DDTREE_GPU_PYTHON", str(stack.root / "nowhere"))
    with pytest.raises(StackError, match="cannot be run"):
        gpu.test(stack, [])


def test_without_the_tool_sanitize_is_skipped_with_the_reason(stack, monkeypatch, capfd):
    python, tools = stack.root / "python", stack.root / "bin"
    python.write_text("#!/bin/sh\necho card 2.11\n")
    python.chmod(0o755)
    tools.mkdir()
    monkeypatch.setattr(gpu, "_python", lambda stack: (str(python), dict(os.environ), ""))
    monkeypatch.setattr(gpu.shutil, "which", lambda name: None)
    if not Path("/usr/local/cuda/bin/compute-sanitizer").is_file():
        assert gpu.test(stack, [], sanitize=True) == OK
        assert "compute-sanitizer is not installed" in capfd.readouterr().err
    tool = tools / "compute-sanitizer"
    tool.write_text("#!/bin/sh\necho '========= Error: Device not supported'; exit 1\n")
    tool.chmod(0o755)
    monkeypatch.setattr(gpu.shutil, "which", lambda name: str(tool))
    assert gpu.test(stack, [], sanitize=True) == OK
    assert "does not work here: ========= Error: Device not supported" in capfd.readouterr().err
