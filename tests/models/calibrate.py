"""Calibrate a drafter's marginals: how likely a child is once its parent was accepted.

A marginal of depth d averages over everything that may come before it. Once the start of
a path was accepted, its continuation is another matter. Fitted are a few numbers that make
the candidates' scores, given that the path so far was right, as likely as they turn out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from replay import DEPTH, Answer, tree


@dataclass
class Calibration:
    """score = slope[d] * logprob + bonus[d] * (rank 0), normalised over the candidates.

    Attributes:
        slope: [DEPTH], 1 for the marginals as they are.
        bonus: [DEPTH], of the best candidate of each depth.

    """

    KINDS: ClassVar = {
        "slope by depth": (True, False),
        "best candidate by depth": (False, True),
        "slope and best candidate": (True, True),
    }

    slope: np.ndarray
    bonus: np.ndarray

    def __call__(self, logprobs: np.ndarray) -> np.ndarray:
        """float32 [DEPTH, k] log-probabilities to scores, still descending in k."""
        scores = logprobs * self.slope[:, None]
        scores[:, 0] += np.maximum(self.bonus, (scores[:, 1] - scores[:, 0]))
        top = scores.max(axis=1, keepdims=True)
        scores -= top + np.log(np.exp(scores - top).sum(axis=1, keepdims=True))
        return scores.astype(np.float32)

    def numbers(self) -> dict[str, list[float]]:
        return {"slope": self.slope.round(3).tolist(), "bonus": self.bonus.round(3).tolist()}


def fit(answers: list[Answer], kind: str, num_nodes: int = 63) -> Calibration:
    """Maximum likelihood over the places where a tree's path was right so far."""
    with_slope, with_bonus = Calibration.KINDS[kind]
    logprobs, ranks, depths = observed(answers, num_nodes)
    slope = torch.ones(DEPTH, requires_grad=with_slope)
    bonus = torch.zeros(DEPTH, requires_grad=with_bonus)
    free = [p for p in (slope, bonus) if p.requires_grad]
    first = torch.zeros(logprobs.shape[1])
    first[0] = 1.0
    optimizer = torch.optim.LBFGS(free, max_iter=100, line_search_fn="strong_wolfe")

    def closure():
        optimizer.zero_grad()
        scores = logprobs * slope[depths, None] + bonus[depths, None] * first
        loss = torch.nn.functional.cross_entropy(scores, ranks)
        # A little pull to the marginals as they are: deep places are rarely reached.
        loss = loss + 1e-4 * ((slope - 1).square().sum() + bonus.square().sum())
        loss.backward()
        return loss

    optimizer.step(closure)
    return Calibration(slope.detach().numpy(), bonus.detach().numpy())


def observed(
    answers: list[Answer], num_nodes: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Candidates' log-probabilities [M, k], the true one's rank [M] and depth - 1 [M].

    One observation for every accepted row of a best-first tree at every anchor: there the
    question is which child comes next. Truth outside the candidates is left out.
    """
    accepted = tree(num_nodes, "best_first")
    logprobs, ranks, depths = [], [], []
    for answer in answers:
        if answer.loops:
            continue
        for at in range(0, len(answer.text) - 1, 2):
            taken = accepted(answer, at)
            for d in range(min(taken + 1, DEPTH, len(answer.text) - at - 1)):
                (rank,) = np.nonzero(answer.tokens[at, d] == answer.text[at + 1 + d])
                if len(rank):
                    logprobs.append(answer.logprobs[at, d])
                    ranks.append(int(rank[0]))
                    depths.append(d)
    return (
        torch.from_numpy(np.stack(logprobs)),
        torch.tensor(ranks),
        torch.tensor(depths),
    )
