"""CONTRIBUTING.md: its blocks, run one after the other on a golden stack."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from conftest import REPO
from ddtree_stack.__main__ import _parser
from ddtree_stack.git import Git
from test_build import wheeled  # noqa: F401
from test_mirror import clone  # noqa: F401

TEXT = (REPO / "CONTRIBUTING.md").read_text()
BLOCKS = re.findall(r"^```([^\n]*)\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
RUN = [body for kind, body in BLOCKS if not kind]
SLOW = [line for kind, body in BLOCKS if kind == "sh slow" for line in body.splitlines()]
MESSAGE = next(body for kind, body in BLOCKS if kind == "text")
# What a person types at this place: the first line of an old file, a new file's only one.
EDITOR = '#!/bin/sh\nif test -e "$1"; then sed -i "1s/\\$/ # edited/" "$1"; else echo "Y = 1" >"$1"; fi\n'


def test_every_block_is_of_a_kind_that_is_run_or_checked():
    assert {kind for kind, _ in BLOCKS} == {"", "sh slow", "text"}
    assert len(RUN) >= 6 and len(SLOW) >= 5


def test_the_blocks(wheeled, clone, tmp_path):  # noqa: F811
    golden, root = wheeled, wheeled.stack.root
    for front in (REPO / "scripts").glob("*.sh"):
        shim = root / "scripts" / front.name
        shim.write_text(f'#!/usr/bin/env bash\nexec {front} "$@"\n')
        shim.chmod(0o755)
    (root / "README.md").write_text("A golden stack.\n")
    (root / ".gitignore").write_text(".work/\ndist/\n")
    (tmp_path / "editor").write_text(EDITOR)
    (tmp_path / "editor").chmod(0o755)
    (tmp_path / "message").write_text(MESSAGE)
    (clone / "vllm/later.py").write_text("x\n")
    Git(clone).raw("add", "-A")
    Git(clone).raw("commit", "-q", "-m", "Add what comes later")
    git = Git(root)
    git.raw("init", "-q")
    git.raw("add", "-A")
    git.raw("commit", "-q", "-m", "The stack")
    who = {
        f"GIT_{x}_{y}": "a@b.invalid" for x in ("AUTHOR", "COMMITTER") for y in ("NAME", "EMAIL")
    }
    env = os.environ | who | {"DDTREE_ROOT": str(root), "EDITOR": str(tmp_path / "editor")}

    def run(body: str) -> str:
        text = body.replace("MESSAGE", str(tmp_path / "message")).replace("CLONE", str(clone))
        text = text.replace("scripts/test.sh scripts\n", "")  # this test is one of them
        done = subprocess.run(
            ["bash", "-e", "-o", "pipefail", "-c", text],
            cwd=root,
            env=env,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, f"{body}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def block(words: str) -> str:
        found = [b for b in RUN if words in b]
        assert len(found) == 1, words
        done.append(found[0])
        return run(found[0])

    done: list[str] = []
    before = golden.snapshot()
    block("--fixup")
    after = golden.snapshot()
    assert b"# edited" in after["0210-hook-ten.patch"]
    assert after["0310-feature-new.patch"] == before["0310-feature-new.patch"]
    block("git commit --file")
    assert golden.snapshot()["series"].decode().split()[-1] == "0320-feature-more.patch"
    assert golden.reload().pin.revision == 2
    block("scripts/test.sh scripts")
    assert "first bad: 0310-feature-new.patch" in block("--bad 0310-feature-new.patch")
    assert "(Add what comes later), upstream's" in block("scripts/mirror.sh")
    (root / "CHANGELOG.md").write_text("## 1.0+ddtree.2\n")
    assert ".whl: OK" in block("sha256sum --check")
    assert git.out("tag") == "v1.0+ddtree.2"
    assert (root / "dist/cpu/vllm-1.0+ddtree.2.cpu-cp38-abi3-linux_x86_64.whl").is_file()
    assert sorted(done) == sorted(RUN)  # none was left out


@pytest.mark.parametrize("line", SLOW)
def test_what_is_too_slow_to_run_is_at_least_a_command(line):
    """The verbs have tests of their own; here their options are parsed."""
    if "sha256sum" in line:
        return
    front, *args = shlex.split(line)
    if not (REPO / front).is_file():
        pytest.skip(f"{front} is not there yet")
    _parser(Path(front).stem).parse_args(args)
