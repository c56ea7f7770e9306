"""build --from-source: what upstream fetches, and what a builder is told to provide."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ddtree_stack import build, source
from ddtree_stack.errors import TOOL, UPSTREAM, USAGE, StackError
from ddtree_stack.source import Source

CMAKE = """\
set(CUTLASS_REVISION "v4.7.1")
if (DEFINED ENV{VLLM_CUTLASS_SRC_DIR})
  FetchContent_Declare(cutlass SOURCE_DIR ${VLLM_CUTLASS_SRC_DIR})
else()
  FetchContent_Declare(
      cutlass
      GIT_REPOSITORY https://example.invalid/cutlass.git
      # Keep in sync (with the line above).
      GIT_TAG ${CUTLASS_REVISION}
      GIT_PROGRESS TRUE
  )
endif()
"""
KERNELS = """\
if (DEFINED ENV{KERNELS_SRC_DIR})
endif()
set(GIT "https://example.invalid/rocm.git")
set(GIT "https://example.invalid/kernels.git")
FetchContent_Populate(kernels
  GIT_REPOSITORY "${GIT}"
  GIT_TAG 0123456789abcdef)
"""
FOUND = [
    Source("cutlass", "https://example.invalid/cutlass.git", "v4.7.1", "VLLM_CUTLASS_SRC_DIR"),
    Source("kernels", "https://example.invalid/kernels.git", "0123456789abcdef", "KERNELS_SRC_DIR"),
]


@pytest.fixture
def tree(tmp_path) -> Path:
    (tmp_path / "tree/cmake/external_projects").mkdir(parents=True)
    (tmp_path / "tree/CMakeLists.txt").write_text(CMAKE)
    (tmp_path / "tree/cmake/external_projects/kernels.cmake").write_text(KERNELS)
    return tmp_path / "tree"


def test_sources_are_read_out_of_cmake(tree):
    assert source.sources(tree) == FOUND


@pytest.mark.parametrize("text", ["10.0 12.0", "10.0;12.0", " 10.0, 12.0 "])
def test_architectures(text):
    assert source.architectures(text) == ["10.0", "12.0"]


@pytest.mark.parametrize("text", ["", "sm_100", "10", "10.0 twelve"])
def test_no_architectures(text):
    with pytest.raises(StackError) as err:
        source.architectures(text)
    assert err.value.code == USAGE and '--arch "10.0 12.0"' in err.value.hint


@pytest.fixture
def tools(tmp_path, monkeypatch):
    """A PATH with every tool, in versions that do."""
    bin_ = tmp_path / "cuda" / "bin"
    include = tmp_path / "cuda" / "include"
    include.mkdir(parents=True)
    bin_.mkdir()
    for header in ("cuda_runtime.h", "cublas_v2.h", "cusparse.h", "cusolverDn.h"):
        (include / header).touch()

    def tool(name: str, says: str) -> None:
        (bin_ / name).write_text(f"#!/bin/sh\necho '{says}'\n")
        (bin_ / name).chmod(0o755)

    for name, says in (
        ("nvcc", "Cuda compilation tools, release 13.0, V13.0.88"),
        ("g++", "g++ 12.2.0"),
        ("cmake", "cmake version 3.31.2"),
        ("ninja", "1.11.1"),
        ("ccache", "ccache version 4.14.2"),
        ("cargo", "cargo 1.95.0"),
        ("protoc", "libprotoc 25.1"),
        ("python", "2.13.0+cu130 13.0"),
    ):
        tool(name, says)
    monkeypatch.setenv("PATH", f"{bin_}:/usr/bin:/bin")
    monkeypatch.setenv("DDTREE_BUILD_PYTHON", str(bin_ / "python"))
    return tool


def missing(golden, env=None, answers=True) -> list[str]:
    stack = golden.reload()
    stack.pin.requires["torch"] = "2.13.0"
    listed = source.needs(stack, FOUND, env or {}, lambda one: answers)
    return [n.what for n in listed if not n.have]


def test_nothing_is_missing(golden, tools):
    assert missing(golden) == []


@pytest.mark.parametrize(
    ("tool", "says", "what"),
    [
        ("nvcc", "release 12.4, V12.4.1", "CUDA compiler"),
        ("cmake", "cmake version 3.25.1", "cmake"),
        ("python", "2.13.0+cpu None", "PyTorch"),
        ("python", "2.11.0+cu130 13.0", "PyTorch"),
    ],
)
def test_old_tools_are_missing(golden, tools, tool, says, what):
    tools(tool, says)
    assert missing(golden) == [what]


def test_sources_by_folder_or_by_host(golden, tools, tmp_path):
    assert len(missing(golden, answers=False)) == 2
    env = {"VLLM_CUTLASS_SRC_DIR": str(tmp_path), "KERNELS_SRC_DIR": str(tmp_path / "none")}
    assert missing(golden, env, answers=True) == [
        "kernels https://example.invalid/kernels.git at 0123456789abcdef"
    ]


def test_the_list_and_its_exit_code(golden, tree, tools, monkeypatch, capsys):
    stack = golden.reload()
    stack.pin.requires["torch"] = "2.13.0"
    monkeypatch.setattr(source, "_reachable", lambda one: False)
    needs = source.needs
    monkeypatch.setattr(
        source, "needs", lambda s, found: needs(s, found, {}, lambda one: one.name == "cutlass")
    )
    with pytest.raises(StackError, match="1 of 14 things") as err:
        source.require(stack, tree)
    assert err.value.code == UPSTREAM and "KERNELS_SRC_DIR=FOLDER" in err.value.facts[0]
    told = capsys.readouterr().out
    assert "have    cutlass" in told and "MISSING kernels" in told
    tools("cmake", "cmake version 3.25.1")
    with pytest.raises(StackError, match="2 of 14 things") as err:
        source.require(stack, tree)
    assert err.value.code == TOOL


def test_environment_of_the_compiler(golden, monkeypatch):
    monkeypatch.setenv("VLLM_USE_PRECOMPILED", "1")
    env = source.build_environ(golden.reload(), ["10.0", "12.0"])
    assert env["TORCH_CUDA_ARCH_LIST"] == "10.0 12.0"
    assert env["VLLM_VERSION_OVERRIDE"] == "1.0+ddtree.1"
    assert "VLLM_USE_PRECOMPILED" not in env
    assert env["CCACHE_DIR"] == str(golden.cache / "ccache")


def test_checkout_is_the_patched_tree_and_no_repository(golden, tmp_path):
    tree = source.patched_checkout(golden.reload(), tmp_path)
    assert (tree / "vllm/new.py").read_text() == "X = 1\n" and not (tree / ".git").exists()


def test_usage(golden):
    for args in (("--arch", "9.0"), ("--from-source", "--device", "cpu")):
        done = golden.script("build", *args)
        assert done.returncode == USAGE and "--from-source" in done.stderr


def test_from_source_end_to_end(golden, tools, tmp_path, monkeypatch):
    """A stand-in for pip writes the wheel; what comes before and after it is real."""
    from test_fatbin import cuda_wheel

    monkeypatch.setattr(source, "require", lambda stack, tree: None)
    seen = {}

    def compiled(stack, tree, archs, out):
        seen.update(archs=archs, patched=(tree / "vllm/new.py").is_file())
        return cuda_wheel(out / "vllm-1.0+ddtree.1-cp38-abi3-linux_x86_64.whl", [100, 120])

    monkeypatch.setattr(source, "compile_wheel", compiled)
    wheel = build.from_source(golden.reload(), "10.0 12.0", tmp_path / "out")
    assert seen == {"archs": ["10.0", "12.0"], "patched": True}
    told = (tmp_path / "out" / "provenance.json").read_text()
    assert '"binaries": null' in told and '"12.0"' in told
    assert wheel.name in (tmp_path / "out" / "SHA256SUMS").read_text()
    with pytest.raises(StackError, match="does not hold the code"):
        build.from_source(golden.reload(), "9.0", tmp_path / "out")
    assert os.listdir(golden.stack.work / ".") == ["vllm"]
