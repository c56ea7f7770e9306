"""Device time of the gated delta nets' kernels: of all layers, in one CUDA graph.

The shape is that of Qwen3.6-27B. Every layer has states of its own, so that nothing stays in a
cache from one to the next.
"""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import torch
from vllm.model_executor.layers.mamba.ops.causal_conv1d import causal_conv1d_update
from vllm.model_executor.layers.mamba.ops.draft_tree.commit import (
    GDNLayerTensors,
    GDNStateCommitter,
)
from vllm.model_executor.layers.mamba.ops.draft_tree.conv import (
    TreeRecord,
    tree_causal_conv1d,
)
from vllm.model_executor.layers.mamba.ops.draft_tree.delta_rule import tree_gated_delta_rule
from vllm.third_party.flash_linear_attention.ops.fused_recurrent import (
    fused_recurrent_gated_delta_rule_packed_decode,
)

from ddtree_bench.workers.kernels import device_ms

DEVICE, DTYPE = torch.device("cuda"), torch.bfloat16
LAYERS, HK, HV, HEAD, WIDTH = 48, 16, 48, 128, 4
DIM, DEPTH, MAX_ROWS = (2 * HK + HV) * HEAD, 15, 64


class Worker:
    """Checks and times, for float32 states."""

    def measure(self, batch: int, nodes: int) -> dict[str, float]:
        """Milliseconds of verifying, all layers."""
        layers = [Layer(batch, seed) for seed in range(LAYERS)]
        trees = Trees(batch, nodes)
        return {
            "conv": device_ms(lambda: [layer.conv(trees) for layer in layers]),
            "delta rule": device_ms(lambda: [layer.delta_rule(trees) for layer in layers]),
            "verify": device_ms(
                lambda: [(layer.conv(trees), layer.delta_rule(trees)) for layer in layers]
            ),
        }

    def commit(self, batch: int, lengths: list[int]) -> list[float]:
        """Milliseconds of committing paths of so many rows, whichever, all layers."""
        layers = [Layer(batch, seed) for seed in range(LAYERS)]
        trees = Trees(batch, MAX_ROWS - 1)
        for layer in layers:
            layer.conv(trees)  # records the rows
        committer = GDNStateCommitter([layer.tensors() for layer in layers])
        found = []
        for length in lengths:
            paths = _ints([length] * batch), _ints([list(range(length))] * batch)
            found.append(
                device_ms(partial(committer.commit, *paths, trees.starts, trees.slots[None]))
            )
        return found

    def compare(self, nodes: int) -> dict[str, Any]:
        """Committed states against decoding the same tokens one by one with upstream's kernels.

        Returns:
            values of the states, those that differ, and by how much at most.

        """
        batch = 3
        trees, layer = Trees(batch, nodes), Layer(batch, 1)
        lengths, rows = trees.paths()
        conv_state = layer.conv_state.clone(memory_format=torch.preserve_format)
        ssm_state = layer.ssm_state.clone()
        for request, (start, length) in enumerate(
            zip(trees.starts.tolist(), lengths.tolist(), strict=False)
        ):
            for row in rows[request, :length].tolist():
                layer.decode(conv_state, ssm_state, 1 + request, start + row)
        layer.conv(trees)  # records the rows
        GDNStateCommitter([layer.tensors()]).commit(lengths, rows, trees.starts, trees.slots[None])
        differences = (layer.ssm_state - ssm_state).abs()
        return {
            "values": ssm_state.numel() + conv_state.numel(),
            "differ": int((differences != 0).sum()) + int((layer.conv_state != conv_state).sum()),
            "most": float(differences.max()),
        }

    def close(self) -> None:
        """Nothing outlives a measurement."""


class Trees:
    """Random trees of a batch, deep and wide, as the layers see them."""

    def __init__(self, batch: int, nodes: int) -> None:
        rng, rows = random.Random(0), 1 + nodes
        self.parents = [[-1] for _ in range(batch)]
        words = torch.zeros(batch, rows, -(-rows // 32), dtype=torch.int64)
        for request, parents in enumerate(self.parents):
            depth = [0]
            while len(parents) < rows:
                # Mostly the row before: a spine with twigs.
                parent = max(0, len(parents) - 1 - rng.choice((0, 0, 0, 1, 2, 5)))
                if depth[parent] == DEPTH:
                    parent = rng.choice([i for i, d in enumerate(depth) if d < DEPTH])
                parents.append(parent)
                depth.append(depth[parent] + 1)
            for row in range(rows):
                for seen in self._above(request, row):
                    words[request, row, seen // 32] |= 1 << seen % 32
        words = torch.where(words >= 1 << 31, words - (1 << 32), words)
        self.ancestors = words.int().to(DEVICE)
        self.row_parents = _ints([p for parents in self.parents for p in parents])
        self.starts = _ints([r * rows for r in range(batch + 1)])
        self.slots = _ints([1 + r for r in range(batch)])

    def _above(self, request: int, row: int) -> list[int]:
        path = []
        while row >= 0:
            path.append(row)
            row = self.parents[request][row]
        return path[::-1]

    def paths(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Of each request the deepest path: its rows' number, and the rows."""
        found = [
            max((self._above(r, row) for row in range(len(parents))), key=len)
            for r, parents in enumerate(self.parents)
        ]
        longest = max(map(len, found))
        return (
            _ints([len(path) for path in found]),
            _ints([path + [0] * (longest - len(path)) for path in found]),
        )


class Layer:
    """Weights, states and recorded rows of a layer, random."""

    def __init__(self, batch: int, seed: int) -> None:
        generator = torch.Generator(DEVICE).manual_seed(seed)

        def normal(*shape: int, dtype: torch.dtype = DTYPE) -> torch.Tensor:
            return torch.randn(*shape, generator=generator, device=DEVICE).to(dtype)

        tokens = batch * MAX_ROWS
        self.conv_state = normal(1 + batch, WIDTH - 1, DIM).transpose(1, 2)
        self.ssm_state = normal(1 + batch, HV, HEAD, HEAD, dtype=torch.float32)
        self.weight = 0.5 * normal(DIM, WIDTH)
        self.A_log = torch.linspace(-4, 2.5, HV, device=DEVICE)
        self.dt_bias = normal(HV, dtype=torch.float32)
        self.x, self.a, self.b = normal(tokens, DIM), normal(tokens, HV), normal(tokens, HV)
        self.record = TreeRecord(
            *torch.empty(tokens, DIM + 2 * HV, dtype=DTYPE, device=DEVICE).split([DIM, HV, HV], 1),
            self.a,
            self.b,
        )
        self.mixed = torch.empty_like(self.x)
        self.out = torch.empty(tokens, HV, HEAD, dtype=DTYPE, device=DEVICE)

    def tensors(self) -> GDNLayerTensors:
        return GDNLayerTensors(
            self.record.x,
            self.record.a,
            self.record.b,
            self.conv_state,
            self.ssm_state,
            self.weight,
            None,
            self.A_log,
            self.dt_bias,
        )

    def conv(self, trees: Trees) -> None:
        n = len(trees.row_parents)
        tree_causal_conv1d(
            self.x[:n],
            self.conv_state,
            self.weight,
            None,
            "silu",
            trees.slots,
            trees.starts,
            trees.row_parents,
            self.mixed[:n],
            self.record,
        )

    def delta_rule(self, trees: Trees) -> None:
        n = len(trees.row_parents)
        q, k, v = self.mixed[:n].split([HK * HEAD, HK * HEAD, HV * HEAD], 1)
        tree_gated_delta_rule(
            *(x.unflatten(1, (-1, HEAD)) for x in (q, k, v)),
            self.a[:n],
            self.b[:n],
            self.A_log,
            self.dt_bias,
            self.ssm_state,
            trees.slots,
            trees.starts,
            trees.ancestors,
            out=self.out[:n],
        )

    def decode(
        self, conv_state: torch.Tensor, ssm_state: torch.Tensor, slot: int, row: int
    ) -> None:
        """A recorded row as the only token of a step without speculation."""
        one, index = slice(row, row + 1), _ints([slot])
        mixed = causal_conv1d_update(
            self.x[one].clone(), conv_state, self.weight, None, "silu", conv_state_indices=index
        )
        fused_recurrent_gated_delta_rule_packed_decode(
            mixed,
            self.a[one],
            self.b[one],
            self.A_log,
            self.dt_bias,
            HEAD**-0.5,
            ssm_state,
            torch.empty(1, 1, HV, HEAD, dtype=DTYPE, device=DEVICE),
            index,
            True,
        )


def _ints(values: list) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)
