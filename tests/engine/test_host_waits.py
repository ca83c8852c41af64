"""No step makes the host wait, and graphs hold only what they can repeat; on a GPU that isn't there."""

import pytest
import torch

from kvq.cache import KVCache
from kvq.engine.graphs import DecodeGraphs
from tests.engine.gpu_kit import model_on
from tests.engine.guard import no_host_waits
from tests.engine.imaginary_gpu import imaginary_gpu


@pytest.fixture
def gpu():
    with imaginary_gpu() as there:
        yield there


@pytest.mark.xfail(strict=True, reason="attend's tiles are made from numbers of the host")
@pytest.mark.parametrize("family", ["tiny", "qwen3", "gpt_oss"])
def test_the_work_of_graphs_is_all_on_the_device_and_leaves_only_logits(gpu, family):
    model = model_on(gpu, family)
    groups = model.layout.groups
    cache = KVCache(model.layout, num_blocks=[5] * len(groups), device=gpu.device)
    tables = [torch.zeros(3, 4, dtype=torch.int32, device=gpu.device) for _ in groups]
    kept = []

    def capture(work):
        work()  # what is compiled or made once
        gpu.launches.clear()
        with no_host_waits(gpu, captured=True) as made:
            work()
        kept.append(made)
        return work

    graphs = DecodeGraphs(model, cache, tables, max_num_seqs=2, max_context=100, capture=capture)
    assert len(kept) == 2
    layers = len(model.geometry.layers)
    assert [launch.kernel for launch in gpu.launches].count("_write_kernel") == layers
    for made in kept:
        assert made.left(besides=list(graphs._logits.values())) == []
