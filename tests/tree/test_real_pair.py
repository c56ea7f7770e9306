"""What trees earn with a drafter that predicts, and that replaying it counts the same."""

import json

import pytest

import real_pair
from conftest import engine, generate, tokens_per_step

pytestmark = pytest.mark.exact
TOKENS = 40


def params():
    from vllm import SamplingParams

    return SamplingParams(temperature=0.0, max_tokens=TOKENS, detokenize=False)


def test_trees_beat_the_chain():
    target, drafter = str(real_pair.target()), str(real_pair.DRAFTER)
    ids = real_pair.own_prompts(8)
    with engine(target) as llm:
        truth = generate(llm, ids, params())
    rates = {}
    for method, num_tokens in (("dflash", 15), ("ddtree", 15), ("ddtree", 63)):
        with engine(target, drafter, method=method, num_tokens=num_tokens) as llm:
            assert generate(llm, ids, params()) == truth
            rates[method, num_tokens] = tokens_per_step(llm)
    chain = rates["dflash", 15]
    assert chain > 2.0
    assert rates["ddtree", 15] >= 1.20 * chain
    assert rates["ddtree", 63] >= 1.35 * chain


def test_replay_counts_what_the_engine_does(tmp_path):
    """REPORT.md replays steps; the engine takes the same ones."""
    import replay
    import torch
    from train_dflash import Drafter, Target

    target = real_pair.target()
    ids = real_pair.own_prompts(3)
    steps = {}
    for policy, num_nodes in (("best_first", 31), ("spine", 15)):
        trace = tmp_path / f"{policy}.jsonl"
        options = {"draft_tree_policy": policy, "draft_tree_trace": str(trace)}
        with engine(
            str(target), str(real_pair.DRAFTER), num_tokens=num_nodes, speculative_config=options
        ) as llm:
            texts = generate(llm, ids, params())
        steps[policy] = [json.loads(line) for line in trace.read_text().splitlines()[1:]]

    network = Target(target, "cpu", torch.float32)
    drafter = Drafter(network)
    drafter.load(real_pair.DRAFTER)
    answers = [replay.Answer("own", p, t) for p, t in zip(ids, texts)]
    replay.add_marginals(answers, network, drafter, lambda text: None)
    found = {
        "best_first": replay.tree(31, "best_first"),
        # The spine of 15 nodes is the chain.
        "spine": replay.chain(),
    }
    for policy, accepted in found.items():
        first = min(int(line["request"].partition("-")[0]) for line in steps[policy])
        assert {line["step"] for line in steps[policy]} > {0, 1, 2}
        for line in steps[policy]:
            # Requests are numbered in the order of the prompts.
            answer = answers[int(line["request"].partition("-")[0]) - first]
            at = line["position"] - len(answer.prompt)
            left = len(answer.text) - at - 1
            if left < 0:  # Was under way when the step before it ended the answer.
                continue
            assert min(len(line["accepted"]), left) == accepted(answer, at)
