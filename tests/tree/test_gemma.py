"""Sliding windows: Gemma 3, where five of six layers look back 512 tokens only.

Paths cross the window's edge and block borders; a layer has to hide keys by a row's depth,
not by its place in the sequence. Of the vocabulary the model keeps the first tokens, among
them the most frequent ones: the interpreter takes a second for a row of all 262144.
"""

import os
import random

import pytest

from conftest import counting, engine
from planting import Planter, planting
from tiny_models import make_drafter

pytestmark = pytest.mark.exact
VOCAB, HIDDEN, LAYERS = 1024, 640, 18
BOS, FIRST_WORD = 2, 494
NUM_TOKENS = 64
DEPTH = 15
# Before the window's edge, at it and beyond; two get across it and across block borders.
LENGTHS = (40, 500, 511, 530, 700)


@pytest.fixture(scope="module")
def gemma() -> str:
    folder = os.environ.get("DDTREE_GEMMA")
    if not folder:
        pytest.skip(os.environ.get("DDTREE_GEMMA_MISSING", "DDTREE_GEMMA is not set"))
    register()
    return folder


@pytest.fixture(scope="module")
def drafter(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("models") / "gemma-drafter"
    make_drafter(
        folder,
        DEPTH + 1,
        hidden=HIDDEN,
        head_dim=128,  # with 2 heads a page as large as the target's
        vocab=VOCAB,
        target_layers=LAYERS,
        target_layer_ids=[1, 8, 16],
        mask_token_id=4,
    )
    return str(folder)


def register():
    """Make vLLM's Gemma 3 cut its vocabulary and hand out its layers' states.

    Upstream's class does not do the latter, so that no drafter can follow it.
    """
    from vllm import ModelRegistry
    from vllm.model_executor.models.gemma3 import Gemma3ForCausalLM
    from vllm.model_executor.models.interfaces import SupportsEagle3

    class Gemma3WithStates(Gemma3ForCausalLM, SupportsEagle3):
        def set_aux_hidden_state_layers(self, layers):
            self.states = []
            for layer in layers:  # the input of one is the output of the one before
                self.model.layers[layer - 1].register_forward_hook(
                    lambda module, inputs, output: self.states.append(sum(output))
                )

        def load_weights(self, weights):
            return super().load_weights(
                (name, weight[:VOCAB] if "embed_tokens" in name else weight)
                for name, weight in weights
            )

        def forward(self, *args, **kwargs):
            if not hasattr(self, "states"):
                return super().forward(*args, **kwargs)
            self.states.clear()
            return super().forward(*args, **kwargs), list(self.states)

    ModelRegistry.register_model("Gemma3ForCausalLM", Gemma3WithStates)


def prompts() -> dict[int, list[int]]:
    rng = random.Random(0)
    return {n: [BOS, *rng.choices(range(FIRST_WORD, VOCAB), k=n - 1)] for n in LENGTHS}


def params(index: int, num_tokens: int = NUM_TOKENS):
    """Greedy and sampled in turn: only the latter is sure not to fall into a loop."""
    from vllm import SamplingParams

    return SamplingParams(
        temperature=float(index % 2),
        seed=index if index % 2 else None,
        max_tokens=num_tokens,
        logprobs=0,
        ignore_eos=True,
        detokenize=False,
    )


def gemma_engine(*models, **options):
    return engine(
        *models,
        hf_overrides={"vocab_size": VOCAB},
        max_num_seqs=4,
        max_num_batched_tokens=1024,
        kv_cache_memory_bytes=256 << 20,
        skip_tokenizer_init=True,
        **options,
    )


def run(llm, which: list[int], num_tokens: int = NUM_TOKENS) -> dict[int, list[tuple[int, float]]]:
    """Tokens and their logprobs, by length of the prompt."""
    ids = prompts()
    inputs = [{"prompt_token_ids": ids[n]} for n in which]
    tuned = [params(LENGTHS.index(n), num_tokens) for n in which]
    outputs = [o.outputs[0] for o in llm.generate(inputs, tuned, use_tqdm=False)]
    return {
        n: [(t, at[t].logprob) for t, at in zip(o.token_ids, o.logprobs, strict=True)]
        for n, o in zip(which, outputs)
    }


@pytest.fixture(scope="module")
def truth(gemma):
    """What the engine emits without speculation."""
    with gemma_engine(gemma) as llm:
        return run(llm, list(LENGTHS))


def assert_same(got, truth):
    """A few keys too many or too few change a logprob long before they change a token."""
    for length, answer in got.items():
        want = truth[length][: len(answer)]
        assert [t for t, _ in answer] == [t for t, _ in want], length
        far = max(abs(a - b) for (_, a), (_, b) in zip(answer, want))
        assert far < 3e-4, (length, far)  # 1e-5 is noise; one key too few makes 4e-3


@pytest.mark.parametrize(
    "num_nodes, drafted, planted",
    [(31, [40], [511, 530]), (63, [], [500, 700])],
)
def test_trees_equal_no_speculation(gemma, drafter, truth, num_nodes, drafted, planted):
    """The random drafter's own trees, of which nothing is accepted; then deep sideways accepts."""
    ids = prompts()
    planter = Planter(
        {tuple(ids[n]): [t for t, _ in truth[n]] for n in planted}, seed=num_nodes, vocab=VOCAB
    )
    plant, planter.plant = planter.plant, lambda *args: None
    with (
        planting(planter, run_drafter=True),
        gemma_engine(gemma, drafter, num_tokens=num_nodes) as llm,
    ):
        if drafted:
            assert_same(run(llm, drafted, 16), truth)
        planter.plant = plant
        with counting(llm) as spec:
            assert_same(run(llm, planted), truth)
    mean = sum(planter.planted) / len(planter.planted)
    assert spec["accepted_tokens"] / spec["drafts"] > 0.8 * mean > 1.5
