"""How many kernels a layer takes in a decode step on a GPU, counted on one that isn't there."""

from collections import Counter
from itertools import chain

import numpy as np
import pytest
import torch

from kvq.cache import KVCache
from kvq.engine.device.graphs import DecodeGraphs, Tables
from tests.engine.gpu_kit import model_on
from tests.engine.imaginary_gpu import ImaginaryGPU, imaginary_gpu
from tests.engine.launches import Launches

MOST_DENSE = 14
# Of a layer: two norms, heads, attention and, but for short windows, its merge, activation; then products.
# Experts are transformers' own code.
TRITON = {"llama": 6, "qwen3": 6, "gemma2": 5.5, "mixtral": 4, "gpt_oss": 4.5}
TORCH = {"llama": 4, "qwen3": 4, "gemma2": 4, "mixtral": 22, "gpt_oss": 29}
# Of a layer's attention: one kernel over blocks of all forms, a merge, and one that seals blocks.
STORED = "bf16", "fp8", "int4_g8"
STAGED = (
    *(f"int{bits}_per_channel/int{bits}" for bits in (8, 6, 5, 4, 3, 2)),
    *("int4_mean", "int3_mean", "int4+recent=40", "int4_mean+sinks=4"),
)
ATTENTION = {"attend_kernel": 1, "merge_kernel": 1}
OTHERS = {"_add_norm_kernel": 2, "rope_write_kernel": 1, "_gated_kernel": 1, "mm": 4}  # of a Llama's layer


def launched(gpu: ImaginaryGPU, family: str, layers: int, kv: str = "int4") -> tuple[list[str], list[str]]:
    """Triton's and torch's kernels of one decode step of a model of so many layers."""
    types = ["sliding_attention", "full_attention"] * (layers // 2)
    sized = {"layer_types": types} if family in ("gemma2", "gpt_oss") else {"num_hidden_layers": layers}
    if family == "qwen3":  # as its models are: without windows
        sized |= {"use_sliding_window": False}
    model = model_on(gpu, family, kv, options=sized)
    groups = model.layout.groups
    cache = KVCache(model.layout, num_blocks=[5] * len(groups), device=gpu.device)
    tables = [torch.zeros(3, 4, dtype=torch.int32, device=gpu.device) for _ in groups]
    torchs: list[str] = []

    def capture(work):
        work()
        gpu.launches.clear()
        with Launches() as found:
            work()
        assert found.copies == 0
        torchs[:] = found.kernels
        return work

    known = Tables(there=tables, here=[np.zeros((3, 4), np.int32) for _ in groups], max_context=131_072)
    DecodeGraphs(model, cache, known, max_num_seqs=1, capture=capture)
    return [launch.kernel for launch in gpu.launches], torchs


@pytest.mark.parametrize("family", sorted(TRITON))
def test_a_layer_takes_few_kernels(family):
    with imaginary_gpu() as gpu:
        few, more = (launched(gpu, family, layers) for layers in (2, 4))
    triton, torchs = ((len(b) - len(a)) / 2 for a, b in zip(few, more, strict=True))
    assert (triton, torchs) == (TRITON[family], TORCH[family]), more
    assert family in ("mixtral", "gpt_oss") or triton + torchs <= MOST_DENSE


@pytest.mark.daily(3)
@pytest.mark.parametrize("kv", [*STORED, *STAGED])
def test_attention_over_every_default_format_takes_few_kernels(kv: str) -> None:
    with imaginary_gpu() as gpu:
        few, more = (Counter(chain(*launched(gpu, "llama", layers, kv))) for layers in (1, 2))
    assert dict(more - few) == ATTENTION | OTHERS | ({"_seal_kernel": 1} if kv in STAGED else {})
    assert more["list_kernel"] == 1
