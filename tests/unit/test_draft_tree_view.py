"""Draft trees in a terminal: traces read and refused, trees drawn, folded and picked."""

from __future__ import annotations

import io
import json
import math
import re
from dataclasses import replace

import pytest
from rich.console import Console

import draft_tree_sample as sample
from draft_tree_view import (
    Generation,
    Step,
    TraceError,
    percent,
    pick_step,
    read_trace,
    render_tree,
    token_text,
    visible,
)

#       0
#     1   2
#    3 4  5
#    6
SMALL = Step(
    "0",
    0,
    40,
    0,
    (1, 2, 3, 4, 5, 6),
    (0, 0, 1, 1, 2, 3),
    (-0.2, -1.8, -0.1, -3, -0.1, -0.3),
    (2, 5),
    9,
)
TEXTS = ["root", " one", " two", " three", " four", " five", " six", "[bold]", "\n", " end"]


def decode(tokens: list[int]) -> str:
    return "".join(TEXTS[t] for t in tokens)


def printed(text, width: int = 80, **options) -> str:
    """What a console writes."""
    out = io.StringIO()
    Console(file=out, width=width, **options).print(text)
    return out.getvalue()


@pytest.fixture(scope="module")
def words() -> sample.Words:
    return sample.Words()


@pytest.fixture
def trace(words, tmp_path):
    return read_trace(sample.write(tmp_path / "trace.jsonl", sample.records(words)))


def test_a_trace_gives_back_the_answers(trace, words):
    assert list(trace.requests) == ["0", "1", "2"]
    assert (trace.header.num_nodes, trace.header.policy) == (63, "best_first")
    for question, answer, steps in zip(sample.QUESTIONS, sample.ANSWERS, trace.requests.values()):
        generation = Generation(question, steps)
        assert words.decode(generation.tokens) == answer
        assert generation.tokens_per_step == (len(generation.tokens) - 1) / len(steps)


def step_line(**changes) -> dict:
    fields = dict(request="0", step=0, position=4, root=0, tokens=[1, 2], parents=[0, 1])
    return fields | dict(logprobs=[-0.1, -0.2], accepted=[1, 2], bonus=3) | changes


@pytest.mark.parametrize(
    "line, what",
    [
        ("{", "not JSON"),
        ("", "not JSON"),
        ("[]", "not a JSON object"),
        ({k: v for k, v in step_line().items() if k != "bonus"}, "no 'bonus'"),
        (step_line(root="x"), "'root' is 'x'"),
        (step_line(root=True), "'root' is True"),
        (step_line(request=0), "'request' is 0"),
        (step_line(tokens=[1, None]), "'tokens' holds None"),
        (step_line(parents=[0]), "2 tokens, 1 parents and 2 logprobs"),
        (step_line(parents=[0, 2]), "row 2 has parent 2"),
        (step_line(parents=[-1, 0]), "row 1 has parent -1"),
        (step_line(logprobs=[-0.1, 0.5]), "row 2 has log-probability 0.5"),
        (step_line(logprobs=[math.nan, -1]), "row 1 has log-probability nan"),
        (step_line(accepted=[3]), "accepted row 3 is not one of 2"),
        (step_line(accepted=[0]), "accepted row 0 is not one of 2"),
        (step_line(accepted=[2]), "accepted row 2 does not hang under row 0"),
        (
            step_line(tokens=[1] * 5, parents=[0] * 5, logprobs=[-1] * 5),
            "5 nodes, but the header says 4",
        ),
        (step_line(step=-1), "step -1 of request 0 after step -1"),
        (step_line(step=1, root=8), "root 8 is not the last step's bonus token 3"),
    ],
)
def test_a_malformed_line_is_named(tmp_path, line, what):
    text = line if isinstance(line, str) else json.dumps(line)
    good = json.dumps(step_line(step=-1))
    path = tmp_path / "bad.jsonl"
    path.write_text(f"{json.dumps(sample.header(4))}\n{good}\n{text}\n")
    with pytest.raises(TraceError, match=re.escape(f"bad.jsonl, line 3: {what}")):
        read_trace(path)


@pytest.mark.parametrize(
    "text, line", [("", 1), ('{"ddtree_trace": 2}\n', 1), (json.dumps(step_line()), 1)]
)
def test_no_header(tmp_path, text, line):
    path = tmp_path / "bad.jsonl"
    path.write_text(text)
    with pytest.raises(TraceError, match=f"line {line}: .*header"):
        read_trace(path)


def test_a_spine_may_hold_tokens_of_probability_zero(tmp_path):
    path = sample.write(tmp_path / "t", [sample.header(), step_line(logprobs=[-math.inf, 1e-7])])
    (step,) = read_trace(path).requests["0"]
    assert step.logprobs == (-math.inf, 0.0)
    # As the engine writes it.
    path = sample.write(tmp_path / "t", [sample.header(), step_line(logprobs=[None, 1e-7])])
    (again,) = read_trace(path).requests.values()
    assert again == [step]
    assert "one <1%" in printed(render_tree(step, decode))


def test_the_whole_of_a_small_tree():
    assert printed(render_tree(SMALL, decode)) == (
        "● root  root\n"
        "├── ␣one 82%\n"
        "│   ├── ␣three 90% → ␣six 74%\n"
        "│   └── ␣four 5%\n"
        "✔ ␣two 17%  ← side branch: a chain stops above\n"
        "✔ ␣five 90%\n"
        "★ ␣end  bonus: the target's own token\n"
    )


def test_accepted_path_is_green_and_bonus_another_colour():
    seen = printed(render_tree(SMALL, decode), color_system="standard", force_terminal=True)
    green = "".join(re.findall(r"\x1b\[1;32m(.*?)\x1b\[0m", seen))
    assert "two" in green and "five" in green
    assert "one" not in green and "end" not in green
    assert re.search(r"\x1b\[1;35m[^\x1b]*end", seen)


def test_nothing_accepted():
    seen = printed(render_tree(replace(SMALL, accepted=()), decode, lines=2)).splitlines()
    assert seen == ["● root  root … 6 more nodes", "★ ␣end  bonus: the target's own token"]


def test_no_nodes_at_all():
    step = Step("0", 0, 1, 0, (), (), (), (), 9)
    assert printed(render_tree(step, decode)).splitlines()[0] == "● root  root"


def test_markup_and_newlines_of_tokens_are_shown_as_they_are():
    step = replace(SMALL, tokens=(7, 8, 3, 4, 7, 6))
    seen = printed(render_tree(step, decode))
    assert "├── [bold] 82%" in seen and "✔ ⏎ 17%" in seen and "✔ [bold] 90%" in seen
    assert len(seen.splitlines()) == 7


@pytest.mark.parametrize(
    "text, seen",
    [
        (" of", "␣of"),
        ("\n\n", "⏎⏎"),
        ("\t", "⇥"),
        ("", "∅"),
        ("\x1b[1m", "\\x1b[1m"),
        ("\u202e", "\\u202e"),
        ("语", "语"),
    ],
)
def test_visible(text, seen):
    assert visible(text) == seen


def test_percent_claims_no_certainty():
    assert [percent(math.log(p)) for p in (1.0, 0.996, 0.61, 0.006, 0.001)] == [
        ">99%",
        ">99%",
        "61%",
        "1%",
        "<1%",
    ]


def test_a_leading_blank_that_the_tokenizer_drops_is_found():
    def stripping(tokens):
        return decode(tokens).lstrip()

    assert token_text(1, 0, stripping) == " one"
    assert token_text(1, None, stripping) == "one"


def nodes_in(lines: list[str]) -> int:
    """Nodes drawn and nodes counted."""
    drawn = sum(len(re.findall(r" (?:[<>]?\d+%)(?= |$)", line)) for line in lines)
    return drawn + sum(int(n) for n in re.findall(r"… (\d+) more nodes?", "\n".join(lines)))


@pytest.mark.parametrize("width, lines", [(80, 40), (80, 20), (60, 12), (120, 400)])
def test_big_trees_are_folded_and_no_node_is_lost(trace, words, width, lines):
    for steps in trace.requests.values():
        for step in steps:
            seen = printed(
                render_tree(step, words.decode, width=width, lines=lines), width
            ).splitlines()
            assert all(len(line) <= width for line in seen)
            # The accepted path is never folded.
            assert len(seen) <= max(lines, len(step.accepted) + 2)
            ticks = [line.split()[1] for line in seen if line.startswith("✔")]
            assert ticks == [
                visible(words.texts[step.tokens[row - 1]])[:24] for row in step.accepted
            ]
            assert seen[-1].startswith("★ " + visible(words.texts[step.bonus])[:20])
            assert nodes_in(seen) == len(step.tokens)


def test_branches_of_branches_stay_within_the_margin():
    """Two children everywhere: nothing joins, so that every level costs indentation."""
    parents = tuple(max(0, row - 2 + row % 2) for row in range(41))
    step = Step("0", 0, 1, 0, (1, 2) * 20 + (1,), parents, (-0.7,) * 41, (), 9)
    seen = printed(render_tree(step, decode, lines=400)).splitlines()
    assert max(map(len, seen)) <= 80 and nodes_in(seen) == 41
    assert max(line.count("│") + line.count("    ") for line in seen) > 8


def test_the_least_probable_are_folded_first():
    seen = printed(render_tree(SMALL, decode, lines=5))
    assert "├── ␣one 82% → ␣three 90% → ␣six 74% … 1 more node\n" in seen and "four" not in seen


def test_pick_prefers_a_side_branch_to_a_longer_chain():
    chain = replace(SMALL, accepted=(1, 3, 6))
    short = replace(SMALL, accepted=(2,))
    assert chain.on_chain == 3 and not chain.left_chain
    assert SMALL.on_chain == 0 and SMALL.left_chain
    assert pick_step([chain, short, SMALL]) is SMALL
    assert pick_step([replace(chain, accepted=(1,)), chain]) is chain
    with pytest.raises(ValueError):
        pick_step([])


def test_leaving_the_chain_midway():
    step = replace(SMALL, accepted=(1, 4))
    assert step.on_chain == 1
    assert printed(render_tree(step, decode)).count("side branch") == 1
    assert "✔ ␣four 5%  ← side branch" in printed(render_tree(step, decode))


def test_equal_probabilities_take_the_earlier_row():
    step = Step("0", 0, 1, 0, (1, 2), (0, 0), (-0.7, -0.7), (1,), 9)
    assert not step.left_chain and replace(step, accepted=(2,)).left_chain


def test_sample_leaves_the_chain(trace):
    """Otherwise the other tests see less than they should."""
    steps = [s for run in trace.requests.values() for s in run]
    assert any(s.left_chain for s in steps) and any(not s.accepted for s in steps)
