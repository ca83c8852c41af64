"""The dense backend: what it refuses, and its bytes. The rest is the conformance suite's."""

import pytest
import torch

from kvq.cache import memory
from kvq.cache.dense_backend import DenseCache
from kvq.errors import ConfigError, OutOfMemory
from kvq.formats import KVRecipe
from kvq.layout import plan_layout
from tests.kernels.kit import CPU, geometry, rows_like_kv

DIMS = [(60, 48), (48, 60), (64, 64)]
WINDOWS = [None, 16, None]


def dense(kv: str = "bf16", *, num_blocks: int = 3) -> DenseCache:
    """Two layer groups of blocks of 5 tokens."""
    model = geometry(DIMS, windows=WINDOWS)
    recipe = KVRecipe.uniform(kv, DIMS)
    return DenseCache(
        plan_layout(model, recipe, block_size=5),
        num_blocks=[num_blocks] * 2,
        device=CPU,
    )


@pytest.mark.parametrize("kv", ["int8", "bf16/fp16", "fp32_rot"])
def test_it_refuses_what_it_can_not_store(kv: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"stores fp32, bf16 or fp16 for all layers, got {kv}; use the kvq"
    ):
        dense(kv)


@pytest.mark.parametrize(("kv", "size"), [("fp32", 4), ("bf16", 2), ("fp16", 2)])
def test_its_bytes_are_those_of_its_rows(kv: str, size: int) -> None:
    cache = dense(kv)
    assert cache.nbytes == 3 * 5 * 3 * sum(k + v for k, v in DIMS) * size


def test_what_does_not_fit_is_refused_before_anything_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = dense()
    with pytest.raises(OutOfMemory, match=r"needs .*iB on cpu, but .* is free"):
        dense(num_blocks=10**12)
    monkeypatch.setattr(memory, "available_bytes", lambda _: 2 * cache.nbytes - 1)
    with pytest.raises(OutOfMemory):
        cache.grow([6, 6])
    assert cache.num_blocks == [3, 3]
    monkeypatch.setattr(memory, "available_bytes", lambda _: 2 * cache.nbytes)
    cache.grow([6, 6])
    assert cache.num_blocks == [6, 6]


def test_values_beyond_the_dtype_saturate_and_others_are_stored_as_zero() -> None:
    cache = dense("fp16")
    k, v = rows_like_kv(1, 3, 60), rows_like_kv(1, 3, 48)
    k[0, 0, 0], k[0, 0, 1] = 1e30, float("nan")
    assert cache.stores[0].write(k, v, torch.tensor([7])).tolist() == [True]
    stored = cache.read_block(0, 1).view(torch.float16)[2 * 3 * 60 :][:2]
    assert stored.tolist() == [65504.0, 0.0]
