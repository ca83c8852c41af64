"""Where a step's tokens lie: found on CPUs by numpy, on GPUs by torch, and the same."""

import json
import shutil

import numpy as np
import torch

import kvq
from kvq.models.resolve import resolve_model


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


def test_tables_are_as_wide_as_the_pool_and_not_as_the_context(tmp_path):
    """Contexts of a thousand million tokens would take gigabytes of tables."""
    folder = tmp_path / "model"
    shutil.copytree(resolve_model("tiny").folder, folder, ignore=shutil.ignore_patterns("kvq.json"))
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"max_position_embeddings": 10**9}))
    with kvq.LLM(folder, "int4", num_blocks=70) as llm:
        assert [table.shape[1] for table in llm.core.runner._tables] == [70]
        output = llm.generate([[5] * 900], kvq.SamplingParams(max_tokens=70 * 16 - 900, ignore_eos=True))[0]
        assert len(output.outputs[0].token_ids) == 70 * 16 - 900, "the whole pool can be one request's"
