"""test upstream: what is run where, what is stored, and what counts as worse."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from conftest import FILES, make_sdist
from ddtree_stack import check, upstream
from ddtree_stack.errors import CHECK_FAILED, CONFLICT, OK, USAGE, StackError
from ddtree_stack.paths import Stack
from ddtree_stack.upstream import Outcome, Python, Suite

REPO = Path(__file__).resolve().parents[2]

READS = "from pathlib import Path\nTEXT = Path('vllm/__init__.py').read_text()\n"
TESTS = {
    "tests/a/test_read.py": READS
    + "import pytest\n"
    + "@pytest.mark.parametrize('n', range(3))\ndef test_kept(n):\n    assert 'line 9' in TEXT\n"
    + "def test_fails():\n    assert 'line 99' in TEXT\n"
    + "def test_skips():\n    pytest.skip('CUDA is needed')\n",
    "tests/a/test_import.py": "import no_such_library\ndef test_x(): pass\n",
    "tests/a/test_module_skip.py": "import pytest\npytest.skip('sm_90 only', allow_module_level=True)\n",
    "tests/a/test_binary.py": "from pathlib import Path\n"
    "def test_binary():\n    assert Path('vllm/binary.abi3.so').read_text() == 'wheel'\n"
    "def test_added_by_a_patch():\n    assert not Path('vllm/new.py').exists()\n",
    "tests/a/test_crash.py": "import os\ndef test_crash():\n    os._exit(3)\n",
    "tests/a/test_slow.py": "import time\n"
    "def burn():\n    end = time.process_time() + 0.4\n    while time.process_time() < end: pass\n"
    "def test_1(): burn()\ndef test_2(): pass\n",
    "tests/b/test_left_out.py": "raise SystemExit('never collected')\n",
}
SUITE = """\
areas = ["tests/a", "tests/b"]
file_limit = 0.3
test_limit = 30
[left_out]
"tests/b/test_left_out.py" = "it ends pytest"
"""


@pytest.fixture
def tested(golden, monkeypatch, tmp_path):
    """The golden stack whose sdist has tests; this Python runs them."""
    site = tmp_path / "site" / "vllm"
    (site / "third").mkdir(parents=True)
    (site / "binary.abi3.so").write_text("wheel")
    (site / "new.py").write_text("X = 'the patched build that is installed'\n")
    folder = golden.stack.root / "upstream" / "tests"
    folder.mkdir()
    (folder / "suite.toml").write_text(SUITE)
    (folder / "models.json").write_text('{"some/model": {"model_type": "opt"}}')
    python = Python(sys.executable, dict(os.environ), site, "cpu")
    monkeypatch.setattr(upstream, "_interpreter", lambda stack, gpu: python)
    monkeypatch.setattr(upstream, "MINIMUM", 1)

    def ship(tests: dict[str, str]) -> None:
        pin = golden.reload().pin
        data = FILES | {n: t.encode() for n, t in tests.items()}
        digest = make_sdist(golden.cache / pin.sdist.name, data)
        replace(pin, sdist=replace(pin.sdist, sha256=digest)).save(golden.stack.pin_file)

    golden.ship = ship
    ship(TESTS)
    return golden


def stored(golden) -> dict[str, Outcome]:
    found = upstream.load(golden.reload(), "cpu")
    assert found is not None
    return found


def test_record_then_compare(tested, capsys):
    # test_added_by_a_patch is true of the unpatched tree only.
    with pytest.raises(StackError, match="1 of upstream's tests got worse") as err:
        upstream.test(tested.reload(), [])
    assert err.value.code == CHECK_FAILED
    assert err.value.facts[0].startswith("tests/a/test_binary.py::test_added_by_a_patch: failed")
    assert "test_added_by_a_patch" in err.value.hint
    found = {n.removeprefix("tests/a/"): o.outcome for n, o in stored(tested).items()}
    assert found == {
        "test_read.py::test_kept[0]": "passed",
        "test_read.py::test_kept[1]": "passed",
        "test_read.py::test_kept[2]": "passed",
        "test_read.py::test_fails": "failed",
        "test_read.py::test_skips": "skipped",
        "test_import.py": "not collected",
        "test_module_skip.py": "not collected",
        "test_binary.py::test_binary": "passed",
        "test_binary.py::test_added_by_a_patch": "passed",
        "test_crash.py::test_crash": "crashed",
        "test_slow.py::test_1": "passed",
        "test_slow.py::test_2": "skipped",
    }
    told = capsys.readouterr()
    assert "upstream: 5 of 6 tests in 3 files pass" in told.out and "worse: 1" in told.out
    assert not list(tested.stack.work.glob(".upstream*"))
    assert tested.git.dirty() == []


def test_stored_outcomes_are_not_taken_again(tested, monkeypatch):
    with pytest.raises(StackError):
        upstream.test(tested.reload(), [])
    seen = []
    run = upstream.run
    monkeypatch.setattr(upstream, "run", lambda *a, **k: seen.append(a) or run(*a, **k))
    chosen = ["tests/a/test_read.py::test_kept"]
    assert upstream.test(tested.reload(), chosen) == OK
    assert len(seen) == 1 and seen[0][4] == ["tests/a/test_read.py"] and len(seen[0][5]) == 3
    # Another suite, another pin: the outcomes no longer count.
    tested.ship(TESTS | {"tests/a/test_more.py": "def test_x(): pass\n"})
    assert upstream.load(tested.reload(), "cpu") is None
    seen.clear()
    assert upstream.test(tested.reload(), chosen) == OK
    assert [a[4] for a in seen] == [["tests/a/test_read.py"]] * 2  # both trees, for once
    assert upstream.load(tested.reload(), "cpu") is None


def test_few_passes_are_the_machines_fault_and_not_stored(tested, monkeypatch):
    monkeypatch.setattr(upstream, "MINIMUM", 99)
    with pytest.raises(StackError, match="only 6 tests pass unpatched") as err:
        upstream.test(tested.reload(), [])
    assert err.value.code == CHECK_FAILED and "line 99" in err.value.facts[0]
    assert upstream.load(tested.reload(), "cpu") is None


@pytest.mark.parametrize(
    ("chosen", "node", "holds"),
    [
        ("tests/a", "tests/a/test_x.py::test_1", True),
        ("tests/a", "tests/ab/test_x.py", False),
        ("tests/a/test_x.py", "tests/a/test_x.py::test_1[2]", True),
        ("tests/a/test_x.py::test_1", "tests/a/test_x.py::test_1[2]", True),
        ("tests/a/test_x.py::test_1", "tests/a/test_x.py::test_12", False),
        ("tests/a/test_x.py::test_1", "tests/a/test_x.py", True),
    ],
)
def test_what_a_choice_holds(chosen, node, holds):
    assert upstream._holds(chosen, node) is holds


def test_reasons_are_the_same_on_every_machine(golden):
    why = "ValueError: /home/me/x/.work/vllm/a.py <object at 0x7f0123456789> a/b 3 / 4"
    assert upstream._plain(why) == "ValueError: a.py <object at 0x...> a/b 3 / 4"


def test_a_test_that_is_gone_or_a_file_that_breaks_is_worse(tested):
    with pytest.raises(StackError):
        upstream.test(tested.reload(), [])
    upstream.save(
        tested.reload(),
        "cpu",
        {
            "tests/a/test_read.py::test_renamed": Outcome("passed"),
            "tests/a/test_import.py::test_x": Outcome("passed"),
            "tests/a/test_read.py::test_kept[1]": Outcome("passed"),
        },
    )
    with pytest.raises(StackError, match="2 of upstream's tests got worse") as err:
        upstream.test(tested.reload(), [])
    assert err.value.facts == [
        "tests/a/test_import.py::test_x: not collected: "
        "ModuleNotFoundError: No module named 'no_such_library'",
        "tests/a/test_read.py::test_renamed: gone: no such test any more",
    ]


def test_what_fails_once_is_run_again(tested, tmp_path, capsys):
    flaky = f"""
from pathlib import Path
def test_flaky():
    seen = Path({str(tmp_path / "seen")!r})
    seen.write_text(seen.read_text() + "x" if seen.exists() else "x")
    assert len(seen.read_text()) != 2
"""
    tested.ship({"tests/a/test_flaky.py": flaky, "tests/a/test_read.py": READS})
    assert upstream.test(tested.reload(), []) == OK
    told = capsys.readouterr()
    assert "1 did not pass; they are run again, alone" in told.err and "worse: 0" in told.out


def test_what_depends_on_its_neighbours_is_not_compared(tested, capsys):
    """It passes on the pin because of the test before it, and by itself nowhere."""
    pair = """
import os
from pathlib import Path
PATCHED = Path('vllm/new.py').exists()
def test_first():
    os.environ['LEFT_BEHIND'] = '' if PATCHED else 'x'
def test_second():
    assert os.environ.get('LEFT_BEHIND')
"""
    tested.ship({"tests/a/test_pair.py": pair, "tests/a/test_read.py": READS})
    assert upstream.test(tested.reload(), []) == OK
    told = capsys.readouterr()
    assert "alone they fail on the pin, too: tests/a/test_pair.py::test_second" in told.err
    assert "upstream: 1 of 1 tests" in told.out and "worse: 0" in told.out


def test_the_machines_own_packages_are_seen(tested, tmp_path):
    packages = tmp_path / "packages"
    packages.mkdir()
    (packages / "theirs.py").write_text("")
    upstream._interpreter(tested.stack, False).env["PYTHONPATH"] = str(packages)
    tested.ship({"tests/a/test_theirs.py": "import theirs\n\n\ndef test_x():\n    pass\n"})
    assert upstream.test(tested.reload(), []) == OK
    assert {o.outcome for o in stored(tested).values()} == {"passed"}


def test_patch_that_does_not_apply(tested):
    path = tested.stack.patches / "0210-hook-ten.patch"
    path.write_bytes(path.read_bytes().replace(b" line 9\n", b" line nine\n"))
    with pytest.raises(StackError, match="0210-hook-ten.patch does not apply") as err:
        upstream.test(tested.reload(), [])
    assert err.value.code == CONFLICT


def test_files_outside_the_suite(tested):
    with pytest.raises(StackError, match="not in the suite") as err:
        upstream.test(tested.reload(), ["tests/b/test_left_out.py"])
    assert err.value.code == USAGE


def test_table_says_why(tested):
    with pytest.raises(StackError):
        upstream.test(tested.reload(), [])
    text = (tested.stack.root / "upstream/tests/README.md").read_text()
    assert "Of 12 tests in 6 files 8 are run on the CPU and 6 pass; 2 need a GPU, " in text
    assert "1 need a library, 1 over a limit, 2 do not pass for another reason." in text
    assert "| a/test_module_skip.py |  | 1 |  |  |  | sm\\_90 only |" in text
    assert "| b/test_left_out.py | | | | | | left out: it ends pytest |" in text
    assert "On a GPU" not in text


def test_table_tells_what_a_gpu_did(tested):
    stack = tested.reload()
    with pytest.raises(StackError):
        upstream.test(stack, [])
    found = {"tests/a/test_x.py::test_1": "passed", "tests/a/test_x.py::test_2": "skipped"}
    upstream.save(stack, "cuda", {n: upstream.Outcome(o) for n, o in found.items()})
    text = (stack.root / "upstream/tests/README.md").read_text()
    assert "On a GPU, 1 of 2 tests pass in the 1 files that need one." in text
    assert upstream.problems(stack) == []


def test_check_holds_the_outcomes_against_the_pin(tested, monkeypatch):
    stack = tested.reload()
    assert upstream.problems(stack)[0].endswith("is missing or of another pin or suite")
    with pytest.raises(StackError):
        upstream.test(stack, [])
    assert upstream.problems(stack) == []
    readme = stack.root / "upstream/tests/README.md"
    readme.write_text(readme.read_text() + "x")
    assert upstream.problems(stack) == ["upstream/tests/README.md does not fit the outcomes"]
    monkeypatch.setattr(upstream, "MINIMUM", 99)
    assert upstream.problems(stack)[0] == "6 tests pass on the unpatched pin; 99 are wanted"
    (stack.root / "README.md").write_text("no table\n")
    with pytest.raises(StackError, match="not told right"):
        check.quick(tested.reload())


@pytest.mark.parametrize(
    ("why", "kind"),
    [
        ("CUDA required for rejection sampler tests", "GPU"),
        ("No module named 'vllm._C_stable_libtorch'", "GPU"),
        ("No module named 'torchvision'", "library"),
        ("Invalid repository ID or local directory specified: 'a/b'", "download"),
        ("over the time limit of its file: 60 s", "time"),
        ("Failed: Timeout (>120.0s) from pytest-timeout.", "time"),
        ("assert 1 == 2", "other"),
    ],
)
def test_kinds(why, kind):
    assert upstream.kind(Outcome("failed", why)) == kind


def test_gpu_takes_the_files_that_need_one(tested):
    with pytest.raises(StackError, match="which tests need a GPU is not known"):
        upstream._gpu_files(tested.reload(), ["tests/a/test_read.py"])
    with pytest.raises(StackError):
        upstream.test(tested.reload(), [])
    files = Suite.load(tested.stack).files(tested.stack.tree) or sorted(TESTS)
    assert upstream._gpu_files(tested.reload(), files) == [
        "tests/a/test_module_skip.py",
        "tests/a/test_read.py",
    ]


def test_gpu_without_one_is_skipped(tested, monkeypatch, capsys):
    monkeypatch.setattr(upstream, "_interpreter", lambda stack, gpu: "no CUDA device")
    assert upstream.test(tested.reload(), [], gpu=True) == OK
    assert "== upstream: skipped: no CUDA device" in capsys.readouterr().err


def test_gpu_needs_neither_tools_nor_index(tested, tmp_path):
    """The front as on a machine with nothing: the Python that is named, no library of the tools."""
    bare = tmp_path / "bare"
    # -S leaves out what pip installed. It is called as `PYTHON -m ddtree_stack ...`, or with -c.
    bare.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n')
    bare.chmod(0o755)
    done = tested.script("test", "upstream", "--gpu", DDTREE_GPU_PYTHON=str(bare))
    # It got as far as asking that Python for its GPU.
    assert "skipped: no CUDA device" in done.stderr and done.returncode == OK, done.stderr


def test_options_of_other_suites(golden):
    for args in (("tree", "--record"), ("upstream", "--sanitize"), ("gpu", "--gpu")):
        done = golden.script("test", *args)
        assert done.returncode == USAGE and "are options of" in done.stderr, args


def test_stand_ins_are_a_hub(tmp_path):
    from ddtree_stack.standins import write_hub

    models = REPO / "upstream" / "tests" / "models.json"
    write_hub(models, tmp_path / "hub")
    names = json.loads(models.read_text())
    assert len(list(tmp_path.glob("hub/*/snapshots/*/tokenizer.json"))) == len(names)
    at = tmp_path / "hub" / "models--facebook--opt-125m"
    snapshot = at / "snapshots" / (at / "refs" / "main").read_text()
    assert json.loads((snapshot / "config.json").read_text())["model_type"] == "opt"
    vocab = json.loads((snapshot / "tokenizer.json").read_text())["model"]["vocab"]
    assert len(vocab) == 257


def test_this_repository_is_told_right():
    assert upstream.problems(Stack(REPO)) == []
