"""DFlash2 drafters: trees of the positions' own distributions, verified like any other."""

from unittest import mock

import pytest
import torch

import tiny_models
from conftest import MODE, counters, engine, generate, prompts
from lossless import assert_accepted, assert_same, sampling
from planting import Planter, eager_drafter, planting

pytestmark = pytest.mark.exact
NUM_NODES, DEPTH, NUM_TOKENS, TOP_K = 16, 7, 64, 5
SETTINGS = {
    "conv_kernel_size": 3,
    "conv_group_size": 16,
    "selector_rank": 8,
    "selector_top_k": TOP_K,
    "input_embedding_scale": 1.5,
    # Sharp enough for trees that are deep and wide.
    "output_multiplier": 3.0,
    "final_logit_softcapping": 10.0,
}


@pytest.fixture(scope="module")
def drafter(models):
    folder = models.folder / "dflash2"
    return str(
        tiny_models.make_drafter(folder, DEPTH + 1, head_dim=MODE.head_dim, dflash2=SETTINGS)
    )


@pytest.mark.feature("DFlash2 drafters")
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_planted_trees_are_lossless(models, truths, drafter, temperature):
    ids, truth = prompts(), truths("qwen3", temperature)
    planter = Planter({tuple(p): t for p, t in zip(ids, truth)})
    with (
        planting(planter, run_drafter=True),
        engine(models.target(), drafter, num_tokens=NUM_NODES) as llm,
    ):
        planter.planted.clear()
        outputs = generate(llm, ids, sampling(temperature, NUM_TOKENS, len(ids)))
        assert_accepted(planter, counters(llm))
    assert_same(outputs, truth.cut(NUM_TOKENS))


def test_trees_hold_the_drafters_candidates(models, truths, drafter):
    """What the selector is offered for a chain is what each level's likeliest nodes hold."""
    from vllm.v1.worker.gpu.spec_decode.ddtree.speculator import DDTreeSpeculator

    run_model, generate_draft = DDTreeSpeculator._run_model, DDTreeSpeculator._generate_draft
    seen = []

    def run(self, *args):
        self.hidden = run_model(self, *args)
        return self.hidden

    def generate_and_note(self, num_reqs, *args, **kwargs):
        generate_draft(self, num_reqs, *args, **kwargs)
        # As DFlash2Speculator has them.
        rows = self.sample_indices[: num_reqs * DEPTH]
        candidates, scores = self.model.compute_candidates(self.hidden[rows])
        # Its convolutions see a request as bonus token and masks, not as a tree.
        assert self.model.model.layers[0].attention_conv.block_size == 1 + DEPTH
        for req, slot in enumerate(self.sample_idx_mapping[: len(rows) : DEPTH].tolist()):
            if slot >= 0:
                levels = slice(req * DEPTH, (req + 1) * DEPTH)
                tokens = self.node_tokens[req, : self.draft_tree.num_nodes[slot]]
                depths = self.draft_tree.depth[slot, 1 : 1 + len(tokens)]
                seen.append((candidates[levels], scores[levels], tokens.clone(), depths.clone()))

    ids, truth = prompts()[:4], truths("qwen3", 0.0)
    with (
        eager_drafter(),
        mock.patch.object(DDTreeSpeculator, "_run_model", run),
        mock.patch.object(DDTreeSpeculator, "_generate_draft", generate_and_note),
        engine(
            models.target(),
            drafter,
            # The spine and others, nowhere more than the selector is offered.
            num_tokens=DEPTH + TOP_K - 1,
            speculative_config={"draft_tree_policy": "spine"},
        ) as llm,
    ):
        seen.clear()
        outputs = generate(llm, ids, sampling(0.0, 16, len(ids)))
    assert_same(outputs, truth.of(*range(len(ids))).cut(16))
    assert len(seen) > 16
    siblings = 0
    for candidates, scores, tokens, depths in seen:
        for level, (offered, score) in enumerate(zip(candidates.tolist(), scores), 1):
            found = set(tokens[depths == level].tolist())
            assert found == set(offered[: len(found)])
            assert torch.equal(score, score.sort(descending=True).values)
            siblings += len(found) > 1
    assert siblings >= len(seen)
