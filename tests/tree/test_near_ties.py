"""What the comparison of outputs accepts where rounding may change a token, and what not."""

import pytest

import lossless
from lossless import Answers, assert_same
from planting import Planter

NEAR, FAR = lossless.NEAR_TIE * 0.9, lossless.NEAR_TIE * 1.1


def answers(margin: float, prompts: int = 4, length: int = 50, exact: bool = False) -> Answers:
    """Token 1 everywhere, and token 2 less likely by `margin`."""
    likely = [{1: -1.0, 2: -1.0 - margin} for _ in range(length)]
    return Answers([[1] * length] * prompts, [likely] * prompts, exact)


def changed(at: int, token: int = 2, prompts: int = 4, length: int = 50) -> list[list[int]]:
    """Outputs of which the first has another text from a token on."""
    return [[1] * at + [token] + [7] * (length - at - 1)] + [[1] * length] * (prompts - 1)


def test_a_near_tie_may_change_places():
    assert_same(changed(20), answers(NEAR))
    # What follows is another text and is not looked at.
    assert lossless.differences(changed(20), answers(0.1)) == ([pytest.approx(0.1)], 21 + 150)


@pytest.mark.parametrize("output, margin", [(changed(20), FAR), (changed(20, token=3), NEAR)])
def test_another_token_may_not(output, margin):
    with pytest.raises(AssertionError, match="1 first differences in 171 tokens"):
        assert_same(output, answers(margin))


def test_near_ties_are_rare():
    every = [[1] * 5 + [2] * 45] * 4
    with pytest.raises(AssertionError, match="4 first differences in 24 tokens"):
        assert_same(every, answers(NEAR))
    # Nothing is known of sampled ones but how many there are.
    sampled = Answers(list(answers(NEAR)), [None] * 4, exact=False)
    assert_same(changed(20, token=3), sampled)
    with pytest.raises(AssertionError, match="4 first differences"):
        assert_same(every, sampled)


def test_every_token_is_compared_in_rounds(monkeypatch):
    """Two prompts of other tokens; one text has two near-ties, the other parts at its end."""
    wanted = Answers([[1] * 50] * 2, answers(0.1).likely[:2], exact=False)
    wrong = {3: {7: 2, 20: 2}, 4: {49: 5}}
    planter = Planter({})

    def generate(llm, asked, params, name):
        outputs = []
        for prompt, p in zip(asked, params, strict=True):
            begin = len(prompt) - 1
            # What is planted is the answer's, whatever was emitted before.
            assert planter.continuations[tuple(prompt)] == [1] * p.max_tokens
            assert prompt == [prompt[0], *[1] * begin]
            here = [wrong[prompt[0]].get(begin + j, 1) for j in range(p.max_tokens)]
            parted = next((j for j, t in enumerate(here) if t != 1), len(here))
            outputs.append(here[: parted + 1] + [9] * (len(here) - parted - 1))
        assert name == ["ab"[prompt[0] - 3] for prompt in asked]
        return outputs

    monkeypatch.setattr(lossless, "generate", generate)
    margins = lossless.differences_in_rounds(None, planter, [[3], [4]], wanted, name=["a", "b"])
    assert sorted(margins)[:2] == [pytest.approx(0.1)] * 2
    assert len(margins) == 3 and max(margins) > 1e8


def test_lengths_and_exact_modes_leave_no_room():
    with pytest.raises(AssertionError):
        assert_same([[1] * 49] * 4, answers(NEAR))
    assert_same([[1] * 50] * 4, answers(NEAR, exact=True))
    with pytest.raises(AssertionError):
        assert_same(changed(20), answers(NEAR, exact=True))
