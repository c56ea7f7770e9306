"""bench: tree against chain on a GPU, in .venv or in a Python that has the patched vLLM."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
from pathlib import Path

from .errors import TOOL, StackError
from .paths import Stack


def bench(stack: Stack, args: argparse.Namespace) -> int:
    """Run the package ddtree_bench; its exit status: 0, 1 for a missed bar, 6 without a GPU.

    Raises:
        StackError: if there is no GPU, or nothing to run with.

    """
    if args.python:
        python, env = shutil.which(args.python), dict(os.environ)
        if python is None:
            raise StackError(TOOL, f"no such Python: {args.python}", [], "scripts/bench.sh")
    else:
        python, env = _environment(stack)
    lib = str(stack.root / "scripts" / "lib")
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [lib, env.get("PYTHONPATH")]))
    command = [python, "-m", "ddtree_bench", *(["--quick"] if args.quick else [])]
    for name in ("batches", "contexts"):
        if chosen := getattr(args, name):
            command += [f"--{name}", *map(str, chosen)]
    if args.tensor_parallel > 1:
        command += ["--tensor-parallel", str(args.tensor_parallel)]
    if args.only:
        command += ["--only", *args.only]
    if args.out:
        command += ["--out", str(args.out.absolute())]
    if target := _target(stack, args):
        command += ["--target", str(target)]
    # From the root, which has no vllm folder: the installed tree is the one that runs.
    return subprocess.run(command, cwd=stack.root, env=env).returncode


def _environment(stack: Stack) -> tuple[str, dict[str, str]]:
    from .build import detect_device
    from .install import environ, install

    if detect_device() != "cuda":
        raise StackError(
            TOOL,
            "the bench needs an NVIDIA GPU",
            ["nvidia-smi -L does not answer: nothing was installed or run"],
            "scripts/test.sh",
        )
    install(stack, "cuda")
    return str(stack.venv / "bin" / "python"), environ(stack)


def _target(stack: Stack, args: argparse.Namespace) -> Path | None:
    """The reference pair's target, where a group asks for it."""
    if args.target or (args.only and "pair" not in args.only):
        return args.target and args.target.absolute()
    if args.python:
        made = stack.work / "models" / "SmolLM2-135M-Instruct"
        return made if made.is_dir() else None
    from .model import target_model

    return target_model(stack)
