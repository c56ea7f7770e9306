"""Sampling features give with trees what they give without speculation.

Their history is a row's ancestors (test_history.py), grammars are walked over the tree
(test_grammars.py).
"""

import math

import pytest
from safetensors import safe_open

from conftest import counters, engine, inputs, prompts
from planting import Planter, planting

pytestmark = pytest.mark.exact
DEPTH, NUM_NODES = 7, 16
NUM_TOKENS = 40


def params(**options):
    from vllm import SamplingParams

    return SamplingParams(
        **(
            {"temperature": 0.0, "max_tokens": NUM_TOKENS, "ignore_eos": True, "detokenize": False}
            | options
        )
    )


def grammar(**options):
    from vllm.sampling_params import StructuredOutputsParams

    return params(structured_outputs=StructuredOutputsParams(**options))


def requests() -> dict[str, object]:
    return {
        "plain": params(),
        "sampled": params(temperature=1.0, seed=7),
        "top-k": params(temperature=1.0, seed=8, top_k=5),
        "top-p": params(temperature=0.8, seed=9, top_p=0.7),
        "presence": params(presence_penalty=1.5),
        "frequency": params(frequency_penalty=0.7, temperature=1.0, seed=11),
        "repetition": params(repetition_penalty=1.4),
        "bad words": params(bad_words=["a", "b", "ab", "cd"], temperature=1.0, seed=12),
        "min tokens": params(min_tokens=20, stop_token_ids=list(range(3, 100)), max_tokens=30),
        "allowed tokens": params(
            allowed_token_ids=[5, 9, 33, 80, 144, 300], temperature=2.0, seed=13
        ),
        "regex": grammar(regex="([a-f]{2}[0-9]){12}"),
        "choice": grammar(choice=["abcdefgh", "abcdabcd", "hgfedcba"]),
        "json": grammar(
            json={"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
        ),
    }


def run(target, drafter, requests, ids, planter=None, **options):
    tuned = list(requests.values())
    with engine(target, drafter, num_tokens=NUM_NODES, max_num_seqs=16, **options) as llm:
        outputs = [o.outputs[0] for o in llm.generate(inputs(ids), tuned, use_tqdm=False)]
        return outputs, (counters(llm) if drafter else None)


@pytest.mark.feature("greedy and seeded sampling, top-k, top-p", "min_tokens")
def test_features_in_one_batch(models):
    """Every feature at once: trees and spines of different requests in one step."""
    target, tuned = models.target("qwen3"), requests()
    ids = prompts([9 + 5 * i for i in range(len(tuned))])
    expected, _ = run(target, None, tuned, ids)
    truth = {tuple(p): list(o.token_ids) for p, o in zip(ids, expected)}
    with planting(Planter(truth)):
        outputs, spec = run(target, models.drafter(DEPTH), tuned, ids)
    for name, output, wanted in zip(tuned, outputs, expected):
        assert (name, list(output.token_ids)) == (name, list(wanted.token_ids))
    assert spec["accepted_tokens"] > spec["drafts"]


def test_features_keep_their_trees(models):
    """No request is given the spine of its tree alone, without a word."""
    from vllm.v1.worker.gpu.spec_decode.ddtree.speculator import DDTreeSpeculator

    names = ["plain", "presence", "bad words", "regex", "top-p"]
    tuned = {n: requests()[n] for n in names}
    ids = prompts([9 + 5 * i for i in range(len(tuned))])
    shapes: dict[str, list[bool]] = {n: [] for n in names}
    propose = DDTreeSpeculator.propose

    def spy(self, input_batch, *args, **kwargs):
        tokens = propose(self, input_batch, *args, **kwargs)
        for slot, req_id in zip(input_batch.idx_mapping_np, input_batch.req_ids):
            if (index := req_id.split("-")[0]).isdigit() and int(index) < len(names):
                parents = self.draft_tree.parents[slot].tolist()
                live = int(self.draft_tree.num_nodes[slot])
                shapes[names[int(index)]].append(
                    parents == list(range(-1, NUM_NODES)) and live == DEPTH
                )
        return tokens

    DDTreeSpeculator.propose = spy
    try:
        run(models.target("qwen3"), models.drafter(DEPTH), tuned, ids)
    finally:
        DDTreeSpeculator.propose = propose
    assert {n: all(s) for n, s in shapes.items() if s} == {
        "plain": False,
        "presence": False,
        "bad words": False,
        "regex": False,
        "top-p": False,
    }


@pytest.mark.feature("logprobs and prompt_logprobs, raw and processed")
@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
def test_logprobs_follow_the_path(models, mode):
    """Of the accepted rows, wherever in the tree they stand."""
    target = models.target("llama")
    tuned = {
        "greedy": params(logprobs=5, prompt_logprobs=2),
        "sampled": params(logprobs=3, temperature=1.0, seed=3, top_k=20),
        "allowed": params(logprobs=0, allowed_token_ids=[5, 9, 33, 80]),
        "none": params(),
    }
    ids = prompts((12, 40, 33, 20))
    expected, _ = run(target, None, tuned, ids, logprobs_mode=mode)
    truth = {tuple(p): list(o.token_ids) for p, o in zip(ids, expected)}
    with planting(Planter(truth)):
        outputs, spec = run(target, models.drafter(DEPTH), tuned, ids, logprobs_mode=mode)
    assert spec["accepted_tokens"] > spec["drafts"]
    for output, wanted in zip(outputs, expected):
        assert list(output.token_ids) == list(wanted.token_ids)
        assert (output.logprobs is None) == (wanted.logprobs is None)
        for got, want in zip(output.logprobs or [], wanted.logprobs or [], strict=True):
            assert got.keys() == want.keys()
            for token in want:
                assert math.isclose(got[token].logprob, want[token].logprob, abs_tol=1e-3)
                assert got[token].rank == want[token].rank


@pytest.mark.feature("prompt embeddings")
def test_prompts_may_be_embeddings(models):
    """They have no tokens: what a tree continues is known by its place alone."""
    target = models.target("qwen3")
    with safe_open(f"{target}/model.safetensors", "pt") as checkpoint:
        table = checkpoint.get_tensor("model.embed_tokens.weight")
    ids = prompts((12, 40, 33))
    tuned = {"greedy": params(), "sampled": params(temperature=1.0, seed=3), "again": params()}
    expected, _ = run(target, None, tuned, ids)
    truth = {(0,) * len(p): list(o.token_ids) for p, o in zip(ids, expected)}
    # The second as tokens, beside them.
    truth[tuple(ids[1])] = truth.pop((0,) * len(ids[1]))
    asked = [{"prompt_embeds": table[p]} for p in ids]
    asked[1] = {"prompt_token_ids": ids[1]}
    with planting(Planter(truth)):
        options = dict(enable_prompt_embeds=True)
        outputs, spec = run(target, models.drafter(DEPTH), tuned, asked, **options)
    assert [list(o.token_ids) for o in outputs] == [list(o.token_ids) for o in expected]
    assert spec["accepted_tokens"] > spec["drafts"]
