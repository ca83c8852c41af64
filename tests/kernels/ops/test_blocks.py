"""Operators over blocks: torch's own checks of them, and the kernels' results inside one graph."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.library import opcheck

from kvq.errors import ConfigError
from kvq.kernels import AttentionOptions, SequenceBatch, ops, select
from kvq.kernels.ops.blocks import _kernel, _paged, _rows
from tests.kernels.kit import poisoned_cache, rows_like_kv

SLOTS = torch.tensor([5, 6, 7, 8, 9, 20, 21])  # blocks 1 and 4
TABLES = torch.tensor([[1, 4, 0]], dtype=torch.int32)
LENS = [7], [7]
KV = "int4/int8"


def blocks(kv: str, dims: tuple[int, int]) -> dict[str, Tensor]:
    """Codes and scales of 3 KV heads in memory of their own, all poison."""
    layer = poisoned_cache(kv, [dims], q_heads=6).layer(0)
    found = {"k_codes": layer.k.codes, "k_scales": layer.k.scales}
    found |= {"v_codes": layer.v.codes, "v_scales": layer.v.scales}
    return {name: None if x is None else x.clone() for name, x in found.items()}


def step(dims: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor]:
    """Queries of 6 heads, keys and values of 3, 7 tokens."""
    k_dim, v_dim = dims
    return rows_like_kv(7, 6, k_dim, 1), rows_like_kv(7, 3, k_dim, 2), rows_like_kv(7, 3, v_dim, 3)


def written_and_attended(q: Tensor, k: Tensor, v: Tensor, own: dict[str, Tensor]) -> Any:
    bad = ops.write_kv(k, v, SLOTS, **own, kv=KV)
    out, lse = ops.attend(q * 1.0, **own, tables=TABLES, query_lens=[7], context_lens=[7], kv=KV, scale=0.125)
    dense = ops.gather_dense(**own, tables=TABLES, start=1, end=7, kv=KV)
    return bad, out + 0.0, lse, *dense


@pytest.mark.parametrize(("kv", "dims"), [("int4/int8", (64, 48)), ("bf16", (60, 80)), ("k8v4", (48, 64))])
def test_operators_give_what_kernels_give(kv: str, dims: tuple[int, int]) -> None:
    (q, k, v), own, theirs = step(dims), blocks(kv, dims), blocks(kv, dims)
    bad = ops.write_kv(k, v, SLOTS, **own, kv=kv)
    out, lse = ops.attend(q, **own, tables=TABLES, query_lens=[7], context_lens=[7], kv=kv, scale=0.125)
    dense = ops.gather_dense(**own, tables=TABLES, start=2, end=7, kv=kv)
    k_rows, v_rows = (_rows(theirs[f"{x}_codes"], theirs[f"{x}_scales"], None) for x in "kv")
    paged = _paged(k_rows, v_rows, kv)
    assert (paged.formats.k_head_dim, paged.formats.v_head_dim) == dims
    assert torch.equal(bad, _kernel("write_kv", paged, 3, "auto")(k, v, paged, SLOTS))
    batch = SequenceBatch.of([[1, 4, 0]], SLOTS.tolist(), *LENS, torch.device("cpu"))
    want = _kernel("attend", paged, 6, "auto")(q, paged, batch, AttentionOptions(scale=0.125))
    rows = _kernel("gather_dense", paged, 3, "auto")(paged, TABLES, 2, 7)
    for found, wanted in zip((out, lse, *dense), (*want, *rows), strict=True):
        assert torch.equal(found, wanted)


def test_write_attend_and_gather_are_one_graph() -> None:
    dims = (64, 48)
    inputs, own, theirs = step(dims), blocks(KV, dims), blocks(KV, dims)
    want = written_and_attended(*inputs, own)
    compiled = torch.compile(written_and_attended, fullgraph=True, backend="aot_eager")
    for found, wanted in zip(compiled(*inputs, theirs), want, strict=True):
        assert torch.equal(found, wanted)
    for name, x in own.items():
        assert torch.equal(x.view(torch.uint8), theirs[name].view(torch.uint8)), f"{name}: mutation got lost"


def checked() -> dict[str, tuple[Any, ...]]:
    """Every operator with arguments."""
    dims = (64, 48)
    (q, k, v), own = step(dims), blocks(KV, dims)
    ops.write_kv(k, v, SLOTS, **own, kv=KV)
    tensors = tuple(own.values())
    return {
        "write_kv": (k, v, SLOTS, *blocks(KV, dims).values(), KV),  # unwritten: writing again changes nothing
        "attend": (q, *tensors, TABLES, *LENS, KV, 0.125),
        "gather_dense": (*tensors, TABLES, 1, 7, KV),
        "merge_partials": (torch.randn(2, 5, 3, 16), torch.randn(2, 5, 3), torch.randn(3)),
    }


@pytest.mark.parametrize("name", ["write_kv", "attend", "gather_dense", "merge_partials"])
def test_torch_finds_no_fault_with_operators(name: str) -> None:
    opcheck(getattr(ops, name), checked()[name])


def test_merged_parts_are_the_kernels() -> None:
    outs, lses, sinks = checked()["merge_partials"]
    spec = ops.blocks._spec("fp32", (16, 16), (3, 3), 16)
    want = select("merge_partials", spec, ops.blocks._device(outs.device)).run(outs, lses, sinks)
    for found, wanted in zip(ops.merge_partials(outs, lses, sinks), want, strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("kv", ["int4_mean", "int8+recent=5"])
def test_what_only_whole_blocks_can_hold_is_refused(kv: str) -> None:
    inputs, own = step((64, 48)), blocks("int4/int4", (64, 48))
    with pytest.raises(ConfigError, match=r"an operator over blocks can't do|unknown KV"):
        ops.write_kv(*inputs[1:], SLOTS, **own, kv=kv)
