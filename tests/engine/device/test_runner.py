"""Where a step's tokens lie: found on CPUs by numpy, on GPUs by torch, and the same."""

import json
import shutil
from types import SimpleNamespace

import numpy as np
import torch

import kvq
from kvq.models.describe.resolve import resolve_model


def test_both_ways_to_make_the_inputs_of_a_step_agree():
    pick = np.random.default_rng(0)
    with kvq.LLM("tiny", "k8v4", num_blocks=64, block_size=8) as llm:
        runner = llm.core.runner
        for table in runner._tables.there:
            table.copy_(torch.from_numpy(pick.integers(0, 64, tuple(table.shape))))
        for _ in range(20):
            rows = pick.permutation(len(runner._tables.here[0]))[: pick.integers(1, 6)].tolist()
            rows = [-1, *rows] if pick.integers(2) else rows
            counts = pick.integers(1, 20, len(rows)).tolist()
            ends = [count + int(pick.integers(100)) for count in counts]
            branches = [SimpleNamespace(row=None if row < 0 else row) for row in rows]
            tokens = pick.integers(0, 50, sum(counts)).tolist()
            plan = SimpleNamespace(branches=branches, counts=counts, ends=ends, token_ids=tokens)
            wanted = sorted(pick.integers(0, len(tokens), 3).tolist())
            host, device = (
                find(plan, wanted, None) for find in (runner._inputs_on_cpu, runner._inputs_on_gpu)
            )
            ids, positions, kept, batches = device
            assert (host[0], host[2]) == (ids.tolist(), kept.tolist())
            assert host[1].tolist() == positions.tolist()
            assert len(host[3]) == len(batches) == len(runner._tables.here)
            for one, other in zip(host[3], batches, strict=True):
                assert (one.query_lens, one.context_lens) == (other.query_lens, other.context_lens)
                assert (one.tables.dtype, one.slots.dtype) == (other.tables.dtype, other.slots.dtype)
                assert torch.equal(one.tables, other.tables)
                assert torch.equal(one.slots, other.slots)
                assert one.tables.is_contiguous()
                firsts = [sum(counts[:i]) for i in range(len(counts))]
                assert other.lens.tolist() == [firsts, counts, ends]


def test_tables_are_as_wide_as_the_pool_and_not_as_the_context(tmp_path):
    """Contexts of a thousand million tokens would take gigabytes of tables."""
    folder = tmp_path / "model"
    shutil.copytree(resolve_model("tiny").folder, folder, ignore=shutil.ignore_patterns("kvq.json"))
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"max_position_embeddings": 10**9}))
    with kvq.LLM(folder, "int4_g32", num_blocks=70) as llm:
        assert [table.shape[1] for table in llm.core.runner._tables.here] == [70]
        output = llm.generate([[5] * 900], kvq.SamplingParams(max_tokens=70 * 16 - 900, ignore_eos=True))[0]
        assert len(output.outputs[0].token_ids) == 70 * 16 - 900, "the whole pool can be one request's"
