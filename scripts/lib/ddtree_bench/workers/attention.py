"""Device time of attention alone: trees as FLASH_ATTN runs them, and FlashAttention 3's chain."""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle

import numpy as np
import torch
from vllm.v1.attention.ops.tree_mask import DraftTreeMask
from vllm.v1.attention.ops.triton_tree_attention import TreeAttentionWorkspace, tree_attention
from vllm.v1.attention.ops.triton_tree_tail import continue_over_tree
from vllm.vllm_flash_attn import flash_attn_varlen_func, get_scheduler_metadata

from ddtree_bench.workers.kernels import BLOCK_SIZE, DEVICE, KV_HEADS, LAUNCHES, device_ms

HEADS, HEAD_SIZE = 32, 128
MAX_SPLITS = 32  # upstream's for CUDA graphs
SCALE = HEAD_SIZE**-0.5


class Worker:
    """Times one layer of `batch` requests after `context` keys, verifying `rows` rows each."""

    def measure(self, batch: int, context: int, rows: int) -> dict[str, float]:
        """Milliseconds: "chain", "tail" (the prefix, then the tree) and "split" (one kernel)."""
        return {n: device_ms(c) for n, c in Layer(batch, context, rows).calls().items()}

    def close(self) -> None:
        """Nothing outlives a measurement."""


class Layer:
    """Queries, a paged cache for each of a graph's launches, and trees that branch at random."""

    def __init__(self, batch: int, context: int, rows: int) -> None:
        self.batch, self.rows = batch, rows
        pages = -(-(context + rows) // BLOCK_SIZE)
        # A cache each: what one launch leaves in the L2 cache must not serve the next.
        shape = (batch * pages, BLOCK_SIZE, KV_HEADS, 2 * HEAD_SIZE)
        self.caches = cycle(
            [
                torch.empty(shape, dtype=torch.bfloat16, device=DEVICE).normal_()
                for _ in range(LAUNCHES)
            ]
        )
        self.blocks = torch.randperm(batch * pages, device=DEVICE).int().view(batch, pages)
        self.query = torch.empty(
            batch * rows, HEADS, HEAD_SIZE, dtype=torch.bfloat16, device=DEVICE
        ).normal_()
        self.out = torch.empty_like(self.query)
        self.starts = torch.arange(batch + 1, dtype=torch.int32, device=DEVICE) * rows
        self.lens = torch.full((batch,), context + rows, dtype=torch.int32, device=DEVICE)
        self.max_len = context + rows
        self.mask = random_trees(batch, context, rows)
        self.prefix_lens = self.mask.prefix_lens
        self.workspace = TreeAttentionWorkspace(DEVICE, HEAD_SIZE)
        # As the backend has it: enough rows to fill the device need no splits.
        enough = batch * rows * HEADS // 128
        self.splits = 1 if enough >= 0.8 * self.workspace.num_sms else MAX_SPLITS
        self.schedules = {
            True: self._schedule(self.lens, True, MAX_SPLITS),
            False: self._schedule(self.prefix_lens, False, self.splits),
        }

    def calls(self) -> dict[str, Callable[[], object]]:
        """What is timed, by name."""
        return {"chain": self.chain, "tail": self.tail, "split": self.split}

    def chain(self) -> None:
        self._flash(next(self.caches), self.lens, True, MAX_SPLITS)

    def tail(self) -> None:
        cache = next(self.caches)
        lse = self._flash(cache, self.prefix_lens, False, self.splits)
        continue_over_tree(
            self.query, *cache.split(HEAD_SIZE, -1), self.out, lse, *self._trees(), SCALE,
            uniform=True,
        )  # fmt: skip

    def split(self) -> None:
        tree_attention(
            self.query, *next(self.caches).split(HEAD_SIZE, -1), self.out, *self._trees(),
            self.workspace, SCALE,
        )  # fmt: skip

    def _trees(self) -> tuple:
        return (self.mask, self.starts, self.lens, self.blocks, self.rows)

    def _schedule(self, lens: torch.Tensor, causal: bool, splits: int) -> torch.Tensor:
        return get_scheduler_metadata(
            batch_size=self.batch,
            max_seqlen_q=self.rows,
            max_seqlen_k=self.max_len,
            num_heads_q=HEADS,
            num_heads_kv=KV_HEADS,
            headdim=HEAD_SIZE,
            cache_seqlens=lens,
            qkv_dtype=torch.bfloat16,
            cu_seqlens_q=self.starts,
            page_size=BLOCK_SIZE,
            causal=causal,
            window_size=(-1, -1),
            num_splits=splits,
        )

    def _flash(
        self, cache: torch.Tensor, lens: torch.Tensor, causal: bool, splits: int
    ) -> torch.Tensor:
        """Into `out`; the logsumexp."""
        key, value = cache.split(HEAD_SIZE, -1)
        _, lse = flash_attn_varlen_func(
            q=self.query,
            k=key,
            v=value,
            out=self.out,
            cu_seqlens_q=self.starts,
            max_seqlen_q=self.rows,
            seqused_k=lens,
            max_seqlen_k=self.max_len,
            softmax_scale=SCALE,
            causal=causal,
            block_table=self.blocks,
            scheduler_metadata=self.schedules[causal],
            fa_version=3,
            num_splits=splits,
            return_softmax_lse=True,
        )
        return lse


def random_trees(batch: int, context: int, rows: int) -> DraftTreeMask:
    """Whole trees after `context` tokens, each node below a random earlier one."""
    rng = np.random.default_rng(0)
    words = -(-rows // 32)
    ancestors = np.zeros((rows, 32 * words), dtype=bool)
    ancestors[0, 0] = True
    for row in range(1, rows):
        ancestors[row] = ancestors[rng.integers(row)]
        ancestors[row, row] = True
    packed = np.packbits(ancestors, axis=1, bitorder="little").view(np.int32)
    depth = ancestors.sum(1).astype(np.int32) - 1

    def each(x: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.repeat(x[None], batch, 0)).to(DEVICE)

    num_rows = np.full(batch, rows, dtype=np.int32)
    return DraftTreeMask(
        num_rows=torch.from_numpy(num_rows).to(DEVICE),
        ancestors=each(packed),
        depth=each(depth),
        prefix_lens=torch.full((batch,), context, dtype=torch.int32, device=DEVICE),
        num_rows_np=num_rows,
    )
