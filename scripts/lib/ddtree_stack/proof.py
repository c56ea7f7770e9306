"""What is proved of a wheel: files, metadata, the GPUs it holds code for, that it installs."""

from __future__ import annotations

import csv
import io
import subprocess
import sys
import zipfile
from pathlib import Path, PurePosixPath

from packaging.metadata import Metadata
from packaging.utils import parse_wheel_filename

from . import fatbin
from .errors import CHECK_FAILED, UPSTREAM, StackError
from .files import temp_dir
from .git import first
from .ui import say, step
from .wheel import record_digest

# Every GPU runs these; the other libraries are for one family each (FlashAttention 3 for sm_90).
_FOR_ALL = ("_C", "_moe_C")


def prove_files(wheel: Path) -> None:
    """RECORD lists every file with its digest and size, the metadata fits the file's name."""
    bad = []
    with zipfile.ZipFile(wheel) as z:
        names = z.namelist()
        info = next(n.split("/", 1)[0] for n in names if n.endswith(".dist-info/RECORD"))
        rows = list(csv.reader(io.StringIO(z.read(f"{info}/RECORD").decode())))
        listed = {r[0]: r[1:] for r in rows}
        if len(rows) != len(listed):
            bad.append(f"RECORD has {len(rows) - len(listed)} names twice")
        bad += [f"not in RECORD: {n}" for n in names if n not in listed]
        bad += [f"in RECORD only: {n}" for n in listed if n not in z.NameToInfo]
        bad += [f"twice in the wheel: {n}" for n in set(names) if names.count(n) > 1]
        for name, (digest, size) in listed.items():
            if name in z.NameToInfo and name != f"{info}/RECORD":
                data = z.read(name)
                if digest != record_digest(data) or int(size) != len(data):
                    bad.append(f"digest or size differs: {name}")
        told = Metadata.from_email(z.read(f"{info}/METADATA"))
    project, version, _, _ = parse_wheel_filename(wheel.name)
    if (told.name, told.version) != (project, version):
        bad.append(f"METADATA is of {told.name} {told.version}, the file of {project} {version}")
    if bad:
        raise StackError(CHECK_FAILED, f"{wheel.name} is not a sound wheel", first(bad))


def gpu_code(wheel: Path) -> dict[str, dict[str, list[str]]]:
    """Library to the GPUs it has machine code (`sm`) and PTX for, if it has any."""
    found = {}
    with zipfile.ZipFile(wheel) as z:
        for name in z.namelist():
            if PurePosixPath(name).suffix != ".so":
                continue
            try:
                code = fatbin.read(z.read(name))
            except fatbin.BadFatbin as err:
                raise StackError(
                    CHECK_FAILED, f"{name} cannot be read as a library with GPU code", [str(err)]
                ) from err
            if code.sm or code.ptx:
                found[name] = {
                    kind: [f"{a // 10}.{a % 10}" for a in sorted(archs)]
                    for kind, archs in (("sm", code.sm), ("ptx", code.ptx))
                }
    return found


def prove_gpu_code(
    wheel: Path, code: dict[str, dict[str, list[str]]], architectures: list[str]
) -> None:
    """Machine code for each architecture in every library that all GPUs run."""
    bad = []
    common = {n: c for n, c in code.items() if PurePosixPath(n).name.startswith(_FOR_ALL)}
    for name, archs in common.items():
        if missing := [a for a in architectures if a not in archs["sm"]]:
            bad.append(
                f"{name}: no code for {', '.join(missing)}, only for {' '.join(archs['sm'])}"
            )
    if not common:
        bad.append(f"no library {' or '.join(_FOR_ALL)} with GPU code")
    if bad:
        raise StackError(CHECK_FAILED, f"{wheel.name} does not hold the code it should", bad)


def prove_installs(wheel: Path, work: Path, has_device: bool = True) -> None:
    """In an environment of its own: dependencies, `pip check`, and what `vllm --version` says.

    The command looks for a device before it answers; without one the package is asked.
    """
    version = str(parse_wheel_filename(wheel.name)[1])
    with temp_dir(work / "prove") as temp:
        python = temp / "venv" / "bin" / "python"

        def run(what: str, *command: str, code: int = CHECK_FAILED) -> str:
            with step(what):
                done = subprocess.run(command, cwd=temp, capture_output=True, text=True)
            if done.returncode:
                lines = (done.stdout + done.stderr).splitlines()
                raise StackError(code, f"{what} failed", lines[-12:])
            return done.stdout

        run("make an environment", sys.executable, "-m", "venv", str(temp / "venv"))
        pip = (str(python), "-m", "pip", "--no-input", "--disable-pip-version-check")
        run("install the wheel", *pip, "install", "-q", "--no-compile", str(wheel), code=UPSTREAM)
        run("pip check", *pip, "check")
        asked = "vllm --version" if has_device else "vllm.__version__"
        command = [str(python.with_name("vllm")), "--version"]
        if not has_device:
            command = [str(python), "-c", f"import vllm; print({asked})"]
        said = run(asked, *command).split()
    if not said or said[-1] != version:
        raise StackError(CHECK_FAILED, f"{asked} says {said[-1:]}", [f"expected {version}"])
    say(f"pip check passes; {asked}: {version}")
