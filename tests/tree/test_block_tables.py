"""What stands in for upstream's kernels of block tables says what they say."""

import torch

import block_tables


def test_is_the_kernels():
    import vllm.v1.worker.cpu.shm  # noqa: F401  # It replaces what only a GPU has.
    from vllm.v1.worker.gpu.block_table import BlockTables

    generator = torch.Generator().manual_seed(0)
    # Groups of blocks of several sizes, one without slots; requests 2, 0 and a dummy.
    tables = BlockTables([16, 32, 64], 4, 512, [40, 20, 10], torch.device("cpu"))
    tables.slot_mapping_enabled[1] = tables._slot_mapping_enabled[1] = False
    for request, blocks in ((0, (9, 5, 3)), (2, (30, 15, 8)), (3, (1, 1, 1))):
        ids = [torch.randint(1, 99, (n,), generator=generator).tolist() for n in blocks]
        tables.append_block_ids(request, tuple(ids), overwrite=True)
    tables.apply_staged_writes()
    idx_mapping = torch.tensor([2, 0, -1], dtype=torch.int32)
    starts = torch.tensor([0, 7, 130, 133], dtype=torch.int32)
    positions = torch.cat([torch.arange(400, 407), torch.arange(123), torch.arange(3)])

    def told(gather, compute) -> list[torch.Tensor]:
        for table in tables.input_block_tables:
            table.fill_(7)
        tables.slot_mappings.fill_(7)
        gathered = gather(tables, idx_mapping[:2], 3)
        mapped = compute(tables, idx_mapping, starts, positions, 200)
        return [x.clone() for x in (*gathered, *tables.input_block_tables, mapped)]

    kernels = told(*block_tables.kernels())
    ours = told(block_tables.gather_block_tables, block_tables.compute_slot_mappings)
    assert all(map(torch.equal, kernels, ours)) and len(kernels) == len(ours) == 7
    assert (kernels[-1] >= 0).sum() == 2 * 130
    # It takes their place in this release.
    block_tables.replace_kernels()
    assert BlockTables.gather_block_tables is block_tables.gather_block_tables
    assert BlockTables.compute_slot_mappings is block_tables.compute_slot_mappings
