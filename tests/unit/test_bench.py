"""bench: rows and their bars, the file, children and what groups make of their answers. No GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from argparse import Namespace
from collections import defaultdict
from pathlib import Path

import pytest

import ddtree_bench.__main__ as program
from ddtree_bench import serve
from ddtree_bench.children import Child, ChildError
from ddtree_bench.engines import CHAIN, TREE, engine_args
from ddtree_bench.groups import GROUPS, attention, hybrid, kernels, pair, profile, steps
from ddtree_bench.options import chosen
from ddtree_bench.records import (
    COUNT_AT_MOST,
    MS_AT_MOST,
    RATIO_AT_LEAST,
    Results,
    Row,
    file_name,
    record,
    row_of,
    table,
)
from ddtree_bench.run import Run
from ddtree_bench.shapes import QWEN3_8B, QWEN36_27B
from ddtree_bench.timeline import render, summary, union
from ddtree_stack.bench import bench
from ddtree_stack.errors import CHECK_FAILED, OK, TOOL, USAGE

REPO = Path(__file__).resolve().parents[2]
VERSIONS = {"vllm": "0.0", "torch": "0.1"}


@pytest.fixture
def results(tmp_path) -> Results:
    return Results(tmp_path / "made" / "card.json", "A Card", VERSIONS, "2030-01-02")


@pytest.fixture
def run(tmp_path, results) -> Run:
    lines: list[str] = []
    made = Run(REPO, tmp_path, results, say=lines.append)
    made.lines = lines
    return made


@pytest.fixture
def importable(monkeypatch):
    """Children find the package and the fake worker."""
    path = [str(REPO / "scripts" / "lib"), str(REPO / "tests" / "unit")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path))


# --- rows


@pytest.mark.parametrize(
    "row, verdict",
    [
        (Row("w", ratio=1.05, limit=1.05), "pass"),
        (Row("w", ratio=1.051, limit=1.05), "miss"),
        (Row("w", ratio=1.2, limit=1.2, bound=RATIO_AT_LEAST), "pass"),
        (Row("w", ratio=1.19, limit=1.2, bound=RATIO_AT_LEAST), "miss"),
        (Row("w", tree_ms=0.06, ratio=9.0, limit=0.06, bound=MS_AT_MOST), "pass"),
        (Row("w", tree_ms=0.07, limit=0.06, bound=MS_AT_MOST), "miss"),
        (Row("w", count=0, limit=0, bound=COUNT_AT_MOST), "pass"),
        (Row("w", count=1, limit=0, bound=COUNT_AT_MOST), "miss"),
        (Row("w", limit=1.05), "none"),
        (Row("w", ratio=9.0), ""),
    ],
)
def test_verdict(row, verdict):
    assert row.verdict == verdict


def test_record_has_every_field_and_comes_back():
    row = Row("step", 8, 512, 63, 7.1234567, 7.0, 1.0176, 1.05, details={"tree": {"mean_ms": 7}})
    made = json.loads(json.dumps(record(row, "A Card", VERSIONS, "2030-01-02")))
    assert list(made)[:11] == (
        [
            "work",
            "batch",
            "context",
            "B",
            "tree_ms",
            "chain_ms",
            "ratio",
            "limit",
            "card",
            "versions",
            "date",
        ]
    )
    assert made["tree_ms"] == 7.12346 and made["bound"] == "ratio <=" and "note" not in made
    assert row_of(made).details == row.details and row_of(made).key == row.key
    empty = record(Row("step", 32, 32768, 63, note="no room"), "A Card", VERSIONS, "d")
    assert empty["ratio"] is None and empty["limit"] is None and "bound" not in empty
    assert empty["note"] == "no room"


def test_file_is_merged_row_by_row(results):
    results.add(Row("step", 8, 512, 63, ratio=1.2, limit=1.05))
    results.add(Row("step", 1, 512, 63, ratio=1.0))
    results.add(Row("other", None, None, None, count=0))
    later = Results(results.file, "A Card", VERSIONS, "2031-01-01")
    later.add(Row("step", 8, 512, 63, ratio=1.01, limit=1.05))
    found = json.loads(results.file.read_text())
    assert [(r["work"], r["batch"], r["ratio"], r["date"][:4]) for r in found] == [
        ("other", None, None, "2030"),
        ("step", 1, 1.0, "2030"),
        ("step", 8, 1.01, "2031"),
    ]
    # A line for each record, and nothing left over.
    assert len(results.file.read_text().splitlines()) == 5
    assert [p.name for p in results.file.parent.iterdir()] == ["card.json"]
    assert len(results.missed) == 1 and later.missed == []


@pytest.mark.parametrize("text", ["{", "{}", '{"rows": 1}', "[1]", '[{"batch": 1}]'])
def test_another_file_is_not_overwritten(tmp_path, text):
    file = tmp_path / "x.json"
    file.write_text(text)
    with pytest.raises(ValueError, match=r"x\.json does not hold"):
        Results(file, "A Card", VERSIONS, "d")
    assert file.read_text() == text


def test_file_is_named_after_the_card():
    assert file_name("NVIDIA H200") == "h200.json"
    assert file_name("NVIDIA GeForce RTX 4090") == "geforce-rtx-4090.json"


def test_table():
    lines = table(
        [
            Row("step", 32, 8192, 63, 50.1234, 50.0, 1.0025, 1.08),
            Row("step", 1, 512, 63, 8.0, 7.0, 1.1429, 1.05),
            Row("step", 32, 32768, 63, note="no room"),
            Row("host synchronisations", 1, 512, 63, limit=0, bound=COUNT_AT_MOST, count=2),
            Row("tokens/s", 8, limit=1.1, bound=RATIO_AT_LEAST, note="B=31"),
        ]
    ).splitlines()
    assert lines[0].split()[:4] == ["work", "requests", "context", "B"]
    assert lines[1].split() == [
        "step",
        "32",
        "8192",
        "63",
        "50.123",
        "50.000",
        "1.002",
        "ratio",
        "<=",
        "1.08",
        "pass",
    ]
    assert lines[2].endswith("MISS") and lines[3].endswith("no room")
    assert lines[4].split()[-5:] == ["2", "count", "<=", "0", "MISS"]
    assert lines[5].endswith("not measured (B=31)")
    # Numbers end where their heading ends.
    assert lines[1].index("50.123") + 6 == lines[0].index("tree ms") + 7


# --- command line


def test_groups_are_chosen_by_name_or_family():
    assert chosen(None) == [g for g in GROUPS if not g.startswith("hybrid-")]
    assert chosen(["hybrid"]) == ["hybrid-kernels", "hybrid-steps"]
    assert chosen(["steps-63"]) == ["steps-63"]
    assert chosen(["steps"]) == [g for g in GROUPS if g.startswith("steps-")]
    assert chosen(["pair", "kernels"]) == ["kernels", "pair"]
    assert chosen(["step"]) == []


@pytest.mark.parametrize("only", [[], ["--only", "steps", "profile"]])
def test_several_cards_are_for_steps_alone(monkeypatch, capsys, only):
    monkeypatch.setattr(program, "probe", lambda: pytest.fail("not before it is refused"))
    with pytest.raises(SystemExit) as end:
        program.main(["--tensor-parallel", "2", *only])
    assert end.value.code == USAGE and "--only steps" in capsys.readouterr().err


def test_front_refuses_an_unknown_group(bare):
    done = bare.script("bench", "--only", "steps", "nothing")
    assert done.returncode == USAGE and "no such group: nothing" in done.stderr


def test_front_without_a_gpu_says_so_and_installs_nothing(bare, tmp_path):
    tool = tmp_path / "bin" / "nvidia-smi"
    tool.parent.mkdir()
    tool.write_text("#!/bin/sh\nexit 9\n")
    tool.chmod(0o755)
    done = bare.script("bench", "--quick", PATH=f"{tool.parent}:{os.environ['PATH']}")
    assert done.returncode == TOOL and "needs an NVIDIA GPU" in done.stderr
    assert not bare.stack.venv.exists()


def test_front_with_another_python_sets_nothing_up(bare, tmp_path):
    """The tools' Python has no torch: it sees no GPU, which is all it is asked."""
    done = bare.script("bench", "--python", sys.executable, DDTREE_TOOLS=str(tmp_path / "none"))
    assert done.returncode == TOOL and "needs an NVIDIA GPU" in done.stderr
    assert not (tmp_path / "none").exists()


def test_verb_passes_everything_on(bare, tmp_path, monkeypatch):
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\necho "$PYTHONPATH $*" >{tmp_path}/seen\nexit 1\n')
    python.chmod(0o755)
    monkeypatch.setenv("PYTHONPATH", "/caller")
    args = Namespace(
        python=str(python),
        quick=True,
        batches=[8, 32],
        contexts=None,
        tensor_parallel=2,
        only=["pair", "steps"],
        out=Path("/o.json"),
        target=tmp_path,
    )
    assert bench(bare.stack, args) == CHECK_FAILED
    lib = bare.stack.root / "scripts" / "lib"
    options = "--quick --batches 8 32 --tensor-parallel 2 --only pair steps --out /o.json"
    want = f"{lib}:/caller -m ddtree_bench {options} --target {tmp_path}\n"
    assert (tmp_path / "seen").read_text() == want


# --- children


def test_child_answers_in_order_whatever_it_prints(tmp_path, importable):
    child = Child("fake", "bench_worker", tmp_path / "log", base=10)
    child.send("add", number=1)
    child.send("add", number=2)
    assert child.call("add", number=3) == 13  # the earlier ones are waited for
    child.send("add", number=4)
    child.send("add", number=5)
    assert [child.receive(), child.receive()] == [14, 15]
    child.stop()
    log = (tmp_path / "log").read_text()
    assert "an engine's own talk" in log and log.endswith("closed\n")


def test_a_child_that_raises_goes_on(tmp_path, importable):
    child = Child("fake", "bench_worker", tmp_path / "log")
    with pytest.raises(ChildError, match=r"fake failed; .*log(?s:.*)KeyError: 'lost'"):
        child.call("fail")
    with pytest.raises(ChildError, match="not for others"):
        child.call("_private")
    assert child.call("add", number=1) == 1
    child.stop()


def test_a_child_that_cannot_be_made_says_why(tmp_path, importable):
    child = Child("fake", "bench_worker", tmp_path / "log", broken=True)
    with pytest.raises(ChildError, match="cannot be made"):
        child.ready()
    child.stop()


def test_a_child_that_dies_shows_its_log(tmp_path, importable):
    child = Child("fake", "bench_worker", tmp_path / "log")
    with pytest.raises(ChildError, match=r"fake died \(9\)(?s:.*)out of memory"):
        child.call("die")
    child.stop()


def test_a_child_leaves_with_its_parent(tmp_path, importable):
    """A parent that is killed cannot tell its children."""
    code = (
        "import os, signal, pathlib, ddtree_bench.children as c\n"
        f"child = c.Child('fake', 'bench_worker', pathlib.Path({str(tmp_path / 'log')!r}))\n"
        "child.ready()\n"
        "print(child._process.pid, flush=True)\n"
        # Without this the closed pipe would end the child.
        "os.set_inheritable(child._process.stdin.fileno(), True)\n"
        "import subprocess\n"
        "subprocess.Popen(['sleep', '20'], close_fds=False)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, stderr=subprocess.DEVNULL
    )
    pid = int(done.stdout.readline())
    done.wait()
    for _ in range(100):
        state = Path(f"/proc/{pid}/stat")
        if not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z":
            return
        subprocess.run(["sleep", "0.1"])
    pytest.fail("the child is still there")


def test_a_run_keeps_the_children_it_still_wants(run, importable):
    wanted = {n: ("bench_worker", {"base": i}) for i, n in enumerate(("a", "b, B=1"))}
    a, b = run.start(wanted)
    assert (a.call("add", number=1), b.call("add", number=1)) == (1, 2)
    again, c = run.start({"b, B=1": wanted["b, B=1"], "c": ("bench_worker", {})})
    assert again is b and c is not a and a._process.poll() is not None
    run.stop()
    assert b._process.poll() == 0 and c._process.poll() == 0 and not run.children


def test_a_failing_group_does_not_stop_the_next(run):
    def bad(_):
        raise ChildError("gone")

    groups = {"bad": bad, "good": lambda r: r.add(Row("w", ratio=1.0, limit=1.0))}
    assert program.run_groups(run, ["bad", "good"], groups) == ["bad"]
    assert [row.work for row in run.results.rows] == ["w"]
    assert any("bad failed: gone" in line for line in run.lines)


def test_an_interrupted_run_keeps_what_it_has(run):
    def slow(r):
        r.add(Row("w", ratio=1.0))
        raise KeyboardInterrupt

    assert program.run_groups(run, ["slow", "next"], {"slow": slow}) == ["slow"]
    assert len(json.loads(run.results.file.read_text())) == 1


@pytest.mark.parametrize("ratio, code", [(1.0, OK), (1.1, CHECK_FAILED), (None, CHECK_FAILED)])
def test_exit_code(tmp_path, monkeypatch, capsys, ratio, code):
    def group(run):
        if ratio is None:
            raise ChildError("gone")
        run.add(Row("w", ratio=ratio, limit=1.05))

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # logs of what failed stay
    monkeypatch.setattr(program, "probe", lambda: ("NVIDIA H200", VERSIONS))
    monkeypatch.setitem(GROUPS, "pair", group)
    out = tmp_path / "o.json"
    assert program.main(["--only", "pair", "--out", str(out)]) == code
    printed = capsys.readouterr().out
    assert ("failed: pair" in printed) == (ratio is None)
    if ratio:
        (data,) = json.loads(out.read_text())
        assert data["card"] == "NVIDIA H200" and data["versions"] == VERSIONS
        assert f"1 rows, {int(code != OK)} miss their bar" in printed
    out.write_text("{}")
    assert program.main(["--only", "pair", "--out", str(out)]) == USAGE


# --- groups


class Told:
    """A child that answers from a table and remembers what it was asked."""

    def __init__(self, asked: list, **answers):
        self.asked, self.answers = asked, answers
        self.pending: list = []

    def call(self, method, **args):
        self.send(method, **args)
        return self.receive()

    def send(self, method, **args):
        self.asked.append((self, method, args))
        answer = self.answers.get(method)
        self.pending.append(answer(**args) if callable(answer) else answer)

    def receive(self):
        return self.pending.pop(0)


def burst(ms):
    return {"seconds": [ms / 1000] * 3, "tokens_per_step": 1.0}


def test_steps_take_turns_and_the_median_counts():
    asked: list = []
    times = {"tree": iter((10.0, 99.0, 12.0)), "chain": iter((8.0, 1.0, 9.0))}
    tree = Told(asked, run=lambda steps: burst(next(times["tree"])))
    chain = Told(asked, run=lambda steps: burst(next(times["chain"])))
    row = Row("step", 8, 512, 63)
    steps.compare(row, tree, chain)
    assert (row.tree_ms, row.chain_ms, row.ratio) == pytest.approx((12.0, 8.0, 1.5))
    starts = [(c, a) for c, m, a in asked if m == "start"]
    assert starts == [(c, {"batch": 8, "context": 512}) for c in (tree, chain)]
    assert [c for c, m, _ in asked if m == "run"] == [tree, chain, chain, tree, tree, chain]
    assert row.details["tree"]["bursts_ms"] == [10.0, 99.0, 12.0]


@pytest.mark.parametrize(
    "cell, bar",
    [
        ((63, 63, 8, 32768), 1.05),
        ((15, 15, 32, 512), 1.08),
        ((63, 15, 1, 8192), 1.12),
        ((63, 15, 1, 32768), None),
        ((63, 15, 8, 512), None),
    ],
)
def test_bars_of_steps(cell, bar):
    assert steps.limit(*cell) == bar


def test_what_does_not_fit_is_a_row_with_the_reason(run, monkeypatch):
    asked: list = []
    two = [Told(asked, info={"kv_tokens": n}, run=burst(1.0)) for n in (300_000, 100_000)]
    monkeypatch.setattr(steps, "engines", lambda *_: two)
    steps.measure(run, tree=63, chain=63)
    rows = {(r.context, r.batch): r for r in run.results.rows}
    assert sorted(rows) == [(c, n) for c in (512, 8192, 32768) for n in (1, 4, 8, 32)]
    missing = [cell for cell, row in rows.items() if row.ratio is None]
    assert missing == [(8192, 32), (32768, 4), (32768, 8), (32768, 32)]
    gap = rows[8192, 32]
    assert (
        gap.limit is None and gap.note == "K/V of 274432 tokens, 100000 fit beside a second engine"
    )
    assert rows[8192, 8].verdict == "pass"


def test_quick_steps_are_those_of_the_bars(run, monkeypatch):
    run.quick = True
    two = [Told([], info={"kv_tokens": 300_000}, run=burst(1.0)) for _ in range(2)]
    monkeypatch.setattr(steps, "engines", lambda *_: two)
    steps.measure(run, tree=63, chain=15)
    assert [(r.context, r.batch, r.limit) for r in run.results.rows] == [
        (512, 1, 1.12),
        (512, 8, None),
        (8192, 1, 1.12),
        (8192, 8, None),
    ]


def test_cells_can_be_chosen(run, monkeypatch):
    run.batches, run.contexts = [8, 32], [512]
    two = [Told([], info={"kv_tokens": 9_000_000}, run=burst(1.0)) for _ in range(2)]
    monkeypatch.setattr(steps, "engines", lambda *_: two)
    steps.measure(run, tree=63, chain=63)
    assert [(r.context, r.batch) for r in run.results.rows] == [(512, 8), (512, 32)]


def test_engines_of_several_cards_have_no_bars(run, monkeypatch):
    wanted: dict = {}
    run.tensor_parallel, run.batches, run.contexts = 2, [1], [512]
    two = [Told([], info={"kv_tokens": 300_000}, run=burst(1.0)) for _ in range(2)]
    monkeypatch.setattr(Run, "start", lambda _, children: wanted.update(children) or two)
    steps.measure(run, tree=63, chain=63)
    assert [config["engine"]["tensor_parallel_size"] for _, config in wanted.values()] == [2, 2]
    (row,) = run.results.rows
    assert row.work == "step, chain k=63, 2 ranks" and row.limit is None and row.ratio == 1.0


def test_the_chain_of_another_width_is_compared_at_few_requests(run, monkeypatch):
    two = [Told([], info={"kv_tokens": 9_000_000}, run=burst(1.0)) for _ in range(2)]
    monkeypatch.setattr(steps, "engines", lambda *_: two)
    steps.measure(run, tree=63, chain=15)
    assert {r.batch for r in run.results.rows} == {1, 4, 8}


def test_engines_capture_every_batch_unpadded(tmp_path):
    def sizes(method, tokens):
        made = engine_args(tmp_path, tmp_path, method, tokens, (1, 8))
        return made["compilation_config"]["cudagraph_capture_sizes"]

    assert sizes(TREE, 63) == [16, 64, 128, 512]  # drafts of 16 rows, trees of 64
    assert sizes(CHAIN, 63) == [64, 512]
    assert sizes(TREE, 15) == sizes(CHAIN, 15) == [16, 128]


def test_shape_says_what_a_drafter_needs(tmp_path):
    target, drafter = (
        json.loads((p / "config.json").read_text()) for p in QWEN3_8B.write(tmp_path)
    )
    assert target["num_hidden_layers"] == 36 and drafter["num_hidden_layers"] == 5
    ids = drafter["dflash_config"]["target_layer_ids"]
    assert ids == [1, 9, 17, 25, 33] and drafter["num_target_layers"] == 36


def test_kernels_sum_what_a_chain_does_not_have(run, monkeypatch):
    found = {"top candidates": 1.0, "builder": 0.01, "scatter": 0.02, "walk": 0.04}
    child = Told([], measure=found | {"accepted rows": 0.5, "compaction": 0.07})
    monkeypatch.setattr(run, "start", lambda wanted: [child])
    kernels.measure(run)
    sums = [r for r in run.results.rows if r.work.startswith("kernels,")]
    assert len(sums) == 9 and len(run.results.rows) == 9 * 7
    assert all(r.tree_ms == pytest.approx(0.14) for r in sums)
    bars = {(r.batch, r.B): r.verdict for r in sums if r.limit}
    assert bars == {(1, 63): "miss", (32, 63): "pass"}


def test_attention_takes_the_faster_way(run, monkeypatch):
    child = Told([], measure={"chain": 0.030, "tail": 0.032, "split": 0.045})
    monkeypatch.setattr(run, "start", lambda wanted: [child])
    attention.measure(run)
    rows = {(r.batch, r.context): r for r in run.results.rows}
    assert len(rows) == 6 and {k for k, r in rows.items() if r.limit} == {(1, 8192)}
    row = rows[1, 8192]
    assert (row.tree_ms, row.chain_ms, row.verdict) == (0.032, 0.030, "pass")
    assert row.details == {"tail": 0.032, "split": 0.045}


def test_profile_counts_and_compares_idle_time(run, monkeypatch, tmp_path):
    def side(count, idle):
        found = {"span_ms": 9.0, "busy_ms": 9.0 - idle, "idle_ms": idle, "launches": 5}
        return Told(
            [],
            count_syncs={"count": count, "first": "File x, line 1" if count else ""},
            profile=found | {"kernels": [["gemm", 2.0, 4.5]]},
        )

    run.quick, run.text_file = True, tmp_path / "o.profile.txt"
    monkeypatch.setattr(steps, "engines", lambda *_: (side(2, 0.3), side(0, 0.2)))
    profile.measure(run)
    syncs, idle = run.results.rows[:2]
    assert (syncs.count, syncs.verdict) == (2, "miss")
    assert idle.ratio == pytest.approx(1.5) and idle.verdict == "miss"
    text = run.text_file.read_text()
    assert "File x, line 1" in text and text.count("gemm") == 4


def test_profile_goes_on_where_kernels_cannot_be_seen(run, monkeypatch):
    def unseen(steps):
        raise ChildError("tree failed\nValueError: nothing that ran on the GPU")

    run.quick = True
    sides = [Told([], count_syncs={"count": 0, "first": ""}, profile=unseen) for _ in range(2)]
    monkeypatch.setattr(steps, "engines", lambda *_: sides)
    profile.measure(run)
    assert [r.verdict for r in run.results.rows] == ["pass", "none"] * 2
    assert run.results.rows[1].note == "ValueError: nothing that ran on the GPU"


def test_pair_takes_the_best_tree_and_counts_unequal_answers(run):
    asked = []

    def side(seconds, tokens):
        def generate(**ask):
            asked.append(ask["limit"])
            steps = {"joining": [seconds / 4], "other": [seconds / 8] * 6}
            answer = {"tokens": tokens, "seconds": seconds, "tokens_per_step": 2.0}
            return answer | {"steps": steps}

        return Told([], generate=generate, margin=0.125)

    same, other = [[1, 2], [3, 4]], [[1, 2], [3, 5]]
    pair.compare(run, 0.0, 1, side(4.0, same), {15: side(3.0, same), 63: side(2.0, other)})
    # What warms up is few; what is timed is every prompt.
    assert asked == [8] * 3 + [None] * 9
    rows = defaultdict(list)
    for row in run.results.rows:
        rows[row.work].append(row)
    work = "tokens/s, chain k=15, T=0"
    assert {r.B: r.ratio for r in rows[work]} == pytest.approx({15: 4 / 3, 63: 2.0})
    told = rows[work][0].details["tree"]
    assert (told["joining_ms"], told["other_ms"], told["joining_share"]) == (750, 375, 0.25)
    assert told["other_mean_ms"] == 375
    (best,) = rows[f"{work}, best B"]
    assert (best.ratio, best.note, best.limit, best.B) == (2.0, "B=63", 1.20, None)
    assert [r.count for r in rows["unequal answers, T=0"]] == [0, 0]
    assert rows["unequal answers, T=0"][1].details["differ"] == [
        {"prompt": 1, "token": 1, "margin": 0.125}
    ]


def test_sampled_answers_of_a_pair_are_not_compared(run):
    def generate(**ask):
        steps = {"joining": [], "other": [1.0]}
        return {"tokens": [[1]], "seconds": 1.0, "tokens_per_step": 2.0, "steps": steps}

    sides = [Told([], generate=generate) for _ in range(2)]
    pair.compare(run, 1.0, 32, sides[0], {15: sides[1]})
    assert [r.work for r in run.results.rows] == [
        "tokens/s, chain k=15, T=1",
        "tokens/s, chain k=15, T=1, best B",
    ]
    assert all(r.limit is None for r in run.results.rows)


def test_the_chain_is_held_against_itself_in_other_batches(run, monkeypatch):
    def generate(**ask):
        tokens = [[1, ask["together"]], [3, 4]] * (2 if ask["together"] == 32 else 1)
        steps = {"joining": [], "other": [1.0]}
        return {"tokens": tokens, "seconds": 1.0, "tokens_per_step": 2.0, "steps": steps}

    def side(_):
        return Told([], generate=generate, margin=0.5)

    run.target = run.work
    monkeypatch.setattr(Run, "start", lambda _, wanted: [*map(side, wanted)])
    pair.measure(run)
    work = "unequal answers, T=0, chain against chain of 1"
    rows = [r for r in run.results.rows if r.work == work]
    assert [(r.batch, r.count, r.note) for r in rows] == [
        (8, 0, "1 of 2 differ, by 0.5 at most"),
        (32, 0, "2 of 4 differ, by 0.5 at most"),
    ]


@pytest.mark.parametrize("margin, count", [(0.5, 0), (0.6, 1), (None, 1)])
def test_only_near_ties_may_differ(margin, count):
    asked: list = []
    row = pair.unequal("", 8, 31, Told(asked, margin=margin), [[7, 8, 9]], [[7, 8, 6]])
    assert row.count == count and "1 of 1 differ" in row.note
    assert asked[0][2] == {"prompt": 0, "prefix": [7, 8], "tokens": [9, 6]}


def test_an_answer_that_ends_early_is_unequal():
    asked: list = []
    row = pair.unequal("", 8, 31, Told(asked), [[7, 8, 9]], [[7, 8]])
    assert row.count == 1 and not asked
    assert row.details["differ"] == [{"prompt": 0, "token": 2, "margin": None}]


# --- timeline


def test_union_counts_overlaps_once():
    assert union([]) == 0
    assert union([(5, 6), (0, 2), (1, 3), (1, 2)]) == 4


def test_summary_of_a_trace():
    def event(name, ts, dur, cat="kernel", ph="X"):
        return {"name": name, "ts": ts, "dur": dur, "cat": cat, "ph": ph}

    trace = {
        "traceEvents": [
            event("gemm", 1000, 400),
            event("attention", 1300, 200),  # beside it, on another stream
            event("copy", 2000, 100, cat="gpu_memcpy"),
            event("gemm", 2600, 400),
            event("cudaLaunchKernel", 0, 9000, cat="cuda_runtime"),
            event("step", 0, 9000, cat="gpu_user_annotation"),
            {"name": "meta", "ph": "M"},
        ]
    }
    found = summary(trace, steps=2, top=2)
    assert found["span_ms"] == pytest.approx(1.0)
    assert found["busy_ms"] == pytest.approx(0.5)
    assert found["idle_ms"] == pytest.approx(0.5)
    assert found["launches"] == 2
    assert found["kernels"] == [["gemm", 1.0, 0.4], ["attention", 0.5, 0.1]]
    assert "gemm" in render("tree", found)
    with pytest.raises(ValueError, match="nothing that ran"):
        summary({"traceEvents": []}, steps=1)


# --- children


def test_a_child_has_one_thread_of_each_core(tmp_path):
    for cpu, siblings in {0: "0,4", 4: "0,4", 1: "1,5", 5: "1,5", 7: "7"}.items():
        folder = tmp_path / f"cpu{cpu}" / "topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{siblings}\n")
    # Where nothing is known of a thread, it is a core.
    assert serve.one_thread_a_core({0, 1, 4, 5, 6, 7}, tmp_path) == {0, 1, 6, 7}


# --- hybrids


def test_hybrid_states_are_the_27b_shape(tmp_path):
    """48 layers of 144 MiB of states in all, and three columns of the convolution."""
    target, drafter = QWEN36_27B.write(tmp_path)
    config = json.loads((target / "config.json").read_text())
    assert config["layer_types"].count("linear_attention") == 48
    assert config["architectures"] == ["Qwen3_5ForCausalLM"] and config["head_dim"] == 256
    assert json.loads((drafter / "config.json").read_text())["head_dim"] == 128
    assert QWEN36_27B.state_bytes == (144 << 20) + 48 * 3 * 2 * 10240


class Engine:
    """A child that has steps of some milliseconds and requests of so many bytes."""

    def __init__(self, ms: float, state: int) -> None:
        self.ms, self.state, self.batches = ms, state, []

    def call(self, method: str, **args):
        if method == "start":
            self.batches.append(args["batch"])
        return {
            "state_bytes": self.state,
            "run": {"seconds": [self.ms * self.batches[-1] / 1000] if self.batches else []},
        }.get(method)


def test_hybrid_steps_run_one_engine_after_another(run, monkeypatch):
    made = {}

    def start(wanted):
        ((name, _),) = wanted.items()
        tree = name.startswith("tree")
        made[name] = Engine(9.0 if tree else 10.0, QWEN36_27B.state_bytes * (1 if tree else 16))
        return [made[name]]

    monkeypatch.setattr(run, "start", start)
    hybrid.steps(run)
    assert list(made) == ["chain k=15", "tree B=15", "tree B=31", "tree B=63"]
    rows = {row.key[1:]: row for row in run.results.rows if row.work == "step, chain k=15"}
    assert rows[1, 512, 15].ratio == pytest.approx(0.9) and rows[1, 512, 15].verdict == "pass"
    assert rows[8, 512, 15].verdict == "pass" and rows[8, 512, 15].tree_ms == pytest.approx(72)
    states = [row for row in run.results.rows if row.work.startswith("states of a request")]
    assert [(row.B, row.ratio, row.verdict) for row in states] == [
        (15, 1, "pass"),
        (31, 1, "pass"),
        (63, 1, "pass"),
    ]


def test_hybrid_kernels_are_held_against_their_bars(run, monkeypatch):
    found = {"compare": {"values": 9, "differ": 2, "most": 1e-7}, "commit": [0.1, 0.5, 0.9]}
    ms = {"conv": 0.1, "delta rule": 0.6, "verify": 0.7}
    child = type("Child", (), {"call": lambda self, m, **args: found.get(m, ms)})()
    monkeypatch.setattr(run, "start", lambda wanted: [child])
    hybrid.kernels(run)
    verdicts = {row.key: row.verdict for row in run.results.rows if row.verdict}
    assert verdicts == {
        ("committed states that differ from decoding", None, None, 31): "miss",
        ("verify, 48 layers", 1, None, 31): "pass",
        ("commit of 8 rows, 48 layers", 1, None, None): "miss",
        ("commit of 8 rows, 48 layers", 8, None, None): "pass",
        ("commit of 16 rows, 48 layers", 1, None, None): "miss",
        ("commit of 16 rows, 48 layers", 8, None, None): "miss",
    }
