"""Where a step's tokens lie: found on CPUs by numpy, on GPUs by torch, and the same."""

import numpy as np
import torch

import kvq


def test_both_ways_to_find_slots_and_tables_agree():
    pick = np.random.default_rng(0)
    with kvq.LLM("tiny", "k8v4", num_blocks=64, block_size=8) as llm:
        runner = llm.core.runner
        for table in runner._tables:
            table.copy_(torch.from_numpy(pick.integers(0, 64, tuple(table.shape))))
        for _ in range(20):
            rows = pick.permutation(len(runner._tables[0]))[: pick.integers(1, 6)].tolist()
            rows = [-1, *rows] if pick.integers(2) else rows
            counts = pick.integers(1, 20, len(rows)).tolist()
            positions = np.concatenate([pick.integers(0, 100) + np.arange(count) for count in counts])
            width = int(positions.max()) // 8 + 1
            given = rows, counts, positions, width
            found, wanted = list(runner._find_on_cpu(*given)), list(runner._find(*given))
            assert len(found) == len(wanted) == len(runner._tables)
            for (tables, slots), (same_tables, same_slots) in zip(found, wanted, strict=True):
                assert (tables.dtype, slots.dtype) == (same_tables.dtype, same_slots.dtype)
                assert torch.equal(tables, same_tables)
                assert torch.equal(slots, same_slots)
                assert tables.is_contiguous()
