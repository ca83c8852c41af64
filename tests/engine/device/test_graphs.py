"""Decode graphs: static buffers, padding and upper limits give what a plain step gives.

On a CPU nothing can be captured; the work that a graph would repeat is repeated as it is.
"""

import gc
from dataclasses import replace

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import kvq
from kvq.cache.stores.base import LayerStore
from kvq.engine.device.graphs import DecodeGraphs, Tables
from kvq.engine.device.runner import Runner
from kvq.engine.requests.request_options import RequestOptions


class Watched:
    """A cache whose stores read lengths as reference kernels of a GPU do: from the device."""

    def __init__(self, cache):
        self._cache = cache
        self.written: list[int] = []
        self.stores = {i: WatchedStore(store, self.written) for i, store in cache.stores.items()}

    def __getattr__(self, name):
        return getattr(self._cache, name)


class WatchedStore(LayerStore):
    """Notes the slots that are written, and checks the lengths that attention gets."""

    def __init__(self, store, written):
        self._store = store
        self._written = written

    def batch_of(self, batches):
        return self._store.batch_of(batches)

    def write(self, k, v, slots):
        self._written += slots.tolist()
        return self._store.write(k, v, slots)

    def attend(self, q, batch, options):
        first, new, context = batch.lens.tolist()
        assert first == list(range(len(first)))
        assert set(new) == {1}
        assert max(context) <= batch.context_lens[0]
        return self._store.attend(q, replace(batch, context_lens=tuple(context)), options)


@pytest.mark.parametrize("kv", ["fp32", "int4_g32"])
@pytest.mark.parametrize("count", [2, 3, 7])
def test_steps_through_static_buffers_equal_plain_ones(tiny, kv, count):
    """Every step is run twice: writes are repeated into the same slots."""
    options = {"num_blocks": 24, "max_num_seqs": 7, "max_context": 128, "prefix_caching": False}
    llm = kvq.LLM(tiny, kv, async_scheduling=False, **options)
    runner = llm.core.runner
    graphs, cache = graphs_over(runner, spare=24)
    checked = []

    def forward(plan, **options):
        output = Runner.forward(runner, plan, **options)
        if graphs.takes(plan):
            cache.written.clear()
            logits, bad = graphs.run(plan)
            torch.testing.assert_close(logits, output.logits, rtol=1e-4, atol=1e-4)
            assert not bad.any()
            size = next(s for s in (2, 4, 7) if s >= count)
            spare = [slot for slot in cache.written if slot >= 24 * 32]
            assert len(spare) == (size - len(plan.branches)) * len(tiny.geometry.layers)
            checked.append(len(plan.branches))
        return output

    runner.forward = forward
    prompts = [[5 + i] * (3 + 11 * i) for i in range(count)]
    params = kvq.SamplingParams(max_tokens=6, ignore_eos=True)
    llm.generate(prompts, params)
    assert checked == [count] * 5
    llm.close()


def test_hidden_states_come_out_of_a_graph_if_they_are_wanted(tiny):
    llm = kvq.LLM(tiny, "fp32", num_blocks=24, max_num_seqs=7, max_context=128, prefix_caching=False)
    runner = llm.core.runner
    runner.keeps_hidden = True
    graphs, _ = graphs_over(runner, spare=24, keeps_hidden=True)
    checked = []

    def forward(plan, **options):
        output = Runner.forward(runner, plan, **options)
        assert output.hidden.shape == (plan.num_tokens, tiny.geometry.hidden_size)
        if graphs.takes(plan):
            graphs.hidden.fill_(torch.nan)
            graphs.run(plan)
            torch.testing.assert_close(graphs.hidden[:3], output.hidden, rtol=1e-4, atol=1e-4)
            checked.append(plan.number)
        return output

    runner.forward = forward
    llm.generate([[5, 6], [7] * 20, [8] * 40], kvq.SamplingParams(max_tokens=4, ignore_eos=True))
    assert len(checked) == 3
    assert graphs_over(runner, spare=25)[0].hidden is None
    llm.close()


def graphs_over(runner, *, spare, capture=lambda work: (work(), work)[1], keeps_hidden=False):
    """Decode graphs over a runner's blocks, enlarged by a spare one."""
    runner.cache.grow([spare + 1])
    tables = [torch.cat([t, torch.full_like(t[:1], spare)]) for t in runner._tables.there]
    runner._tables = Tables(tables, [table.numpy() for table in tables], 128)
    cache = Watched(runner.cache)
    graphs = DecodeGraphs(
        runner.model,
        cache,
        runner._tables,
        max_num_seqs=7,
        keeps_hidden=keeps_hidden,
        capture=capture,
    )
    return graphs, cache


class Outside(TorchDispatchMode):
    """Notes whose memory operations read that none of them made."""

    def __init__(self) -> None:
        super().__init__()
        self._made: set[int] = set()
        self.read: list[StorageWeakRef] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        mine = {x.untyped_storage()._cdata for x in given} - self._made
        self.read += [
            StorageWeakRef(x.untyped_storage()) for x in given if x.untyped_storage()._cdata in mine
        ]
        result = func(*args, **(kwargs or {}))
        made = [x for x in tree_leaves(result) if isinstance(x, torch.Tensor)]
        self._made |= {x.untyped_storage()._cdata for x in made} - mine
        return result


def test_what_a_graph_reads_outlives_its_capture(tiny):
    """A graph knows addresses only: nobody else keeps for it what the captured work held."""
    llm = kvq.LLM(tiny, "fp32", num_blocks=24, max_num_seqs=7, max_context=128)
    outside = Outside()

    def capture(work):
        work()
        with outside:
            work()
        return lambda: None

    graphs, _ = graphs_over(llm.core.runner, spare=24, capture=capture)
    gc.collect()
    assert len(outside.read) > 100
    assert not any(storage.expired() for storage in outside.read)
    assert graphs is not None


def test_only_steps_of_decodes_that_want_a_token_are_taken(tiny):
    llm = kvq.LLM(tiny, "fp32", num_blocks=24, max_num_seqs=7, max_context=128)
    graphs, _ = graphs_over(llm.core.runner, spare=24)
    core = llm.core
    options = RequestOptions(params=kvq.SamplingParams(max_tokens=3, ignore_eos=True))
    core.submit(core.intake.new_job([1, 2, 3], options))
    prefill = core.scheduler.schedule(0.0)
    assert not graphs.takes(prefill)
    core.runner.prepare(prefill)
    core.scheduler.commit(prefill, [[7]])
    assert graphs.takes(core.scheduler.schedule(0.0))
