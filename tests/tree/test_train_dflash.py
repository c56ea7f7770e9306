"""The parts of the drafter's trainer that a CPU can check."""

import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import tiny_models

sys.path.insert(0, str(Path(__file__).parents[1] / "models"))

import eval_prompts
import train_dflash


@pytest.fixture
def target(models, monkeypatch):
    monkeypatch.setattr(train_dflash, "FEATURE_LAYERS", (0, 1, 2))
    return train_dflash.Target(Path(models.target("llama")), "cpu", torch.float32)


def test_features_are_the_targets_hidden_states(models, target):
    from transformers import AutoModelForCausalLM

    tokens = torch.randint(3, tiny_models.VOCAB, (2, 20))
    model = AutoModelForCausalLM.from_pretrained(models.target("llama"), dtype=torch.float32)
    states = model(tokens, output_hidden_states=True).hidden_states
    expected = torch.cat([states[i + 1] for i in (0, 1, 2)], dim=-1)
    torch.testing.assert_close(target.features(tokens), expected, rtol=1e-4, atol=1e-4)


def test_loss_and_gradient_are_those_of_cross_entropy():
    torch.manual_seed(0)
    head, labels = torch.randn(50, 8), torch.randint(50, (30,))
    scale = torch.rand(30)
    hidden = torch.randn(30, 8, requires_grad=True)
    with torch.compiler.set_stance("force_eager"):
        loss = train_dflash._HeadLoss.apply(hidden, head, labels, scale)
    loss.backward()
    grad, hidden.grad = hidden.grad, None
    expected = (F.cross_entropy(hidden @ head.T, labels, reduction="none") * scale).sum()
    expected.backward()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(grad, hidden.grad, rtol=1e-4, atol=1e-4)


def test_a_block_sees_what_lies_before_its_anchor(target):
    torch.manual_seed(0)
    drafter = train_dflash.Drafter(target)
    tokens = torch.randint(3, tiny_models.VOCAB, (1, 60))
    anchors = torch.tensor([[10, 30]])
    changed = tokens.clone()
    changed[0, 20] += 1
    with torch.no_grad():
        before = drafter(tokens, target.features(tokens), anchors)
        after = drafter(changed, target.features(changed), anchors)
        alone = drafter(tokens, target.features(tokens), anchors[:, 1:])
        at_anchor = target.features(tokens)
        at_anchor[0, 30] += 1
        without = drafter(tokens, at_anchor, anchors)
    # The engine has no features of the anchor yet.
    assert torch.equal(without, before)
    assert torch.equal(before[0, 0], after[0, 0])
    assert not torch.allclose(before[0, 1], after[0, 1])
    torch.testing.assert_close(before[:, 1:], alone, rtol=1e-4, atol=1e-5)


def test_rows_are_written_as_the_target_would(target):
    """Prompts are said, then the target's greedy tokens; ended turns go to the other side."""
    torch.manual_seed(0)
    prompts = [[5, 6, 7], [8, 9, 10]]
    length = 40
    writer = train_dflash.Writer(target, 2, length, [p[1:] for p in prompts])
    writer.end = -1
    writer.tokens[:, 0] = torch.tensor([p[0] for p in prompts])
    writer.queue.copy_(torch.arange(2))
    writer.limits.fill_(length + 1)
    with torch.no_grad():
        for _ in range(length):
            writer.step(length)
    hidden = F.embedding(writer.tokens[:, :length], target.embedding)
    positions = torch.arange(length)
    for layer in range(target.layers):
        q, k, v = target.qkv(hidden, layer, positions)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        hidden = target.rest(hidden, attended, layer)
    best = (target.norm(hidden, "norm.weight") @ target.lm_head.T).argmax(-1)
    assert writer.tokens[:, :3].tolist() == prompts
    assert torch.equal(writer.tokens[:, 3:length], best[:, 2 : length - 1])
    assert writer.answer[:, :3].sum() == 0 and writer.answer[:, 3:].all()


@pytest.mark.parametrize("period, repeats", [(1, 30), (5, 10), (5, 3), (12, 3), (32, 4), (33, 4)])
def test_loops_are_found_alike(period, repeats):
    phrase = list(range(100, 100 + period))
    text = list(range(40)) + phrase * repeats + list(range(200, 240))
    # A phrase of a few tokens must fill 24 more tokens to count.
    looping = period <= 32 and period * (repeats - 1) >= max(2 * period, 24)
    assert eval_prompts.loops(text) == looping
    marked = train_dflash.in_loop(torch.tensor([text]))[0]
    assert marked.any() == looping
    assert not marked[:40].any() and not marked[-40:].any()


def test_chain_steps():
    text = [1, 2, 3, 4, 5, 6]
    drafts = [[2, 3, 9], [0, 0, 0], [0, 0, 0], [5, 6, 0], [6, 0, 0], [0, 0, 0]]
    # 2 3 and the bonus 4; then 5 6 would reach the text's end and is not counted.
    assert train_dflash.chain_steps(text, drafts) == (1, 3)
