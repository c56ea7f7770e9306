"""Which GPUs a library has code for, and what is proved of wheels."""

from __future__ import annotations

import shutil
import struct
import subprocess
import zipfile
from pathlib import Path

import pytest

from conftest import make_wheel
from ddtree_stack import fatbin, proof
from ddtree_stack.errors import CHECK_FAILED, UPSTREAM, StackError


def image(kind: int, arch: int, body: bytes) -> bytes:
    header = struct.pack("<HHIQ12xI", kind, 0x101, 64, len(body), arch)
    return header.ljust(64, b"\0") + body


def container(*images: bytes) -> bytes:
    data = b"".join(images)
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(data)) + data


def elf(section: bytes, name: bytes = b".nv_fatbin") -> bytes:
    """A 64-bit library with this one section."""
    names = b"\0" + name + b"\0.shstrtab\0"
    at, rows_at = 64, 64 + len(section) + len(names)
    row = struct.Struct("<IIQQQQIIQQ")
    rows = row.pack(0, 0, 0, 0, 0, 0, 0, 0, 0, 0)
    rows += row.pack(1, 1, 0, 0, at, len(section), 0, 0, 8, 0)
    rows += row.pack(len(name) + 2, 3, 0, 0, at + len(section), len(names), 0, 0, 1, 0)
    head = b"\x7fELF\x02\x01\x01".ljust(16, b"\0")
    head += struct.pack("<HHIQQQIHHHHHH", 3, 62, 1, 0, 0, rows_at, 0, 64, 56, 0, 64, 3, 2)
    return head + section + names + rows


def code(*archs: int) -> bytes:
    """A library with machine code for these."""
    return elf(container(*(image(2, a, b"code" * 4) for a in archs)))


def cuda_wheel(path: Path, archs: list[int]) -> Path:
    """A wheel as upstream's build would leave it."""
    project, version, *_ = path.name.split("-")
    info = f"{project}-{version}.dist-info"
    files = {
        "vllm/_C.abi3.so": code(*archs),
        "vllm/fa3.abi3.so": code(90),
        "vllm/plain.so": elf(b"", b".text"),
        f"{info}/METADATA": f"Metadata-Version: 2.4\nName: {project}\nVersion: {version}\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\n",
    }
    return make_wheel(path, files)


def test_images_of_containers_with_padding_between():
    section = container(image(2, 90, b"x" * 24), image(1, 90, b"ptx" * 8)) + bytes(16)
    section += container(image(2, 120, b"y" * 8))
    found = fatbin.read(elf(section))
    assert (dict(found.sm), dict(found.ptx)) == ({90: 1, 120: 1}, {90: 1})


def test_library_without_gpu_code():
    found = fatbin.read(elf(b"\x90" * 40, b".text"))
    assert not found.sm and not found.ptx


@pytest.mark.parametrize(
    "data",
    [b"MZ", elf(b"not a fat binary, surely not"), elf(container(image(2, 90, b"x" * 8))[:-4])],
    ids=["no ELF", "no container", "cut off"],
)
def test_damage(data):
    with pytest.raises(fatbin.BadFatbin):
        fatbin.read(data)


@pytest.mark.skipif(not shutil.which("nvcc"), reason="no CUDA toolkit: nothing real to read")
def test_what_the_cuda_toolkit_writes(tmp_path):
    nvcc = Path(shutil.which("nvcc") or "").resolve()
    toolkit = nvcc.parent if (nvcc.parent / "ptxas").exists() else Path("/usr/local/cuda/bin")
    if not (toolkit / "fatbinary").exists():
        pytest.skip("no fatbinary beside nvcc")
    images = []
    for arch in (90, 100, 120):
        text = (
            f".version 8.7\n.target sm_{arch}\n.address_size 64\n.visible .entry k() {{ ret; }}\n"
        )
        (tmp_path / f"{arch}.ptx").write_text(text)
        cubin = str(tmp_path / f"{arch}.cubin")
        command = [toolkit / "ptxas", f"-arch=sm_{arch}", tmp_path / f"{arch}.ptx", "-o", cubin]
        subprocess.run(command, check=True)
        images.append(f"--image3=kind=elf,sm={arch},file={cubin}")
    images.append(f"--image3=kind=ptx,sm=120,file={tmp_path / '120.ptx'}")
    out = tmp_path / "k.fatbin"
    subprocess.run([toolkit / "fatbinary", f"--create={out}", *images, "-64"], check=True)
    found = fatbin.read(elf(out.read_bytes()))
    assert (dict(found.sm), dict(found.ptx)) == ({90: 1, 100: 1, 120: 1}, {120: 1})


NAME = "vllm-1.0-cp38-abi3-linux_x86_64.whl"


def test_gpu_code_of_a_wheel(tmp_path):
    wheel = cuda_wheel(tmp_path / NAME, [90, 100, 120])
    proof.prove_files(wheel)
    found = proof.gpu_code(wheel)
    assert found == {
        "vllm/_C.abi3.so": {"sm": ["9.0", "10.0", "12.0"], "ptx": []},
        "vllm/fa3.abi3.so": {"sm": ["9.0"], "ptx": []},
    }
    proof.prove_gpu_code(wheel, found, ["9.0", "10.0", "12.0"])


def test_missing_gpu_code_is_named(tmp_path):
    wheel = cuda_wheel(tmp_path / NAME, [90, 100])
    with pytest.raises(StackError) as err:
        proof.prove_gpu_code(wheel, proof.gpu_code(wheel), ["9.0", "12.0"])
    assert err.value.code == CHECK_FAILED
    assert err.value.facts == ["vllm/_C.abi3.so: no code for 12.0, only for 9.0 10.0"]
    with pytest.raises(StackError) as err:
        proof.prove_gpu_code(wheel, {}, ["9.0"])
    assert "no library" in err.value.facts[0]


@pytest.mark.parametrize(
    ("old", "new", "what"),
    [
        (b"vllm/plain.so,", b"vllm/plane.so,", "not in RECORD: vllm/plain.so"),
        (b"vllm/plain.so,sha256=", b"vllm/plain.so,sha256=x", "digest or size differs"),
        (b"Version: 1.0", b"Version: 1.1", "METADATA is of vllm 1.1"),
    ],
)
def test_unsound_wheels(tmp_path, old, new, what):
    good = cuda_wheel(tmp_path / NAME, [90])
    bad = tmp_path / "bad" / NAME
    bad.parent.mkdir()
    with zipfile.ZipFile(good) as src, zipfile.ZipFile(bad, "w") as dst:
        for name in src.namelist():
            dst.writestr(name, src.read(name).replace(old, new))
    with pytest.raises(StackError, match="is not a sound wheel") as err:
        proof.prove_files(bad)
    assert any(what in fact for fact in err.value.facts), err.value.facts


def console_wheel(
    path: Path, says: str, needs: str = "", command: str = "print(__version__)"
) -> Path:
    """A wheel whose command `vllm` prints this, as its `__version__`."""
    project, version, *_ = path.name.split("-")
    info = f"{project}-{version}.dist-info"
    meta = f"Metadata-Version: 2.4\nName: {project}\nVersion: {version}\n{needs}"
    files = {
        "vllm/__init__.py": f"__version__ = {says!r}\ndef main():\n    {command}\n".encode(),
        f"{info}/METADATA": meta.encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": b"[console_scripts]\nvllm = vllm:main\n",
    }
    return make_wheel(path, files)


def test_it_is_installed_and_says_its_version(tmp_path, capsys):
    name = "vllm-1.0+ddtree.7-py3-none-any.whl"
    proof.prove_installs(console_wheel(tmp_path / name, "1.0+ddtree.7"), tmp_path / "work")
    assert "vllm --version: 1.0+ddtree.7" in capsys.readouterr().err
    with pytest.raises(StackError, match="--version says") as err:
        proof.prove_installs(console_wheel(tmp_path / name, "1.0"), tmp_path / "work")
    assert err.value.code == CHECK_FAILED and err.value.facts == ["expected 1.0+ddtree.7"]
    blind = console_wheel(tmp_path / name, "1.0+ddtree.7", command="raise SystemExit('no device')")
    with pytest.raises(StackError, match="vllm --version failed"):
        proof.prove_installs(blind, tmp_path / "work")
    proof.prove_installs(blind, tmp_path / "work", has_device=False)
    assert "vllm.__version__: 1.0+ddtree.7" in capsys.readouterr().err
    needs = "Requires-Dist: no-such-library-anywhere\n"
    with pytest.raises(StackError, match="install the wheel failed") as err:
        proof.prove_installs(console_wheel(tmp_path / name, "x", needs), tmp_path / "work")
    assert err.value.code == UPSTREAM
    assert not list(tmp_path.glob(".prove*"))
