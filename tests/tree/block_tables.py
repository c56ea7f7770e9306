"""Upstream's two kernels of block tables in PyTorch, for engines on the CPU.

Interpreted, they take milliseconds a request and group of layers in every step: half the time of an
engine without speculation. Engines in processes of their own (test_serve.py, test_parallel.py) and
those on a GPU keep the kernels.
"""

from collections.abc import Callable
from functools import cache
from inspect import signature

import torch


@cache
def kernels() -> tuple[Callable, Callable]:
    """Upstream's methods that launch them."""
    from vllm.v1.worker.gpu.block_table import BlockTables

    return BlockTables.gather_block_tables, BlockTables.compute_slot_mappings


def replace_kernels() -> None:
    """Have every engine of this process do without them, unless a later release asks for more."""
    from vllm.v1.worker.gpu.block_table import BlockTables

    for kernel, ours in zip(kernels(), (gather_block_tables, compute_slot_mappings)):
        if list(signature(kernel).parameters) == list(signature(ours).parameters):
            setattr(BlockTables, ours.__name__, ours)


def gather_block_tables(self, idx_mapping, num_reqs_padded, out=None, out_ptrs=None):
    """`BlockTables.gather_block_tables`."""
    out = self.input_block_tables if out is None else out
    slots, num_reqs = idx_mapping.long(), idx_mapping.shape[0]
    for table, counts, to in zip(self.block_tables, self.num_blocks.gpu, out):
        counts = counts[slots]
        width = int(counts.max()) if num_reqs else 0
        there = torch.arange(width) < counts[:, None]
        # What lies past a request's blocks is left as it is.
        to[:num_reqs, :width] = torch.where(there, table.gpu[slots, :width], to[:num_reqs, :width])
        to[num_reqs:num_reqs_padded] = 0
    return tuple(table[:num_reqs_padded] for table in out)


def compute_slot_mappings(
    self, idx_mapping, query_start_loc, positions, num_tokens_padded, out=None
):
    """`BlockTables.compute_slot_mappings`."""
    from vllm.v1.attention.backends.utils import PAD_SLOT_ID

    assert self.cp_size == 1
    out = self.slot_mappings if out is None else out
    out.fill_(PAD_SLOT_ID)
    num_reqs = idx_mapping.shape[0]
    starts = query_start_loc[: num_reqs + 1].long()
    slots = idx_mapping.long().repeat_interleave(starts.diff())
    tokens = starts[0] + torch.arange(len(slots))
    positions = positions[tokens]
    groups = zip(self.block_tables, self.block_sizes, self._slot_mapping_enabled, out)
    for table, block_size, enabled, to in groups:
        if enabled:
            blocks = table.gpu[slots, positions // block_size].long()
            mapping = blocks * block_size + positions % block_size
            to[tokens] = mapping.where(slots >= 0, PAD_SLOT_ID)
    return out[:, :num_tokens_padded]
