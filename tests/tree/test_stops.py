"""Whatever ends a request ends it at the same token with trees."""

import pytest

from conftest import engine, generate, prompts
from planting import Planter, planting

pytestmark = pytest.mark.exact
LENGTHS = (5, 33, 64)
DEPTH, NUM_NODES = 7, 16


def params(**options):
    from vllm import SamplingParams

    return SamplingParams(temperature=0.0, **({"ignore_eos": True, "detokenize": False} | options))


@pytest.fixture(scope="module")
def ids():
    return prompts(LENGTHS)


@pytest.fixture(scope="module")
def target(models):
    return models.target("qwen3")


@pytest.fixture(scope="module")
def truth(target, ids):
    with engine(target) as llm:
        return generate(llm, ids, params(max_tokens=64))


@pytest.fixture(scope="module")
def stop_strings(target, truth, ids):
    """Stop strings at every position, and where the engine stops without speculation.

    One engine at a time: this one is gone before the planted one starts.
    """
    inputs = [{"prompt_token_ids": p} for p in ids]
    stops = []
    with engine(target) as llm:
        tokenizer = llm.get_tokenizer()
        for position in range(1, 18):
            texts = [tokenizer.decode(t[position : position + 2]) for t in truth]
            stops.append(
                [params(max_tokens=40, detokenize=True, stop=[s] if s else None) for s in texts]
            )
        expected = [[o.outputs[0] for o in llm.generate(inputs, s, use_tqdm=False)] for s in stops]
    return stops, expected


@pytest.fixture(scope="module")
def planted(models, target, truth, ids, stop_strings):
    planter = Planter({tuple(p): t for p, t in zip(ids, truth)})
    with planting(planter), engine(target, models.drafter(DEPTH), num_tokens=NUM_NODES) as llm:
        yield llm


@pytest.mark.parametrize("position", range(0, 20))
def test_stop_token_at_every_path_position(planted, truth, ids, position):
    """Steps of up to 8 tokens start anywhere, so a stop falls on every row of a path."""
    outputs = generate(
        planted, ids, [params(max_tokens=40, stop_token_ids=[t[position]]) for t in truth]
    )
    assert outputs == [t[: t.index(t[position]) + 1] for t in truth]


@pytest.mark.parametrize("max_tokens", range(1, 20))
def test_max_tokens_at_every_offset(planted, truth, ids, max_tokens):
    outputs = generate(planted, ids, params(max_tokens=max_tokens))
    assert outputs == [t[:max_tokens] for t in truth]


@pytest.mark.feature("stop strings and tokens")
def test_stop_string_at_every_path_position(planted, stop_strings, ids):
    """The text up to a stop string is the same as without speculation."""
    inputs = [{"prompt_token_ids": p} for p in ids]
    for stop, wanted in zip(*stop_strings):
        outputs = [o.outputs[0] for o in planted.generate(inputs, stop, use_tqdm=False)]
        assert [(o.text, o.token_ids, o.stop_reason) for o in outputs] == [
            (w.text, w.token_ids, w.stop_reason) for w in wanted
        ]
    assert any(w.stop_reason for wanted in stop_strings[1] for w in wanted)


def test_max_model_len_at_every_offset(models, target, truth, ids):
    """The tree shrinks to what fits; the last token is the one that fills the context."""
    planter = Planter({tuple(p): t for p, t in zip(ids, truth)})
    longest = 64 + 20
    with planting(planter):
        options = dict(num_tokens=NUM_NODES, max_model_len=longest)
        with engine(target, models.drafter(DEPTH), **options) as llm:
            for offset in range(12):
                prompt, expected = ids[2], truth[2]
                # A longer prompt ends earlier: each offset cuts a step elsewhere.
                prompt = prompt + expected[:offset]
                planter.continuations[tuple(prompt)] = expected[offset:]
                outputs = generate(llm, [prompt], params(max_tokens=None))
                assert outputs == [expected[offset : longest - len(ids[2])]]
