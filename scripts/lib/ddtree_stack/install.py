"""install: .venv with the dependencies and the patched tree."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

from .apply import apply
from .build import Image, detect_device, make_image, refuse_native
from .errors import TOOL, UPSTREAM, StackError
from .files import sha256_bytes, temp_dir, write_atomic
from .paths import Stack
from .pin import Pin
from .ui import say, step
from .wheel import record, unpack_entry, write_wheel

_EPOCH = (2020, 1, 1, 0, 0, 0)


def lock_file(stack: Stack, device: str) -> Path:
    """What the environment is made of, besides vLLM itself."""
    return stack.root / "upstream" / f"requirements-{device}.lock"


def _pip(stack: Stack, what: str, *args: str) -> None:
    """pip with its talk in a log: on some machines it warns hundreds of times."""
    log = stack.work / "install.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with step(what), log.open("wb") as f:
        done = subprocess.run(
            [stack.venv / "bin" / "python", "-m", "pip", "install", "--no-input", *args],
            stdout=f,
            stderr=subprocess.STDOUT,
        )
    if done.returncode:
        lines = log.read_text(errors="replace").splitlines()
        facts = [x for x in lines if x.startswith("ERROR")][-5:] or lines[-5:]
        raise StackError(UPSTREAM, f"{what} failed", [*facts, f"log: {log}"], "pip config list")


def _environment(stack: Stack, device: str) -> str:
    """Make .venv and its dependencies fit the lock; returns the key that says so."""
    pin, lock = stack.pin, lock_file(stack, device)
    python = ".".join(map(str, sys.version_info[:3]))
    wanted = lock.read_bytes() if lock.is_file() else pin.wheels[device].sha256.encode()
    key = sha256_bytes(f"{device} {python} {sys.base_prefix}\n".encode() + wanted)
    stamp = stack.venv / "ddtree-environment"
    if stamp.is_file() and stamp.read_text() == key:
        return key
    if not (stack.venv / "bin" / "python").exists() or _python_of(stack.venv) != python:
        say(f"make {stack.shown(stack.venv)} (Python {python})")
        done = subprocess.run(
            [sys.executable, "-m", "venv", "--clear", str(stack.venv)],
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise StackError(TOOL, "no virtual environment can be made", [done.stdout, done.stderr])
    stamp.unlink(missing_ok=True)
    if device == "cpu":
        # What is imported is compiled then; all of it takes most of a minute.
        args = ["--no-deps", "--no-compile", "-r", str(lock)]
        _pip(stack, "install the dependencies (CPU)", *args)
    write_atomic(stamp, key.encode())
    return key


def _python_of(venv: Path) -> str:
    for line in (venv / "pyvenv.cfg").read_text().splitlines():
        if line.startswith("version"):
            return line.partition("=")[2].strip()
    return ""


def site_packages(venv: Path) -> Path:
    """Where the environment keeps its packages."""
    return next((venv / "lib").glob("python3.*")) / "site-packages"


def installed(stack: Stack) -> dict | None:
    """The provenance of the vLLM in .venv; None if there is none of ours."""
    found = list((stack.venv / "lib").glob("python3.*/site-packages/vllm-*.dist-info/ddtree.json"))
    if len(found) != 1:
        return None
    try:
        return json.loads(found[0].read_text())
    except ValueError:
        return None


def _pip_install(stack: Stack, image: Image) -> None:
    """The first time: by pip, which also makes the command `vllm`."""
    with temp_dir(stack.work / "wheel") as temp:
        wheel = temp / image.filename
        write_wheel(wheel, image.entries, image.info, image.source, _EPOCH)
        if image.device == "cuda":  # the CPU's dependencies are in the lock
            tests = ["pytest", "pytest-timeout", "hypothesis", "scipy", "gguf", "accelerate"]
            _pip(stack, "install the dependencies (CUDA)", *tests, str(wheel))
        args = ["--force-reinstall", "--no-deps", "--no-compile"]
        _pip(stack, f"install {image.filename}", *args, str(wheel))


def _sync(stack: Stack, image: Image) -> int:
    """Later: write only the files that differ from what lies there; returns their number."""
    site = site_packages(stack.venv)
    old = next(site.glob("vllm-*.dist-info"))
    rows = list(csv.reader((old / "RECORD").read_text().splitlines()))
    have = {r[0]: r[1] for r in rows if r}
    ours = {n for n in have if n.startswith(("vllm/", f"{old.name}/"))}
    extra = {n for n in have if n not in ours and not n.endswith(".pyc")}  # bin/vllm
    pip_files = {f"{old.name}/{n}" for n in ("INSTALLER", "REQUESTED", "direct_url.json")}
    changed = 0
    for name, entry in image.entries.items():
        if have.get(name) != entry.digest or not (site / name).exists():
            unpack_entry(entry, image.source, site / name)
            changed += 1
    for name in ours - set(image.entries) - pip_files:
        (site / name).unlink(missing_ok=True)
        changed += 1
    new = site / image.info
    write_atomic(new / "INSTALLER", b"pip\n")
    kept = [r for r in rows if r and r[0] in extra]
    tail = "".join(",".join(r) + "\n" for r in kept) + f"{image.info}/INSTALLER,,\n"
    write_atomic(new / "RECORD", record(image.entries, image.info) + tail.encode())
    if old != new:
        for left in old.rglob("*"):
            if left.is_file():
                left.unlink()
        for folder in sorted((p for p in old.rglob("*") if p.is_dir()), reverse=True):
            folder.rmdir()
        old.rmdir()
    return changed


def install(stack: Stack, device: str | None = None) -> Path:
    """Make .venv hold the patched tree; returns its path. Quick when nothing changed.

    Without a device, an environment keeps the one it has; a new one gets what the machine has.
    """
    device = device or (installed(stack) or {}).get("device") or detect_device()
    pin: Pin = stack.pin
    refuse_native(stack)
    tree = apply(stack)
    before = stack.venv / "ddtree-environment"
    old_key = before.read_text() if before.is_file() else ""
    key = _environment(stack, device)
    have = installed(stack) if key == old_key else None
    if have and have["tree"] == tree and have["version"] == pin.built_version(device):
        say(f"{stack.shown(stack.venv)} is up to date: {have['version']}, tree {tree}")
        return stack.venv
    image = make_image(stack, device)
    if (
        have
        and have["device"] == device
        and have["binaries"]["sha256"] == pin.wheels[device].sha256
    ):
        with step("update vLLM in .venv"):
            say(f"  {_sync(stack, image)} files written or removed")
    else:
        _pip_install(stack, image)
    say(f"{stack.shown(stack.venv)}: {image.version}, tree {tree}")
    return stack.venv


def environ(stack: Stack) -> dict[str, str]:
    """The environment for programs run from .venv: nothing of the caller's Python."""
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
    env["PATH"] = f"{stack.venv / 'bin'}{os.pathsep}{env.get('PATH', '')}"
    env["VIRTUAL_ENV"] = str(stack.venv)
    env.pop("PYTHONDONTWRITEBYTECODE", None)
    return env
