"""rebase: the stack on another release, without losing work, and without doing any twice."""

from __future__ import annotations

import fcntl
import shutil
from typing import ClassVar

import pytest

from conftest import FILES, Golden, make_sdist
from ddtree_stack import (
    apply,
    check,
    drift,
    fetch,
    rebase,
    refresh,
    release,
    series,
    state,
    upcoming,
)
from ddtree_stack.errors import CHECK_FAILED, CONFLICT, UNSAVED, UPSTREAM, USAGE, StackError
from ddtree_stack.git import Git

TEN, NEW = "0210-hook-ten.patch", "0310-feature-new.patch"
LINES = FILES["vllm/__init__.py"]
# The first line moves every hunk; the tenth is what 0210 changes.
SHIFTED = {"vllm/__init__.py": b"new line\n" + LINES}
CONFLICTING = {"vllm/__init__.py": LINES.replace(b"line 10\n", b"line 10, reworded\n")}
UPSTREAMED = {"vllm/__init__.py": LINES.replace(b"line 10\n", b"line ten\n")}


class Moving:
    """A golden stack under git, an index with releases, and the verb."""

    def __init__(self, golden: Golden, tmp_path):
        self.golden, self.index = golden, tmp_path / "index" / "vllm"
        self.index.mkdir(parents=True)
        self.git = Git(golden.stack.root)
        (golden.stack.root / ".gitignore").write_text(".work/\n")
        self.git.raw("init", "-q")
        self.save()

    def save(self) -> None:
        """Commit the project."""
        self.git.raw("add", "-A")
        self.git.raw("commit", "-q", "-m", "state")

    def offer(self, version: str, changed: dict[str, bytes], digest: bool = True) -> None:
        """Put a release on the index: the golden files with some changed."""
        path = self.index / f"vllm-{version}.tar.gz"
        extra = {
            "requirements/cuda.txt": b"torch==9.9 # why\nflashinfer-python==8.8\nother==1\n",
            "vllm/_version.py": f"__commit_id__ = commit_id = 'gabc{version[-1]}'\n".encode(),
        }
        found = make_sdist(path, FILES | extra | changed, version)
        page = self.index / "index.html"
        old = page.read_text() if page.exists() else ""
        link = f"{path.as_uri()}#sha256={found}" if digest else path.as_uri()
        page.write_text(f'{old}<a href="{link}">{path.name}</a>\n')

    def start(self, version: str = "1.1", **how) -> None:
        rebase.start(self.golden.reload(), version, **how)

    def resume(self) -> None:
        rebase.resume(self.golden.reload())

    def resolve(self, text: bytes, path: str = "vllm/__init__.py") -> None:
        """Resolve a conflict, as a person would."""
        (self.tree / path).write_bytes(text)
        Git(self.tree).raw("add", path)

    @property
    def stack(self):
        return self.golden.reload()

    @property
    def next(self):
        return self.golden.reload().next()

    @property
    def tree(self):
        return self.stack.rebase_tree

    def file(self, path: str) -> bytes:
        """A file of the stack on the next release."""
        return (self.next.tree / path).read_bytes()

    def overrides(self) -> list[str]:
        return list(upcoming.overrides(self.stack))

    def everything(self) -> dict[str, bytes]:
        """Every byte under git's eye, and both work trees' commits."""
        root = self.stack.root
        names = self.git.out("ls-files", "-c", "-o", "--exclude-standard").splitlines()
        found = {n: (root / n).read_bytes() for n in names if (root / n).is_file()}
        for one in (self.stack, self.next):
            if one.tree.exists():
                found[one.tree.name] = Git(one.tree).out("rev-parse", "HEAD").encode()
        return found


@pytest.fixture
def moving(golden, tmp_path):
    return Moving(golden, tmp_path)


def conflict(moving: Moving, *args) -> StackError:
    with pytest.raises(StackError) as err:
        moving.start(*args)
    assert err.value.code == CONFLICT
    return err.value


def test_clean_rebase_shares_every_patch(moving, capsys):
    moving.offer("1.1", SHIFTED)
    before = moving.everything()
    moving.start()
    after = moving.everything()
    assert {n: b for n, b in after.items() if n in before} == before
    assert moving.overrides() == []
    assert moving.file("vllm/__init__.py") == SHIFTED["vllm/__init__.py"].replace(
        b"line 10\n", b"line ten\n"
    )
    out = capsys.readouterr().out
    assert "2 patches on 1.1, 2 shared with patches/" in out
    assert "Hook the tenth line" in (moving.stack.work / "rebase-1.1.range-diff").read_text()


def test_the_pin_comes_from_the_index_and_the_release(moving):
    moving.offer("1.1", SHIFTED)
    moving.offer("1.2", SHIFTED)
    moving.start("1.1")
    pin, old = moving.next.pin, moving.stack.pin
    assert (pin.version, pin.tag, pin.commit) == ("1.1", "v1.1", "abc1")
    assert (
        pin.sdist.name == "vllm-1.1.tar.gz"
        and f"sha256={pin.sdist.sha256}" in (moving.index / "index.html").read_text()
    )
    assert pin.requires["torch"] == "9.9" and pin.requires["flashinfer"] == "8.8"
    assert pin.requires["python"] == old.requires["python"]
    assert pin.architectures == old.architectures and pin.epoch == old.epoch
    assert (pin.revision, pin.wheels) == (1, {})
    assert pin.sdist_tree != old.sdist_tree and pin.tree != pin.sdist_tree
    # fetch makes the very commit that the rebase worked on.
    assert fetch.fetch(moving.next) == Git(moving.tree).rev("refs/ddtree/release/1.1")
    assert moving.next.pin_file.read_text() == pin.render()


def test_conflict_stops_names_the_patch_and_goes_on(moving):
    moving.offer("1.1", CONFLICTING)
    before = moving.everything()
    err = conflict(moving)
    assert TEN in err.what and "vllm/__init__.py" in "".join(err.facts)
    assert err.hint == "scripts/rebase.sh --continue"
    assert moving.everything() == before
    with pytest.raises(StackError, match="not resolved") as again:
        moving.resume()
    assert again.value.code == CONFLICT
    text = CONFLICTING["vllm/__init__.py"].replace(b"line 10, reworded", b"line ten, reworded")
    moving.resolve(text)
    moving.resume()
    assert moving.overrides() == [TEN]
    assert moving.file("vllm/__init__.py") == text and moving.file("vllm/new.py") == b"X = 1\n"
    assert moving.stack.pin.version == "1.0"


def test_conflict_markers_and_unadded_edits_are_refused(moving):
    moving.offer("1.1", CONFLICTING)
    conflict(moving)
    git = Git(moving.tree)
    git.raw("add", "-u")
    with pytest.raises(StackError, match="markers") as err:
        moving.resume()
    assert err.value.code == CONFLICT
    moving.resolve(LINES)
    (moving.tree / "vllm/hook.py").write_text("# more\n")
    with pytest.raises(StackError, match="not added") as err:
        moving.resume()
    assert err.value.code == CONFLICT and "vllm/hook.py" in err.value.facts[0]


def test_abort_restores_everything_and_keeps_the_work_aside(moving):
    moving.offer("1.1", CONFLICTING)
    before = moving.everything()
    conflict(moving)
    text = LINES.replace(b"line 10", b"my resolution")
    moving.resolve(text)
    rebase.abort(moving.stack)
    assert moving.everything() == before
    git = Git(moving.tree)
    (kept,) = git.out("branch", "--list", "backup/*").split()
    assert git.raw("show", f"{kept}:vllm/__init__.py") == text
    with pytest.raises(StackError) as err:
        rebase.abort(moving.stack)
    assert err.value.code == USAGE
    # Begun again, the resolution is there.
    moving.start()
    assert moving.file("vllm/__init__.py") == text


def test_second_start_while_one_is_under_way(moving):
    moving.offer("1.1", CONFLICTING)
    conflict(moving)
    at = Git(moving.tree).out("rev-parse", "HEAD")
    with pytest.raises(StackError, match="under way") as err:
        moving.start()
    assert err.value.code == UNSAVED and "--status" in err.value.hint
    assert Git(moving.tree).out("rev-parse", "HEAD") == at
    rebase.abort(moving.stack)
    with (moving.stack.work / "rebase.lock").open("w") as f:
        fcntl.flock(f, fcntl.LOCK_EX)
        with pytest.raises(StackError, match="is running") as err:
            moving.start()
    assert err.value.code == UNSAVED


def test_patch_that_upstream_has_is_named_then_dropped(moving, capsys):
    moving.offer("1.1", UPSTREAMED)
    moving.start()
    assert f"dropped: {TEN} (Hook the tenth line)" in capsys.readouterr().out
    assert [p.name for p in series.load(moving.next)] == [NEW]
    assert [p.name for p in series.load(moving.stack)] == [TEN, NEW]
    moving.save()
    moving.start()
    assert "still left out" in capsys.readouterr().err
    assert [p.name for p in series.load(moving.next)] == [NEW]


def test_patch_of_which_only_tests_are_left_is_named(moving, capsys):
    golden = moving.golden
    golden.edit("vllm/hook.py", "None", "1")
    (golden.stack.tree / "tests").mkdir()
    (golden.stack.tree / "tests/test_hook.py").write_text("def test_hook(): ...\n")
    golden.commit("0320-feature-more.patch")
    refresh.refresh(moving.stack)
    moving.offer("1.1", {"vllm/hook.py": b"def hook():\n    return 1\n"})
    moving.start()
    assert "0320-feature-more.patch: only its tests are left" in capsys.readouterr().err
    # Dropped by hand, it stays dropped.
    tree = Git(moving.next.tree)
    tree.raw("reset", "-q", "--hard", "HEAD~1")
    refresh.refresh(moving.next)
    assert [p.name for p in series.load(moving.next)] == [TEN, NEW]
    moving.save()
    moving.start()
    assert [p.name for p in series.load(moving.next)] == [TEN, NEW]


def test_crlf_survives(moving):
    moving.golden.edit("vllm/crlf.txt", "two\r\n", "2\r\n")
    moving.golden.commit("0330-feature-crlf.patch")
    refresh.refresh(moving.stack)
    moving.offer("1.1", {"vllm/crlf.txt": b"zero\r\none\r\ntwo\r\nthree, once\r\n"})
    err = conflict(moving)
    assert "0330" in err.what
    moving.resolve(b"zero\r\none\r\n2\r\nthree, once\r\n", "vllm/crlf.txt")
    moving.resume()
    assert moving.file("vllm/crlf.txt") == b"zero\r\none\r\n2\r\nthree, once\r\n"
    assert b"+2\r\n" in upcoming.overrides(moving.stack)["0330-feature-crlf.patch"].raw


def test_hostile_configuration_changes_nothing(moving, hostile):
    moving.offer("1.1", CONFLICTING)
    text = CONFLICTING["vllm/__init__.py"].replace(b"line 10,", b"line ten,")

    def whole() -> dict[str, bytes]:
        conflict(moving)
        moving.resolve(text)
        moving.resume()
        return moving.everything()

    calm = whole()
    for path in (moving.tree, moving.next.tree, moving.next.next_dir):
        shutil.rmtree(path)
    hostile()
    assert whole() == calm


def test_message_lines_that_look_like_comments_survive_a_conflict(moving):
    golden = moving.golden
    golden.edit("vllm/hook.py", "None", "1")
    golden.commit("0320-feature-more.patch", body="\n# 1 is why\n" + conftest_body())
    refresh.refresh(moving.stack)
    moving.offer("1.1", {"vllm/hook.py": b"def hook():\n    return Other\n"})
    conflict(moving)
    moving.resolve(b"def hook():\n    return 1\n", "vllm/hook.py")
    moving.resume()
    raw = upcoming.overrides(moving.stack)["0320-feature-more.patch"].raw
    assert b"# 1 is why" in raw and b"Conflicts" not in raw and b"Patch-Name" not in raw


def conftest_body() -> str:
    from conftest import BODY

    return BODY


def test_unsaved_work_is_not_gone_past(moving):
    moving.offer("1.1", SHIFTED)
    moving.golden.edit("vllm/hook.py", "None", "2")
    with pytest.raises(StackError, match="not in patches/") as err:
        moving.start()
    assert (err.value.code, err.value.hint) == (UNSAVED, "scripts/refresh.sh")
    moving.golden.edit("vllm/hook.py", "2", "None")
    moving.start()
    (moving.next.tree / "vllm/hook.py").write_text("# mine\n")
    with pytest.raises(StackError, match="upstream/next") as err:
        moving.start()
    assert (err.value.code, err.value.hint) == (UNSAVED, "scripts/refresh.sh --next")
    assert (moving.next.tree / "vllm/hook.py").read_text() == "# mine\n"


def test_patches_that_change_while_it_is_under_way(moving):
    moving.offer("1.1", CONFLICTING)
    conflict(moving)
    moving.golden.edit("vllm/hook.py", "None", "2")
    moving.golden.commit("0320-feature-more.patch")
    refresh.refresh(moving.stack)
    moving.resolve(LINES.replace(b"line 10", b"mine"))
    with pytest.raises(StackError, match="changed since") as err:
        moving.resume()
    assert err.value.code == UNSAVED
    rebase.abort(moving.stack)
    moving.start()
    assert b"mine" in moving.file("vllm/__init__.py")
    assert b"return 2" in moving.file("vllm/hook.py")


def test_unknown_version_no_version_and_the_same(moving):
    moving.offer("1.1", SHIFTED)
    for version, code in (("7.7", UPSTREAM), ("one", USAGE)):
        with pytest.raises(StackError) as err:
            moving.start(version)
        assert err.value.code == code
    with pytest.raises(StackError, match=r"offers no source.*7\.7") as err:
        moving.start("7.7")
    assert "1.1" in err.value.facts[0]
    moving.offer("1.0", {})
    with pytest.raises(StackError) as err:
        moving.start("1.0")
    assert err.value.code == USAGE
    moving.offer("1.3", {}, digest=False)
    with pytest.raises(StackError, match="no sha256") as err:
        moving.start("1.3")
    assert err.value.code == UPSTREAM
    assert not moving.next.next_dir.exists()


def test_offline_works_from_the_cache_alone(moving):
    with pytest.raises(StackError, match="--offline") as err:
        moving.start(offline=True)
    assert err.value.code == UPSTREAM
    moving.offer("1.1", SHIFTED)
    moving.start()
    shutil.rmtree(moving.index)
    shutil.rmtree(moving.tree)
    pin = moving.next.pin
    moving.start(offline=True)
    assert moving.next.pin == pin
    (moving.golden.cache / pin.sdist.name).unlink()
    shutil.rmtree(moving.tree)
    with pytest.raises(StackError, match="--offline") as err:
        moving.start(offline=True)
    assert err.value.code == UPSTREAM and moving.next.pin == pin


def adapted(moving: Moving) -> None:
    """A stack whose 0310 needs an adaptation that no conflict would ask for."""
    moving.offer("1.1", SHIFTED)
    moving.start()
    tree = moving.next.tree
    (tree / "vllm/new.py").write_text("X = 1\nADAPTED = True\n")
    git = Git(tree)
    git.raw("commit", "-q", "-a", "--amend", "--no-edit")
    assert refresh.refresh(moving.next)
    assert moving.overrides() == [NEW]
    apply.apply(moving.next)
    moving.save()


def change(moving: Moving, text: str) -> None:
    """Change patches/0310 on the present release."""
    apply.apply(moving.stack)
    (moving.stack.tree / "vllm/new.py").write_text(text)
    moving.golden.git.raw("commit", "-q", "-a", "--amend", "--no-edit")
    refresh.refresh(moving.stack)
    moving.save()


def test_again_changes_nothing(moving):
    adapted(moving)
    before = moving.everything()
    moving.start()
    assert moving.everything() == before


def test_again_keeps_adaptations_and_takes_what_changed_since(moving):
    adapted(moving)
    change(moving, "W = 0\nX = 1\n")
    assert upcoming.stale(moving.stack) == [NEW]
    moving.start()
    assert moving.file("vllm/new.py") == b"W = 0\nX = 1\nADAPTED = True\n"
    assert upcoming.stale(moving.stack) == [] and moving.next.pin.revision == 3


def test_again_stops_only_where_the_change_touches_the_adaptation(moving):
    adapted(moving)
    change(moving, "X = 1\nADAPTED = 'otherwise'\n")
    err = conflict(moving)
    assert NEW in err.what
    moving.resolve(b"X = 1\nADAPTED = 'both'\n", "vllm/new.py")
    moving.resume()
    assert moving.file("vllm/new.py") == b"X = 1\nADAPTED = 'both'\n"


def test_again_takes_a_new_patch_and_lets_a_removed_one_go(moving, capsys):
    adapted(moving)
    (moving.stack.patches / NEW).unlink()
    moving.stack.series_file.write_text(f"{TEN}\n")
    apply_loosely(moving)
    moving.golden.edit("vllm/hook.py", "None", "3")
    moving.golden.commit("0320-feature-more.patch")
    refresh.refresh(moving.stack)
    moving.save()
    moving.start()
    assert "gone from patches/" in capsys.readouterr().err
    assert [p.name for p in series.load(moving.next)] == [TEN, "0320-feature-more.patch"]
    assert moving.overrides() == []


def apply_loosely(moving: Moving) -> None:
    """Apply a series whose pin is not refreshed yet."""
    with pytest.raises(StackError, match="pinned tree"):
        apply.apply(moving.stack, force=True)


def test_a_patch_of_the_next_release_alone_stays(moving):
    adapted(moving)
    tree = moving.next.tree
    (tree / "vllm/hook.py").write_text("# only here\n")
    Golden(moving.next, moving.golden.cache).commit("0320-hook-next.patch")
    refresh.refresh(moving.next)
    moving.save()
    change(moving, "W = 0\nX = 1\n")
    moving.start()
    assert [p.name for p in series.load(moving.next)] == [TEN, NEW, "0320-hook-next.patch"]
    assert moving.file("vllm/hook.py") == b"# only here\n"


def test_on_to_a_third_release_from_the_adapted_stack(moving):
    adapted(moving)
    moving.offer("1.2", {"vllm/__init__.py": b"first\nnew line\n" + LINES})
    shutil.rmtree(moving.next.tree)
    moving.start("1.2")
    assert moving.next.pin.version == "1.2" and moving.next.pin.revision == 1
    assert moving.file("vllm/new.py") == b"X = 1\nADAPTED = True\n"


def test_what_it_was_made_from_is_not_in_history(moving):
    adapted(moving)
    change(moving, "X = 5\n")
    shutil.rmtree(moving.stack.root / ".git")
    with pytest.raises(StackError, match="not in git's history") as err:
        moving.start()
    assert err.value.code == CHECK_FAILED


def test_refresh_does_not_hide_a_change_below_an_adaptation(moving):
    adapted(moving)
    change(moving, "X = 7\n")
    (moving.next.tree / "vllm/new.py").write_text("X = 1\nADAPTED = 2\n")
    Git(moving.next.tree).raw("commit", "-q", "-a", "--amend", "--no-edit")
    with pytest.raises(StackError, match="hide") as err:
        refresh.refresh(moving.next)
    assert err.value.code == UNSAVED and "rebase.sh 1.1" in err.value.hint


def test_status_tells_the_next_step(moving, capsys):
    rebase.status(moving.stack)
    assert "no rebase is under way" in capsys.readouterr().out
    moving.offer("1.1", CONFLICTING)
    conflict(moving)
    capsys.readouterr()
    rebase.status(moving.stack)
    out = capsys.readouterr().out
    assert "onto 1.1: 0 of 2" in out and TEN in out and "--continue" in out


def test_ended_by_hand_is_finished_or_given_up(moving):
    moving.offer("1.1", CONFLICTING)
    conflict(moving)
    moving.resolve(LINES.replace(b"line 10", b"by hand"))
    Git(moving.tree).raw("rebase", "--continue", env={"GIT_EDITOR": "true"})
    moving.resume()
    assert b"by hand" in moving.file("vllm/__init__.py")
    shutil.rmtree(moving.next.next_dir)
    shutil.rmtree(moving.next.tree)
    shutil.rmtree(moving.tree)
    conflict(moving)
    Git(moving.tree).raw("rebase", "--abort")
    with pytest.raises(StackError, match="did not bring") as err:
        moving.resume()
    assert err.value.code == CHECK_FAILED and "--abort" in err.value.hint
    rebase.abort(moving.stack)


def test_a_process_that_died_before_its_job_leaves_nothing_in_the_way(moving, monkeypatch):
    moving.offer("1.1", SHIFTED)
    with monkeypatch.context() as m:
        m.setattr(rebase, "write_atomic", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            moving.start()
    moving.start()
    assert moving.file("vllm/new.py") == b"X = 1\n"


def test_the_next_series_reads_with_quilt(moving):
    adapted(moving)
    with check.scratch(moving.next) as tree:
        check.with_quilt(moving.next, tree)


def test_release_commit_is_the_one_fetch_makes(moving):
    git = rebase._repository(moving.stack)
    base = release.bring(moving.stack, git, moving.stack.pin, offline=True)
    assert base == moving.golden.git.rev(fetch.BASE)


def test_command_line(moving):
    script = moving.golden.script
    moving.offer("1.1", CONFLICTING)
    for args in ((), ("1.1", "--abort"), ("--continue", "--abort"), ("--continue",)):
        done = script("rebase", *args)
        assert done.returncode == USAGE and "rebase.sh: error[2]:" in done.stderr
    done = script("rebase", "1.1")
    assert done.returncode == CONFLICT and "hint: scripts/rebase.sh --continue" in done.stderr
    assert "Traceback" not in done.stderr
    assert script("rebase", "--status").returncode == 0
    assert script("rebase", "--abort").returncode == 0
    assert script("apply", "--next").returncode == USAGE
    done = script("rebase", "9.9")
    assert done.returncode == UPSTREAM


def test_apply_and_refresh_mean_the_next_stack_with_next(moving):
    adapted(moving)
    script = moving.golden.script
    done = script("apply", "--next")
    assert done.returncode == 0 and moving.next.pin.tree in done.stdout
    assert script("refresh", "--next", "--check").returncode == 0
    tree = moving.next.tree
    (tree / "vllm/new.py").write_text("X = 1\n")
    Git(tree).raw("commit", "-q", "-a", "--amend", "--no-edit")
    done = script("refresh", "--next", "--check")
    assert done.returncode == CHECK_FAILED and f"patches/{NEW}" in done.stdout
    assert state.unsaved(moving.next) and moving.overrides() == [NEW]
    # What patches/ says will do again.
    assert script("refresh", "--next").returncode == 0 and moving.overrides() == []


class NoCheckout:
    """A checkout that imports whatever one wants, without an environment."""

    failing: ClassVar[dict[str, str]] = {}

    def __init__(self, _stack, tree, _tip):
        self.tree = tree

    def switch(self, commit):
        Git(self.tree).raw("checkout", "-q", "-f", "--detach", commit)

    def compiles(self, _files):
        return []

    def imports(self, names):
        return {n: self.failing.get(n) for n in names}


@pytest.fixture
def checkout(monkeypatch):
    monkeypatch.setattr(drift, "install", lambda *_: None)
    monkeypatch.setattr(drift, "Checkout", NoCheckout)
    monkeypatch.setattr(NoCheckout, "failing", {})
    return NoCheckout


def drifts(moving: Moving, match: str) -> StackError:
    with pytest.raises(StackError, match=match) as err:
        drift.drift(moving.next, "none")
    assert err.value.code == CHECK_FAILED
    return err.value


def test_drift_is_told(moving, checkout, capsys):
    moving.offer("1.1", {"vllm/hook.py": b"import os\n"})
    golden = moving.golden
    moving.start()
    # vllm/__init__.py is no Python in either release: upstream's faults are not the stack's.
    drift.drift(moving.next, "none")
    assert "2 patches fit 1.1" in capsys.readouterr().out
    # A shared patch that changed and still applies is fine, and said.
    change(moving, "X = 2\n")
    drift.drift(moving.next, "none")
    assert "1 of patches/ changed" in capsys.readouterr().err
    # One that has lost what it names is not.
    change(moving, "X = gone\n")
    assert "new.py:1:5: F821" in drifts(moving, "ruff").facts[0]
    # Nor is one that no longer applies.
    change(moving, "X = 1\n")
    golden.edit("vllm/hook.py", "None", "1")
    golden.commit("0320-feature-more.patch")
    refresh.refresh(moving.stack)
    err = drifts(moving, "0320-feature-more.patch does not apply")
    assert err.hint == "scripts/rebase.sh 1.1"


def test_drift_below_an_adaptation_is_told(moving, checkout):
    adapted(moving)
    drift.drift(moving.next, "none")
    change(moving, "X = 2\n")
    assert NEW in drifts(moving, "changed below").facts[0]


def test_drift_in_an_import_is_told_unless_upstream_has_it(moving, checkout, monkeypatch):
    moving.offer("1.1", SHIFTED)
    moving.start()
    checkout.failing["vllm.new"] = "ImportError: no driver"
    drift.drift(moving.next, "none")
    told = iter([{"vllm.new": "ImportError: gone", "vllm": None}, {"vllm.new": None}])
    monkeypatch.setattr(checkout, "imports", lambda *_: next(told))
    assert "vllm.new: ImportError: gone" in drifts(moving, "does not import").facts
