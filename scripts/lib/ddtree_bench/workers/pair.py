"""Answers of a real pair, and how long they took."""

from __future__ import annotations

import sys
import time
from typing import Any

from .engine import SamplingParams
from .engine import Worker as Engine

_TOP = 20


class Worker(Engine):
    """Answers prompts, a number of them at a time.

    Args:
        engine: arguments of `LLM`.
        models: folder of eval_prompts.py.

    """

    def __init__(self, engine: dict[str, Any], models: str) -> None:
        super().__init__(engine)
        sys.path.insert(0, models)
        import eval_prompts

        encode, tokenizer = eval_prompts.encode, self.llm.get_tokenizer()
        questions = [q for group in eval_prompts.OWN.values() for q in group]
        self.prompts = [encode(tokenizer, eval_prompts.user(q)) for q in questions]

    def generate(
        self, together: int, temperature: float, max_tokens: int, limit: int | None = None
    ) -> dict[str, Any]:
        """Answer every prompt (or `limit`), `together` at a time, each twice if they are fewer.

        Returns:
            tokens of every answer, seconds, tokens a verify step of a request gave, and seconds
            of each step: those in which requests join, prompts and all, and the others.

        """
        prompts = self.prompts[:limit]
        while len(prompts) < together:
            prompts = prompts + prompts
        before = self._counters()
        begin = time.perf_counter()
        tokens, steps = self._answer(
            prompts,
            together,
            [
                SamplingParams(
                    temperature=temperature,
                    seed=i if temperature else None,
                    max_tokens=max_tokens,
                    detokenize=False,
                )
                for i in range(len(prompts))
            ],
        )
        seconds = time.perf_counter() - begin
        after = self._counters()
        drafts, accepted = (after[k] - before[k] for k in ("drafts", "accepted_tokens"))
        return {
            "tokens": tokens,
            "seconds": seconds,
            "tokens_per_step": 1 + accepted / drafts if drafts else None,
            "steps": steps,
        }

    def margin(self, prompt: int, prefix: list[int], tokens: list[int]) -> float | None:
        """How far apart the log-probabilities of two tokens are after prompt and prefix.

        None if one of them is not among the 20 most probable.

        """
        params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=_TOP, detokenize=False)
        ids = self.prompts[prompt % len(self.prompts)] + prefix
        (output,) = self.llm.generate({"prompt_token_ids": ids}, params, use_tqdm=False)
        found = output.outputs[0].logprobs[0]
        if any(t not in found for t in tokens):
            return None
        return abs(found[tokens[0]].logprob - found[tokens[1]].logprob)

    def _answer(
        self, prompts: list[list[int]], together: int, params: list[SamplingParams]
    ) -> tuple[list[list[int]], dict[str, list[float]]]:
        answers: list[list[int]] = [[] for _ in prompts]
        steps: dict[str, list[float]] = {"joining": [], "other": []}
        waiting = list(range(len(prompts)))[::-1]
        running: dict[str, int] = {}
        # Scheduled ahead: a step returns while what it launched runs in the next.
        joins = joined = False
        while waiting or running:
            joins, joined = bool(waiting) and len(running) < together, joins
            begin = time.perf_counter()
            while waiting and len(running) < together:
                at = waiting.pop()
                name = str(self.requests)
                self.requests += 1
                self.engine.add_request(name, {"prompt_token_ids": prompts[at]}, params[at])
                running[name] = at
            for output in self.engine.step():
                if output.finished:
                    answers[running.pop(output.request_id)] = list(output.outputs[0].token_ids)
            steps["joining" if joins or joined else "other"].append(time.perf_counter() - begin)
        return answers, steps

    def _counters(self) -> dict[str, float]:
        prefix = "vllm:spec_decode_num_"
        found = {"drafts": 0.0, "accepted_tokens": 0.0}
        for metric in self.llm.get_metrics():
            if metric.name.startswith(prefix) and hasattr(metric, "value"):
                found[metric.name.removeprefix(prefix)] = metric.value
        return found
