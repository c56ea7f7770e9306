"""Device time of the tree's own kernels: many replays of a graph of many launches."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from types import SimpleNamespace

import torch

# From the speculator what it calls, whichever file it has it from.
from vllm.v1.worker.gpu.spec_decode.ddtree import compaction, speculator, walk
from vllm.v1.worker.gpu.spec_decode.ddtree.tree import DraftTree

DEVICE = torch.device("cuda")
VOCAB, HIDDEN, DEPTH, LAYERS = 151936, 4096, 15, 36
KV_HEADS, BLOCK_SIZE, CONTENT = 8, 16, 256  # content: K and V of a head
LAUNCHES, REPLAYS = 10, 50
POLICY = "best_first"


class Worker:
    """Times every kernel of a step of `batch` requests with trees of `nodes` nodes."""

    def measure(self, batch: int, nodes: int) -> dict[str, float]:
        """Milliseconds by kernel."""
        return {name: device_ms(call) for name, call in Step(batch, nodes).calls().items()}

    def close(self) -> None:
        """Nothing outlives a measurement."""


class Step:
    """Buffers of one step, as the engine has them, filled with plausible trees.

    Of every position a handful of tokens are likely, so that the tree branches and is deep. The
    target's sample at a row is the token of the row's first child: the walk is long and
    nearly every accepted row moves.
    """

    def __init__(self, batch: int, nodes: int) -> None:
        self.batch, self.rows = batch, 1 + nodes
        generator = torch.Generator(DEVICE).manual_seed(0)
        self.logits = torch.randn(
            batch * DEPTH, VOCAB, generator=generator, device=DEVICE, dtype=torch.bfloat16
        )
        likely = torch.randint(
            VOCAB, (batch * DEPTH, 8), generator=generator, device=DEVICE, dtype=torch.int64
        )
        peaks = torch.linspace(14, 7, 8, device=DEVICE, dtype=torch.bfloat16)
        self.logits.scatter_(1, likely, peaks.expand(batch * DEPTH, 8))
        self.k = speculator.num_candidates(nodes, DEPTH, VOCAB, POLICY)
        self.logprobs, self.tokens = speculator.top_candidates(self.logits, DEPTH, self.k)
        self.tree = DraftTree(batch, nodes, DEVICE)
        self.slots = torch.arange(batch, device=DEVICE).flip(0).contiguous()
        self.spine_only = torch.zeros(batch, dtype=torch.int32, device=DEVICE)
        self.node_tokens = torch.zeros(batch, nodes, dtype=torch.int64, device=DEVICE)
        num_rows = batch * self.rows
        self.starts = torch.arange(0, num_rows + 1, self.rows, dtype=torch.int32, device=DEVICE)
        self.positions = torch.full((num_rows,), 1000, dtype=torch.int64, device=DEVICE)
        self.step = SimpleNamespace(
            num_reqs=batch,
            num_reqs_after_padding=batch,
            idx_mapping=self.slots,
            query_start_loc=self.starts,
            cu_num_logits=self.starts,
            cu_num_logits_np=self.starts.cpu().numpy(),
            positions=self.positions,
            seq_lens=torch.full((batch,), 1000 + self.rows, dtype=torch.int32, device=DEVICE),
        )
        self.context = speculator.DraftContext(DEPTH, DEVICE)
        self.hidden = [
            torch.zeros(num_rows, HIDDEN, dtype=torch.bfloat16, device=DEVICE) for _ in range(5)
        ]
        self.build()
        first = torch.zeros(batch, 1, dtype=torch.int64, device=DEVICE)
        self.drafts = torch.cat([first, self.node_tokens], 1).flatten()
        self.sampled = self._samples()
        _, self.num_sampled, _ = self.walk()
        # Every request has blocks of its own; a step's rows lie in them one after another.
        blocks = -(-self.rows // BLOCK_SIZE)
        self.kv = [
            torch.zeros(
                batch * blocks, BLOCK_SIZE, KV_HEADS, CONTENT, dtype=torch.bfloat16, device=DEVICE
            ).transpose(1, 2)
            for _ in range(LAYERS)
        ]
        self.table = compaction._KVCacheTable([(0, cache) for cache in self.kv], DEVICE)
        row = torch.arange(self.rows, device=DEVICE)
        first_slots = torch.arange(batch, device=DEVICE) * blocks * BLOCK_SIZE
        self.slot_mappings = (first_slots[:, None] + row).flatten()[None].contiguous()

    def calls(self) -> dict[str, Callable[[], object]]:
        """What is timed, by name."""
        return {
            "top candidates": self.candidates,
            "builder": self.build,
            "scatter": self.scatter,
            "walk": self.walk,
            "drafter context": self.linearize,
            "compaction": self.compact,
        }

    def candidates(self) -> object:
        return speculator.top_candidates(self.logits, DEPTH, self.k)

    def build(self) -> None:
        tree = self.tree
        speculator.build_draft_trees(
            self.logprobs,
            self.tokens,
            self.slots,
            self.spine_only,
            tree.parents,
            tree.depth,
            tree.ancestors,
            tree.num_nodes,
            self.node_tokens,
            POLICY,
        )

    def scatter(self) -> None:
        """Mask and depths of the batch, and its positions."""
        self.tree.scatter(self.step)

    def walk(self) -> tuple[torch.Tensor, ...]:
        tree = self.tree
        return walk.walk_draft_trees(
            self.sampled,
            self.drafts,
            self.starts,
            self.slots,
            tree.parents,
            tree.num_nodes,
            tree.path,
        )

    def linearize(self) -> None:
        """The drafter's context, and positions back."""
        self.context.linearize(self.hidden, self.step, self.tree, self.num_sampled)

    def compact(self) -> None:
        self.table.move(
            self.tree.path,
            self.num_sampled,
            self.starts,
            self.starts,
            self.slots,
            self.slot_mappings,
        )

    def _samples(self) -> torch.Tensor:
        """At each row the token of its first child, or one that no child has."""
        sampled = torch.full((self.batch, self.rows), VOCAB, dtype=torch.int64)
        parents, tokens = self.tree.parents.tolist(), self.node_tokens.tolist()
        for request, slot in enumerate(self.slots.tolist()):
            for row in range(self.rows - 1, 0, -1):
                sampled[request, parents[slot][row]] = tokens[request][row - 1]
        return sampled.flatten().to(DEVICE)


def device_ms(call: Callable[[], object]) -> float:
    """Milliseconds of one call inside a graph of LAUNCHES, the median of REPLAYS."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):  # compiles
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(LAUNCHES):
            call()
    times = []
    for _ in range(REPLAYS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / LAUNCHES)
    return median(times)
