"""build: patched Python over the pinned wheel's binaries, or everything from source.

Without --from-source no compiler runs. A patch that would need one is refused, for its wheel would
run old binaries.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from . import proof, series, source
from .apply import apply
from .errors import CHECK_FAILED, StackError
from .fetch import BASE
from .files import sha256_file, temp_dir
from .git import Git
from .index import fetch_artifact
from .native import is_native
from .paths import Stack
from .ui import say, step
from .wheel import Entry, WheelFile, write_wheel

_WHEEL = "Wheel-Version: 1.0\nGenerator: vllm-ddtree\nRoot-Is-Purelib: false\nTag: {tag}\n"
# Their builds on the index are for CUDA and do not load beside the CPU torch; text needs none.
_CPU_DROPPED = {"torchvision", "torchaudio", "torchcodec"}


def detect_device() -> str:
    """cuda when a driver answers, else cpu."""
    tool = shutil.which("nvidia-smi")
    if tool and subprocess.run([tool, "-L"], capture_output=True).returncode == 0:
        return "cuda"
    return "cpu"


@dataclass
class Image:
    """Everything our wheel holds."""

    device: str
    version: str
    info: str  # name of the dist-info folder
    tag: str
    entries: dict[str, Entry]
    source: WheelFile

    @property
    def filename(self) -> str:
        return f"{self.info.removesuffix('.dist-info')}-{self.tag}.whl"


def refuse_native(stack: Stack) -> None:
    """Exit 1 when a patch touches what upstream compiles."""
    bad = [f"{p.name}: {f}" for p in series.load(stack) for f in p.files if is_native(f)]
    if bad:
        raise StackError(
            CHECK_FAILED,
            "a patch touches native code, which upstream's binaries do not have",
            bad,
            "move the change into Python, or drop the patch from patches/series",
        )


def tree_files(tree: Path, commit: str, below: str = "vllm/") -> dict[str, tuple[str, bool]]:
    """Path to (blob id, executable) of a commit's files."""
    found = {}
    for line in Git(tree).out("ls-tree", "-r", "-z", commit, "--", below).split("\0"):
        if line:
            head, path = line.split("\t", 1)
            mode, kind, blob = head.split()
            if kind == "blob" and mode != "120000":
                found[path] = (blob, mode == "100755")
    return found


def _blobs(tree: Path, ids: list[str]) -> dict[str, bytes]:
    out = Git(tree).raw("cat-file", "--batch", data="\n".join(ids).encode() + b"\n")
    found, at = {}, 0
    for _ in ids:
        end = out.index(b"\n", at)
        blob, _, size = out[at:end].split()
        start = end + 1
        found[blob.decode()] = out[start : start + int(size)]
        at = start + int(size) + 1
    return found


def version_file(version: str) -> bytes:
    """vllm/_version.py, as setuptools-scm would write it."""
    numbers, _, local = version.partition("+")
    parts = ", ".join([*numbers.split("."), repr(local)])
    return (
        "# Written by the build.\n"
        f"__version__ = version = {version!r}\n"
        f"__version_tuple__ = version_tuple = ({parts})\n"
        "__commit_id__ = commit_id = None\n"
    ).encode()


def metadata(text: str, stack: Stack, device: str, version: str) -> bytes:
    """The pinned wheel's METADATA under our name and version.

    The distribution is `vllm` on every device: upstream's platform detection and every dependant
    look for that name, and the `cpu` in the version is what tells it the device.
    """
    head, gap, body = text.partition("\n\n")
    lines = []
    for line in head.split("\n"):
        if line.startswith("Name: "):
            line = "Name: vllm"
        elif line.startswith("Version: "):
            line = f"Version: {version}"
        elif line == "License-File: LICENSE":
            line += "\nLicense-File: NOTICE"
        elif (
            device == "cpu"
            and (m := re.match(r"Requires-Dist: ([\w-]+)", line))
            and m[1].lower() in _CPU_DROPPED
            and "extra ==" not in line
        ):
            continue
        lines.append(line)
    if device == "cpu":
        triton = (
            f'Requires-Dist: triton=={stack.pin.requires["triton"]}; platform_machine == "x86_64"'
        )
        last = max(
            i for i, x in enumerate(lines) if x.startswith("Requires-Dist: ") and "extra" not in x
        )
        lines.insert(last + 1, triton)
    return "\n".join(lines).encode() + gap.encode() + body.encode()


def make_image(stack: Stack, device: str, commit: str = "HEAD") -> Image:
    """The wheel's content: the commit's vllm/ and what only the pinned wheel has."""
    art = stack.pin.wheels[device]
    source = WheelFile(fetch_artifact(art, stack.cache))
    version = stack.pin.built_version(device)
    base, now = tree_files(stack.tree, BASE), tree_files(stack.tree, commit)
    upstream = source.entries()
    entries = {n: e for n, e in upstream.items() if n not in base}  # binaries and vendored Python
    # A file of the tree goes in if upstream's wheel has it, or if a patch adds it.
    wanted = {p: b for p, b in now.items() if p in upstream or p not in base}
    blobs = _blobs(stack.tree, sorted({b for b, _ in wanted.values()}))
    for path, (blob, executable) in wanted.items():
        entries[path] = Entry.of(blobs[blob], executable)
    entries["vllm/_version.py"] = Entry.of(version_file(version))
    info = f"vllm-{version}.dist-info"
    tag = art.name.removesuffix(".whl").split("-", 2)[2]
    texts = {
        "METADATA": metadata(source.text("METADATA"), stack, device, version),
        "WHEEL": _WHEEL.format(tag=tag).encode(),
        "entry_points.txt": source.text("entry_points.txt").encode(),
        "top_level.txt": b"vllm\n",
        "ddtree.json": provenance(stack, device, commit),
    }
    for name in ("LICENSE", "NOTICE"):
        if (stack.root / name).is_file():
            texts[f"licenses/{name}"] = (stack.root / name).read_bytes()
    entries |= {f"{info}/{name}": Entry.of(data) for name, data in texts.items()}
    return Image(device, version, info, tag, entries, source)


def provenance(
    stack: Stack, device: str, commit: str, more: Mapping[str, object] = {}, compiled: bool = False
) -> bytes:
    """What this wheel was made from; carried inside it too, without `more`."""
    pin, art = stack.pin, stack.pin.wheels.get(device)
    binaries = {"name": art.name, "sha256": art.sha256} if art and not compiled else None
    told = {
        "version": pin.built_version(device),
        "device": device,
        "tree": Git(stack.tree).tree_of(commit),
        "base_tree": pin.sdist_tree,
        "sdist": {"name": pin.sdist.name, "sha256": pin.sdist.sha256},
        "binaries": binaries,
        "patches": [{"name": p.name, "sha256": p.sha256} for p in series.load(stack)],
        **more,
    }
    return json.dumps(told, indent=2).encode() + b"\n"


def build(stack: Stack, device: str | None, out: Path | None = None, prove: bool = False) -> Path:
    """Write wheel, SHA256SUMS and provenance.json into a folder; returns the wheel.

    RECORD, metadata and, for CUDA, the GPUs it has code for are always proved. With `prove` it is
    built twice and must give the same bits, and is installed with its dependencies.
    """
    device = device or detect_device()
    out = out or stack.root / "dist" / device
    refuse_native(stack)
    if device not in stack.pin.wheels:
        raise StackError(CHECK_FAILED, f"the pin names no wheel for {device}")
    apply(stack)
    image = make_image(stack, device)
    date = time.gmtime(stack.pin.epoch)[:6]
    with temp_dir(out / image.filename) as temp:
        wheel = temp / image.filename
        with step(f"build {image.filename}"):
            write_wheel(wheel, image.entries, image.info, image.source, date)
        if prove:
            again = temp / f"again-{image.filename}"
            with step("build it again"):
                second = make_image(stack, device)
                write_wheel(again, second.entries, second.info, second.source, date)
            if sha256_file(again) != sha256_file(wheel):
                raise StackError(CHECK_FAILED, "two builds give different bits")
            again.unlink()
        _finish(stack, wheel, device, out, stack.pin.architectures, prove)
    say(f"{image.version}, tree {stack.pin.tree}")
    return out / image.filename


def from_source(stack: Stack, arch: str, out: Path | None = None, prove: bool = False) -> Path:
    """Compile upstream's native code, too: `build` for other architectures or native patches."""
    archs = source.architectures(arch)
    out = out or stack.root / "dist" / "cuda-source"
    apply(stack)
    with temp_dir(stack.work / "source") as temp:
        tree = source.patched_checkout(stack, temp)
        source.require(stack, tree)
        (temp / "out").mkdir()
        wheel = source.compile_wheel(stack, tree, archs, temp / "out")
        plain = [a.rstrip("af") for a in archs]
        _finish(stack, wheel, "cuda", out, plain, prove, compiled=True)
    return out / wheel.name


def _finish(
    stack: Stack,
    wheel: Path,
    device: str,
    out: Path,
    archs: list[str],
    prove: bool,
    compiled: bool = False,
) -> None:
    """Prove the wheel and move it into `out` with its provenance and sums."""
    more: dict[str, object] = {}
    with step("prove RECORD, metadata" + (" and GPU code" if device == "cuda" else "")):
        proof.prove_files(wheel)
        if device == "cuda":
            more["gpu_code"] = code = proof.gpu_code(wheel)
            proof.prove_gpu_code(wheel, code, archs)
            for name, has in code.items():
                say(f"  {name}: sm {' '.join(has['sm'])}; PTX {' '.join(has['ptx']) or 'none'}")
    if prove:
        proof.prove_installs(wheel, stack.work, device == "cpu" or detect_device() == device)
    temp = wheel.parent
    (temp / "provenance.json").write_bytes(provenance(stack, device, "HEAD", more, compiled))
    names = [wheel.name, "provenance.json"]
    sums = "".join(f"{sha256_file(temp / n)}  {n}\n" for n in names)
    (temp / "SHA256SUMS").write_text(sums)
    out.mkdir(parents=True, exist_ok=True)
    for name in (*names, "SHA256SUMS"):
        shutil.move(temp / name, out / name)
