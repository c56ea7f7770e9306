"""Golden small repositories: a ten-line upstream with its sdist, its pin and a series of patches."""

from __future__ import annotations

import hashlib
import io
import os
import subprocess
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from ddtree_stack import apply, fetch, refresh
from ddtree_stack.git import Git
from ddtree_stack.paths import Stack
from ddtree_stack.pin import Artifact, Pin
from ddtree_stack.wheel import record_digest

REPO = Path(__file__).resolve().parents[2]
EPOCH = 1_700_000_000

FILES = {
    "vllm/__init__.py": "".join(f"line {i}\n" for i in range(1, 21)).encode(),
    "vllm/hook.py": b"def hook():\n    return None\n",
    "vllm/_version.py": b"__version__ = '1.0'\n",
    "vllm/crlf.txt": b"one\r\ntwo\r\nthree\r\n",
    "csrc/op.cpp": b"int main() { return 0; }\n",
    "ignored.bin": b"matches .gitignore\n",
    ".gitignore": b"*.bin\n*.so\n",
    "vllm.egg-info/PKG-INFO": b"Version: 1.0\n",
}

BODY = """
Why it is there, what it does and what breaks without it.

Upstream-Status: Pending
Drop-When: never
Tests: none: a golden patch
Signed-off-by: A Dev <dev@example.invalid>
"""


def make_sdist(path: Path, files: dict[str, bytes], version: str = "1.0") -> str:
    """Write the archive; returns its sha256."""
    with tarfile.open(path, "w:gz") as tar:
        for name, data in files.items():
            info = tarfile.TarInfo(f"vllm-{version}/{name}")
            info.size, info.mtime = len(data), EPOCH
            tar.addfile(info, io.BytesIO(data))
    return hashlib.sha256(path.read_bytes()).hexdigest()


def make_wheel(path: Path, files: dict[str, bytes]) -> Path:
    """Write a wheel of these files, its metadata's folder among them, and their RECORD."""
    info = next(name.split("/", 1)[0] for name in files if ".dist-info/" in name)
    rows = [f"{n},{record_digest(d)},{len(d)}" for n, d in files.items()]
    record = "\n".join([*rows, f"{info}/RECORD,,", ""]).encode()
    with zipfile.ZipFile(path, "w") as z:
        for name, data in (files | {f"{info}/RECORD": record}).items():
            entry = zipfile.ZipInfo(name)
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.external_attr = (0o100755 if name.endswith(".so") else 0o100644) << 16
            z.writestr(entry, data)
    return path


@dataclass
class Golden:
    """A small stack and the handles tests need."""

    stack: Stack
    cache: Path

    @property
    def git(self) -> Git:
        return Git(self.stack.tree)

    def edit(self, path: str, old: str, new: str) -> None:
        """Replace text in the work tree."""
        at = self.stack.tree / path
        at.write_bytes(at.read_bytes().replace(old.encode(), new.encode(), 1))

    def commit(self, name: str | None, subject: str = "Change a thing", body: str = BODY) -> str:
        """Commit everything in the work tree, as a developer would."""
        self.git.raw("add", "-A")
        trailer = f"Patch-Name: {name}\n" if name else ""
        self.git.raw("commit", "-q", "-m", f"{subject}\n{body}{trailer}")
        return self.git.out("rev-parse", "HEAD")

    def reload(self) -> Stack:
        """The stack as a new process would see it."""
        return Stack(self.stack.root)

    def snapshot(self) -> dict[str, bytes]:
        """Every byte of patches/ and the pin."""
        files = [*self.stack.patches.iterdir(), self.stack.pin_file]
        return {p.name: p.read_bytes() for p in files}

    def script(self, verb: str, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
        """The real front, as a user runs it, on this stack."""
        return subprocess.run(
            [str(REPO / "scripts" / f"{verb}.sh"), *args],
            env=os.environ | {"DDTREE_ROOT": str(self.stack.root)} | env,
            capture_output=True,
            text=True,
        )


@pytest.fixture(autouse=True)
def surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No cache, index or git identity of the machine reaches a test."""
    monkeypatch.setenv("DDTREE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("DDTREE_TOOLS", str(Path(os.sys.prefix)))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", (tmp_path / "index").as_uri())
    for name in ("PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "PIP_NO_INDEX", "PYTHONPATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


@pytest.fixture
def bare(tmp_path: Path) -> Golden:
    """Pin, sdist in the cache and an empty series; nothing fetched yet."""
    root, cache = tmp_path / "root", tmp_path / "cache"
    for folder in (root / "patches", root / "upstream", root / "scripts", cache):
        folder.mkdir(parents=True)
    (root / "patches" / "series").write_text("")
    name = "vllm-1.0.tar.gz"
    digest = make_sdist(cache / name, FILES)
    probe = tmp_path / "probe"
    for path, data in FILES.items():
        (probe / path).parent.mkdir(parents=True, exist_ok=True)
        (probe / path).write_bytes(data)
    git = Git(probe)
    git.raw("init", "-q")
    git.raw("add", "-A", "-f")
    tree = git.out("write-tree")
    Pin(
        version="1.0",
        tag="v1.0",
        commit="0" * 9,
        sdist=Artifact("vllm", name, digest),
        sdist_tree=tree,
        epoch=EPOCH,
        wheels={},
        revision=0,
        tree=tree,
        requires={"python": ">=3.11"},
        architectures=["9.0"],
    ).save(root / "upstream" / "pin.toml")
    return Golden(Stack(root), cache)


@pytest.fixture
def golden(bare: Golden) -> Golden:
    """Two patches, exported and applied: 0210 edits upstream's file, 0310 adds one."""
    fetch.fetch(bare.stack)
    apply.apply(bare.stack)
    bare.edit("vllm/__init__.py", "line 10\n", "line ten\n")
    bare.commit("0210-hook-ten.patch", "Hook the tenth line")
    (bare.stack.tree / "vllm" / "new.py").write_text("X = 1\n")
    bare.commit("0310-feature-new.patch", "Add the feature")
    refresh.refresh(bare.stack)
    return bare


@pytest.fixture
def hostile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """A gitconfig and environment that would change every id and every byte."""

    def switch_on() -> None:
        hooks = tmp_path / "hooks"
        hooks.mkdir()
        for name in ("pre-commit", "commit-msg", "applypatch-msg", "post-checkout"):
            (hooks / name).write_text("#!/bin/sh\nexit 1\n")
            (hooks / name).chmod(0o755)
        home = tmp_path / "home"
        home.mkdir(exist_ok=True)
        (home / ".gitconfig").write_text(
            "[core]\nautocrlf=true\nabbrev=4\nquotepath=false\neol=crlf\nwhitespace=cr-at-eol\n"
            f"hooksPath={hooks}\nattributesFile={tmp_path / 'attr'}\n"
            "[diff]\nnoprefix=true\nmnemonicPrefix=true\ncontext=9\nalgorithm=patience\n"
            "renames=copies\n"
            "[format]\nsignature=mine\nattach=true\nnumbered=true\nthread=deep\nsignOff=true\n"
            "from=Someone Else <x@example.invalid>\nsubjectPrefix=NOPE\nuseAutoBase=true\n"
            "[commit]\ngpgsign=true\n[am]\nthreeWay=true\nkeepcr=false\n"
            "[apply]\nwhitespace=fix\n[i18n]\ncommitEncoding=ISO-8859-1\n"
            "[user]\nuseConfigOnly=true\n[alias]\nam=version\n"
        )
        (tmp_path / "attr").write_text("* text eol=crlf\n")
        monkeypatch.setenv("GIT_AUTHOR_NAME", "Somebody")
        monkeypatch.setenv("GIT_COMMITTER_DATE", "2001-01-01T00:00:00")
        monkeypatch.setenv("GIT_DIFF_OPTS", "-u9")
        monkeypatch.setenv("GIT_DIR", "/nowhere")
        monkeypatch.setenv("GIT_EXTERNAL_DIFF", "/bin/false")

    yield switch_on
