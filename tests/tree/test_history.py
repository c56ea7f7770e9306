"""Features that look at what a request has emitted, on whole trees.

Every row's history is its ancestors' tokens, not the rows' above it: the engine emits what it
emits without speculation while deep paths across the rows of a tree are accepted.
"""

import pytest
import torch

from conftest import engine, generate, prompts
from planting import Planter, planting
from test_features import DEPTH
from test_features import params as greedy

pytestmark = pytest.mark.exact
NUM_NODES, NUM_TOKENS = 12, 26


def params(**options):
    return greedy(**({"max_tokens": NUM_TOKENS} | options))


def encode(target: str, text: str = "a") -> list[int]:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(target).encode(text)


def run(target, drafter, requests, ids, **options):
    """Output tokens of each prompt."""
    with engine(target, drafter, num_tokens=NUM_NODES, max_num_seqs=16, **options) as llm:
        return generate(llm, ids, list(requests.values()))


def compare(models, requests, ids, spines=(), **options) -> dict[str, list[int]]:
    """Run `requests` with and without trees; those of `spines` may keep to a chain.

    Returns:
        output tokens by name.

    """
    target = models.target("qwen3")
    truth = dict(zip(requests, run(target, None, requests, ids, **options), strict=True))
    planter = Planter({tuple(p): t for p, t in zip(ids, truth.values())}, seed=1)
    # Other branches speak of the same things, or to read them would do no harm.
    emitted = sorted({t for tokens in truth.values() for t in tokens})
    planter.filler = lambda: planter.rng.choice(emitted[:12])
    with planting(planter):
        outputs = run(target, models.drafter(DEPTH), requests, ids, **options)
    assert dict(zip(requests, outputs)) == truth
    for name, prompt in zip(requests, ids):
        paths = planter.paths[tuple(prompt)]
        # A step may follow the last plant, never two; each emits a token beyond its accepts.
        accepted = len(truth[name]) - 1 - len(paths)
        spine = sum(sum(row == i for i, row in enumerate(path, 1)) for path in paths)
        print(f"{name}: {accepted} accepted in {len(paths)} steps, {spine} on spines")
        assert (spine == sum(map(len, paths))) == (name in spines), name
        # More than the spines of those trees can have given.
        assert accepted > (0 if name in spines else spine), name
    return truth


@pytest.mark.feature(
    "presence, frequency and repetition penalties",
    "bad words",
    "allowed_token_ids",
    "logit_bias and min_p",
    "thinking budgets",
)
def test_builtin_features(models):
    """Each alone, all together, greedy and sampled, beside plain requests in one batch."""
    from vllm.config.reasoning import ReasoningConfig

    target = models.target("qwen3")
    (start,), (end,) = encode(target), encode(target, "b")
    # Few tokens, for words and repetitions everywhere.
    few = [start, end, 5, 9, 33, 80]
    words = [[few[i] for i in word] for word in ((2, 3), (4, 2), (5, 5), (3, 2, 4))]
    everything = dict(
        presence_penalty=0.9,
        frequency_penalty=0.4,
        repetition_penalty=1.2,
        _bad_words_token_ids=words,
        thinking_token_budget=4,
        min_tokens=12,
        stop_token_ids=[9, 33, *range(100, 512, 4)],
    )
    sampled = dict(temperature=1.0, max_tokens=16)
    requests = {
        "plain": params(),
        "presence": params(presence_penalty=1.5),
        "frequency": params(frequency_penalty=0.7, allowed_token_ids=few),
        "repetition": params(repetition_penalty=1.4, allowed_token_ids=few),
        "bad words": params(_bad_words_token_ids=words, allowed_token_ids=few),
        "budget": params(thinking_token_budget=6, allowed_token_ids=few),
        "all": params(**everything),
        "bias": params(logit_bias={7: 4.0, 9: -5.0}, min_p=0.05, seed=5, **sampled),
        "all sampled": params(allowed_token_ids=few, **(everything | sampled), seed=7),
    }
    # Thinking starts with the last token of the prompt.
    ids = [p + [start] for p in prompts([9 + 5 * i for i in range(len(requests))])]
    config = ReasoningConfig(reasoning_start_str="a", reasoning_end_str="b")
    truth = compare(models, requests, ids, reasoning_config=config)
    assert end in truth["budget"] and len(truth["all"]) >= 12


@pytest.mark.feature("custom logits processors with supports_draft_tree")
@pytest.mark.feature(
    "custom logits processors without it", falls_back="they take the rows above one for its history"
)
def test_custom_processors(models):
    """One that follows parents gets trees; one that does not, a chain where it is asked for."""
    from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor

    class Processor(LogitsProcessor):
        def __init__(self, vllm_config, req_states):
            self.req_states = req_states
            self.asked = torch.zeros(req_states.max_num_reqs, dtype=torch.bool)

        def add_request(self, req_idx, sampling_params):
            asked = type(self).__name__ in (sampling_params.extra_args or {})
            self.asked[req_idx] = asked
            return asked

        def apply(self, logits, ctx):
            for row in range(len(logits)):
                slot, offset = int(ctx.expanded_idx_mapping[row]), int(ctx.expanded_local_pos[row])
                if self.asked[slot]:
                    length = int(self.req_states.total_len.gpu[slot])
                    known = self.req_states.all_token_ids.gpu[slot, :length].tolist()
                    tokens = ctx.input_ids[row - offset : row + 1].tolist()
                    logits[row, self.barred(ctx, slot, known, tokens)] = -torch.inf
            return logits

    class BarLastThree(Processor):
        def barred(self, ctx, slot, known, tokens):
            return (known + tokens[1:])[-3:]

    class BarGrandparents(Processor):
        supports_draft_tree = True

        def barred(self, ctx, slot, known, tokens):
            row, barred = len(tokens) - 1, []
            while row > 0:
                barred.insert(0, tokens[row])
                # Without drafts there are no parents to ask for.
                row = int(ctx.draft_parents[slot, row])
            return (known + barred)[-3:]

    requests = {
        "plain": params(),
        "tree": params(extra_args={"BarGrandparents": True}),
        "chain": params(extra_args={"BarLastThree": True}),
        "both": params(extra_args={"BarGrandparents": True, "BarLastThree": True}),
        "sampled": params(
            extra_args={"BarGrandparents": True}, presence_penalty=0.7, temperature=1.0, seed=2
        ),
    }
    truth = compare(
        models,
        requests,
        prompts([9 + 7 * i for i in range(len(requests))]),
        spines=("chain", "both"),
        logits_processors=[BarLastThree, BarGrandparents],
    )
    for name, tokens in truth.items():
        barred = [len(set(tokens[i : i + 4])) == 4 for i in range(len(tokens) - 3)]
        assert all(barred) == (name != "plain"), name
