"""An engine in this process, stepped by hand."""

from __future__ import annotations

import os

os.environ.update(
    VLLM_USE_V2_MODEL_RUNNER="1",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_NO_USAGE_STATS="1",
    HF_HUB_OFFLINE="1",
)

import json
import math
import random
import tempfile
import time
import traceback
import warnings
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from vllm import LLM, SamplingParams
from vllm.sampling_params import RequestOutputKind

from ddtree_bench.timeline import summary

# A request that keeps running has grown by no more than this part of its context.
_GROWTH = 0.05


class Worker:
    """Keeps a batch of requests decoding and times its steps.

    Args:
        engine: arguments of `LLM`.
        memory_share: of the card, for weights, K/V and everything else; None leaves the K/V's size
            to `engine`.
        other_bytes: what of that is not for K/V.
        random_drafts: propose random tokens. A drafter of dummy weights proposes one token over
            and over; rows that are alike take less power, and a card at its power limit then runs
            the same products 13 % faster.

    """

    def __init__(
        self,
        engine: dict[str, Any],
        memory_share: float | None = None,
        other_bytes: int = 0,
        random_drafts: bool = False,
    ) -> None:
        if memory_share is not None:
            total = torch.cuda.get_device_properties(0).total_memory
            # Given in bytes, the engine need not measure while another one starts.
            engine["kv_cache_memory_bytes"] = int(total * memory_share) - other_bytes
        self.llm = LLM(**engine, worker_extension_cls="ddtree_bench.workers.rank.Rank")
        self.engine = self.llm.llm_engine
        if random_drafts:
            self.llm.collective_rpc("randomize_drafts")
        if (
            torch.cuda.is_available()
            and not self.engine.vllm_config.scheduler_config.async_scheduling
        ):
            raise RuntimeError("the engine does not schedule asynchronously")
        self.lengths: dict[str, int] = {}  # tokens by request, as the outputs say
        self.requests = 0

    def info(self) -> dict[str, Any]:
        """Tokens of K/V that fit."""
        cache = self.engine.vllm_config.cache_config
        return {"kv_tokens": cache.num_gpu_blocks * cache.block_size}

    def state_bytes(self) -> int:
        """Of recurrent layers, that a request keeps, without padding."""
        groups = self.engine.engine_core.engine_core.scheduler.kv_cache_config.kv_cache_groups
        found = 0
        for group in groups:
            spec = group.kv_cache_spec
            if hasattr(spec, "num_speculative_blocks"):
                state = sum(
                    math.prod(shape) * torch.empty(0, dtype=dtype).element_size()
                    for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True)
                )
                found += len(group.layer_names) * state * (1 + spec.num_speculative_blocks)
        return found

    def start(self, batch: int, context: int) -> None:
        """Have `batch` requests of about `context` tokens decode; those that fit go on."""
        longest = context * (1 + _GROWTH)
        keep = [r for r, n in self.lengths.items() if context <= n <= longest][:batch]
        self._abort([r for r in self.lengths if r not in keep])
        vocab = self.engine.vllm_config.model_config.get_vocab_size()
        params = SamplingParams(
            temperature=0.0,
            max_tokens=self.engine.vllm_config.model_config.max_model_len - context,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        fresh = set()
        while len(self.lengths) < batch:
            name = str(self.requests)
            self.requests += 1
            ids = random.Random(self.requests).choices(range(vocab), k=context)
            self.engine.add_request(name, {"prompt_token_ids": ids}, params)
            self.lengths[name] = context
            fresh.add(name)
        # Until the last of them has verified drafts.
        while fresh:
            self._step()
            fresh = {r for r in fresh if self.lengths[r] < context + 2}

    def run(self, steps: int, warmup: int = 5) -> dict[str, Any]:
        """Seconds of each of `steps` steps, and the tokens a request got in one.

        Raises:
            RuntimeError: if some request sat out a step, for want of room for its K/V.

        """
        self._synchronize()
        stamps: list[float] = []
        before = 0
        while len(stamps) <= warmup + steps:
            if self._step():
                stamps.append(time.perf_counter())
                if len(stamps) == warmup + 1:
                    before = sum(self.lengths.values())
        made = sum(self.lengths.values()) - before
        self._synchronize()
        if made < steps * len(self.lengths):
            raise RuntimeError(f"{len(self.lengths)} requests got {made} tokens in {steps} steps")
        seconds = [end - begin for begin, end in pairwise(stamps[warmup:])]
        return {"seconds": seconds, "tokens_per_step": made / steps / len(self.lengths)}

    def stop(self) -> None:
        """Abort every request."""
        self._abort(list(self.lengths))

    def count_syncs(self, steps: int, warmup: int = 5) -> dict[str, Any]:
        """Host synchronisations in `steps` steps and the stack of the first.

        With none counted, the steps are run once more in a mode in which one would raise. Waiting
        for an event, as the engine does for sampled tokens, is not one.

        """
        self._steps(warmup)
        stacks: list[str] = []

        def note(message: Any, *_: Any, **__: Any) -> None:
            # The mode warns of itself, too.
            if "called a synchronizing" in str(message):
                stacks.append("".join(traceback.format_stack(limit=12)[:-1]))

        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.showwarning = note
            torch.cuda.set_sync_debug_mode("warn")
            try:
                self._steps(steps)
            finally:
                torch.cuda.set_sync_debug_mode("default")
        if not stacks:
            torch.cuda.set_sync_debug_mode("error")
            try:
                self._steps(steps)
            finally:
                torch.cuda.set_sync_debug_mode("default")
        return {"count": len(stacks), "first": stacks[0] if stacks else ""}

    def profile(self, steps: int, warmup: int = 5) -> dict[str, Any]:
        """`timeline.summary` of `steps` steps."""
        self._steps(warmup)
        self._synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            self._steps(steps)
            self._synchronize()
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "trace.json"
            profiler.export_chrome_trace(str(file))
            return summary(json.loads(file.read_text()), steps)

    def close(self) -> None:
        """Free the card."""
        self.stop()
        self.engine.engine_core.shutdown()

    def _steps(self, count: int) -> None:
        """Steps until `count` of them gave tokens: the first may only fill the queue."""
        while count:
            count -= self._step()

    def _step(self) -> bool:
        """One step; whether it gave tokens."""
        outputs = self.engine.step()
        for output in outputs:
            if output.request_id in self.lengths:
                self.lengths[output.request_id] += len(output.outputs[0].token_ids)
                if output.finished:
                    raise RuntimeError(f"request {output.request_id} ran into max_model_len")
        return bool(outputs)

    def _abort(self, names: list[str]) -> None:
        for name in names:
            del self.lengths[name]
        if names:
            self.engine.abort_request(names)

    def _synchronize(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
