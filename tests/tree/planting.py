"""A drafter that plants the target's true continuation in random trees.

Real drafts are mostly accepted along first children, which hides errors of compaction,
masks and positions. Here a random tree holds the true continuation, known from a run
without speculation, at random nodes: deep, sideways accepts happen at every step.
"""

import random
from contextlib import contextmanager

import torch


def random_parents(
    rng: random.Random, num_nodes: int, path_length: int
) -> tuple[list[int], list[int]]:
    """A random tree of `num_nodes` nodes with a path of `path_length` nodes from the root.

    Returns:
        (parents, path): `parents[j]` is the row of row j's parent, -1 for the root, and
        always smaller than j; `path` are the rows of the path, root left out.

    """
    path = sorted(rng.sample(range(1, num_nodes + 1), path_length))
    above = dict(zip(path, [0, *path]))
    parents = [-1] + [above.get(j, rng.randrange(j)) for j in range(1, num_nodes + 1)]
    return parents, path


def shape_of(parents: list[int]) -> tuple[list[int], list[list[int]]]:
    """Depth and ancestor words of every row of a tree, root first."""
    depth, bits = [0], [1]
    for row in range(1, len(parents)):
        depth.append(depth[parents[row]] + 1)
        bits.append(bits[parents[row]] | 1 << row)
    num_words = -(-len(parents) // 32)
    words = [[b >> 32 * w & 0xFFFFFFFF for w in range(num_words)] for b in bits]
    return depth, [[w - (1 << 32) if w >> 31 else w for w in row] for row in words]


class Planter:
    """Replaces the trees a `DDTreeSpeculator` built by planted ones.

    Attributes:
        continuations: prompt, as a tuple of tokens, to its true output tokens.
        planted: how many planted nodes each tree had; what the engine must accept
            unless something truncates the tree.
        paths: prompt to the rows planted in each of its trees, root left out.

    """

    def __init__(
        self, continuations: dict[tuple[int, ...], list[int]], seed: int = 0, vocab: int = 512
    ):
        self.continuations = continuations
        self.rng = random.Random(seed)
        self.vocab = vocab
        self.planted: list[int] = []
        self.paths: dict[tuple[int, ...], list[list[int]]] = {}

    def filler(self) -> int:
        """The token of a node that is not planted."""
        return self.rng.randrange(self.vocab)

    def plant(self, speculator, input_batch) -> None:
        req_states = speculator.draft_tree_req_states
        tree = speculator.draft_tree
        for row, slot in enumerate(input_batch.idx_mapping_np.tolist()):
            if input_batch.req_ids[row].startswith("_warmup_"):
                continue  # The engine's own, before it serves.
            total = int(req_states.total_len.gpu[slot])
            prompt_len = int(req_states.prompt_len.np[slot])
            known = req_states.all_token_ids.gpu[slot, :total].tolist()
            truth = self.continuations[tuple(known[:prompt_len])]
            # After a near-tie the text is another one, whose continuation is not known.
            same = known[prompt_len:] == truth[: total - prompt_len]
            truth = truth[total - prompt_len :] if same else []
            num_nodes = speculator.num_nodes
            longest = min(num_nodes, speculator.num_speculative_steps, len(truth))
            length = self.rng.randint(0, longest)
            if tree.spine_only.gpu[slot]:
                parents, path = [-1, *range(num_nodes)], list(range(1, length + 1))
            else:
                parents, path = random_parents(self.rng, num_nodes, length)
            tokens = [self.filler() for _ in range(num_nodes)]
            for node, token in zip(path, truth):
                tokens[node - 1] = token
            depth, words = shape_of(parents)
            tree.parents[slot] = torch.tensor(parents, dtype=torch.int32)
            tree.depth[slot] = torch.tensor(depth, dtype=torch.int32)
            tree.ancestors[slot] = torch.tensor(words, dtype=torch.int32)
            tree.num_nodes[slot] = num_nodes
            speculator.node_tokens[row] = torch.tensor(tokens)
            self.planted.append(length)
            self.paths.setdefault(tuple(known[:prompt_len]), []).append(path)


@contextmanager
def planting(planter: Planter, run_drafter: bool = False):
    """Make every `DDTreeSpeculator` of this process plant `planter`'s trees.

    With `run_drafter` the real drafter runs first, so that its KV cache and the
    gathering of its context are exercised as well.
    """
    from vllm.v1.worker.gpu.spec_decode.ddtree.speculator import DDTreeSpeculator

    original_init, original_propose = DDTreeSpeculator.__init__, DDTreeSpeculator.propose

    def init(self, vllm_config, device, req_states):
        original_init(self, vllm_config, device, req_states)
        self.draft_tree_req_states = req_states

    def propose(self, input_batch, *args, **kwargs):
        if run_drafter or kwargs.get("dummy_run"):
            original_propose(self, input_batch, *args, **kwargs)
        if not kwargs.get("dummy_run"):
            planter.plant(self, input_batch)
        return self.node_tokens[: input_batch.num_reqs]

    DDTreeSpeculator.__init__, DDTreeSpeculator.propose = init, propose
    try:
        yield planter
    finally:
        DDTreeSpeculator.__init__, DDTreeSpeculator.propose = original_init, original_propose


@contextmanager
def eager_drafter():
    """Keep drafting out of CUDA graphs, for what a test puts there runs in Python."""
    from vllm.config.compilation import CUDAGraphMode
    from vllm.v1.worker.gpu.spec_decode.dflash.speculator import DFlashSpeculator

    original = DFlashSpeculator.init_cudagraph_manager
    DFlashSpeculator.init_cudagraph_manager = lambda self, mode: original(self, CUDAGraphMode.NONE)
    try:
        yield
    finally:
        DFlashSpeculator.init_cudagraph_manager = original


@contextmanager
def noisy_marginals(
    continuations: dict[tuple[int, ...], list[int]], ranks: list[float], vocab: int = 512
):
    """Give chain and tree one and the same imperfect drafter.

    At each position the truth is the drafter's token of rank r with probability
    `ranks[r]`, drawn once for the position, so that both methods meet the same drafts.
    """
    from vllm.v1.worker.gpu.spec_decode.dflash.speculator import DFlashSpeculator
    from vllm.v1.worker.gpu.states import RequestState

    original_add = RequestState.add_request
    original_propose = DFlashSpeculator.propose
    original_logits = DFlashSpeculator.compute_draft_logits
    prompts_by_slot: dict[int, tuple[int, ...] | None] = {}
    known: dict[str, tuple[int, ...]] = {}

    def propose(self, input_batch, *args, **kwargs):
        for slot, req_id in zip(input_batch.idx_mapping_np.tolist(), input_batch.req_ids):
            prompts_by_slot[slot] = known.get(req_id)
        return original_propose(self, input_batch, *args, **kwargs)

    def compute_draft_logits(self, hidden_states, spec_step_idx):
        logits = original_logits(self, hidden_states, spec_step_idx)
        rows = zip(self.sample_idx_mapping.tolist(), self.sample_pos.tolist(), logits)
        for slot, position, row in rows:
            answer = continuations.get(prompt := prompts_by_slot.get(slot))
            if answer is None:  # The engine's own, before it serves.
                continue
            index = position - len(prompt)
            if not 0 <= index < len(answer):
                continue
            rng = random.Random(hash((prompt, position)))
            row[:] = torch.tensor([-4 * rng.random() - 8 for _ in range(vocab)])
            draw, others = rng.random(), rng.sample(range(vocab), len(ranks))
            for rank, (probability, other) in enumerate(zip(ranks, others)):
                draw -= probability
                hit = draw < 0 <= draw + probability
                row[answer[index] if hit else other] = -float(rank)
        return logits

    def add_request(self, req_id, prompt_len, all_token_ids, *args, **kwargs):
        known[req_id] = tuple(all_token_ids[:prompt_len])
        return original_add(self, req_id, prompt_len, all_token_ids, *args, **kwargs)

    DFlashSpeculator.propose = propose
    DFlashSpeculator.compute_draft_logits = compute_draft_logits
    RequestState.add_request = add_request
    try:
        with eager_drafter():
            yield
    finally:
        DFlashSpeculator.propose = original_propose
        del DFlashSpeculator.compute_draft_logits
        RequestState.add_request = original_add
