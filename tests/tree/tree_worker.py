"""What tests have the worker processes of an engine do (`worker_extension_cls`).

The methods become those of vLLM's worker; `llm.collective_rpc` calls them in every process.
"""

import torch

from planting import Planter


class TreeWorker:
    """Mixed into the worker of every rank."""

    def plant(self, continuations: dict[tuple[int, ...], list[int]], seed: int) -> None:
        """From now on plant trees, the same ones on every rank, after the drafter has run."""
        self.planter = Planter(continuations, seed)
        speculator = self.model_runner.speculator
        speculator.draft_tree_req_states = self.model_runner.req_states
        self.after_drafting(self.planter.plant)

    def planted(self) -> list[int]:
        """How many planted nodes each tree had."""
        return self.planter.planted

    def trees_after_company(self) -> bool:
        """Run a batch of nobody, as a replica without work does while others have some.

        Returns:
            whether the trees of requests are what they were.

        """
        tree = self.model_runner.speculator.draft_tree
        before = [t.clone() for t in (tree.parents, tree.depth, tree.ancestors, tree.num_nodes)]
        assert before[-1].any()
        self.execute_dummy_batch()
        after = [tree.parents, tree.depth, tree.ancestors, tree.num_nodes]
        return all(map(torch.equal, before, after))

    def break_rank(self, rank: int) -> None:
        """From now on this rank drafts another token than the others, in one node."""
        if self.rank == rank:
            self.after_drafting(lambda speculator, _: speculator.node_tokens[0, 2].add_(1))

    def after_drafting(self, change) -> None:
        """Call `change(speculator, input_batch)` whenever trees were built."""
        speculator = self.model_runner.speculator
        original = speculator.propose

        def propose(input_batch, *args, **kwargs):
            original(input_batch, *args, **kwargs)
            if not kwargs.get("dummy_run"):
                change(speculator, input_batch)
            return speculator.node_tokens[: input_batch.num_reqs]

        speculator.propose = propose
