"""What every backend writes into blocks is what the specification says, as the checker computes it."""

import warnings

import numpy as np
import pytest
import torch

from kvq.cache.digests import layout_digest
from kvq.cache.pool import PoolBytes
from kvq.formats import KVRecipe, parse_format
from kvq.kernels import Device, KernelSpec, SequenceBatch, StagedBatch, StagedKV, select
from kvq.kernels.codec import decode, encode_block
from kvq.layout import plan_layout
from tests.kernels.kit import geometry, poisoned_cache
from tools.make_vectors import bytes_of, described, inputs, random_rows

DIMS = {"int3": (64, 80), "int5": (80, 64)}  # K and V; rows of 60 elements don't fit these
BACKENDS = ("reference", "cpu", "triton")
DEVICES = {"triton": Device(type="cuda", name="H200", capability=(9, 0))}
FORMATS = (
    *("fp32", "bf16", "fp16", "fp8", "int8", "fp8_per_head", "int8_per_head", "fp8_rot", "int8_rot"),
    *("int2_g10", "int4_g10", "int6_g10", "int3_g8_rot", "int5_g8", "int4_g10_rot"),
)
NARROW = ("int2", "int3", "int4", "int5", "int6", "int4_g10_s8", "int3_g8_s8")
STAGED = ("int4_mean", "int3_mean/int5_mean", "int8/int4_mean", "int2_mean+sinks=4", "int4+recent=3")
CHANNELS = ("int4_per_channel/int4", "int2_per_channel/int8_per_channel+recent=3", "int3_per_channel_rot")


def kernel(operation: str, backend: str, spec: KernelSpec):
    return select(operation, spec, DEVICES.get(backend, Device(type="cpu", name="cpu")), backend).run


def dims_of(kv: str) -> tuple[int, int]:
    return DIMS.get(kv[:4], (60, 80))


def check_pool(spec, layout, group: int, pool: np.ndarray, expected: dict[int, list[bytes]]) -> None:
    """Hold some blocks of a pool of one layer to the regions that the checker made."""
    own = spec["layouts"].read_layout(described(layout)).groups[group]
    for block, regions in expected.items():
        at = block * own.block_bytes
        parts = own.numbers["layers"][0]["regions"]
        for (offset, _, nbytes), name, held in zip(parts, spec["layouts"].PARTS, regions, strict=True):
            found = pool[at + offset : at + offset + nbytes].tobytes()
            spec["check"].same(found, held, f"block {block}, {name}")


@pytest.mark.parametrize("kv", [*FORMATS, *NARROW])
@pytest.mark.parametrize("backend", BACKENDS)
def test_written_rows_are_those_of_the_specification(spec, backend: str, kv: str) -> None:
    dims = dims_of(kv)
    cache = poisoned_cache(kv, [dims], kv_heads=2, block_size=8, num_blocks=3)
    view = cache.layer(0)
    run = kernel("write_kv", backend, KernelSpec(formats=view.formats, q_heads=2, kv_heads=2, block_size=8))
    k, v = (torch.stack((inputs(dim), inputs(dim).flip(0)), dim=1) for dim in dims)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # numpy reports what saturates on purpose
        run(k, v, view, torch.arange(8, 16))
    layout = spec["layouts"].read_layout(described(cache.layout))
    rows = (x.transpose(0, 1).contiguous().numpy() for x in (k, v))
    expected = spec["layouts"].block_regions(layout, 0, 0, *rows)
    check_pool(spec, cache.layout, 0, cache.pool(0).numpy(), {1: expected})


@pytest.mark.parametrize(
    ("backend", "kv"),
    [(backend, kv) for backend in BACKENDS for kv in (*STAGED, *CHANNELS)],
)
def test_sealed_blocks_are_those_of_the_specification(spec, backend: str, kv: str) -> None:
    dims = dims_of(kv)
    model = geometry([dims], kv_heads=2)
    layout = plan_layout(model, KVRecipe.uniform(kv, [dims]), block_size=5)
    pools = [PoolBytes(group, 4, torch.device("cpu")) for group in layout.groups]
    sealed, recent, *sinks = (pool.layer(0, layout.recipe) for pool in pools)
    k, v = (random_rows(dim, 4, 2, 5, dim).bfloat16() + 2 for dim in dims)
    recent.k.codes.copy_(k)
    recent.v.codes.copy_(v)
    staged = StagedKV(sealed=sealed, recent=recent, sinks=(sinks or [None])[0], exact=layout.exact)
    own = KernelSpec(formats=sealed.formats, q_heads=2, kv_heads=2, block_size=5, is_staged=True)
    batch = SequenceBatch.of([[2, 0, 3, 1]], [], [18], [18], torch.device("cpu"))
    kernel("seal", backend, own)(staged, StagedBatch(sealed=batch, recent=batch, sinks=batch))
    checked = spec["layouts"].read_layout(described(layout))
    for group in (0, 2) if sinks else (0,):
        blocks = [2] if group else [0, 3] if sinks else [2, 0, 3]
        rows = {b: (k[b].float().numpy(), v[b].float().numpy()) for b in blocks}
        expected = {b: spec["layouts"].block_regions(checked, group, 0, *rows[b]) for b in blocks}
        check_pool(spec, layout, group, pools[group].memory.numpy(), expected)


def test_layouts_of_the_checker_are_those_of_kvq(spec) -> None:
    for kv in (
        "fp32",
        "int8/int4",
        "int3_mean/int5+recent=9",
        "k8v4+sinks=1",
        "int4_per_channel/int8_per_channel",
    ):
        model = geometry([(64, 80), (128, 64), (96, 96)], windows=[7, None, 30])
        layout = plan_layout(model, KVRecipe.uniform(kv, model.head_dims), block_size=7)
        own = spec["layouts"].read_layout(described(layout))
        assert (own.digest(), own.recipe_digest()) == (layout_digest(layout), layout.recipe.digest())


@pytest.mark.parametrize("dim", [60, 128])
@pytest.mark.parametrize("code", ["int2", "int3", "int4", "int5", "int6", "int8"])
def test_channels_of_the_checker_are_those_of_the_reference(spec, code: str, dim: int) -> None:
    """On numbers of any size: random bits of fp32, NaN and infinity among them."""
    dim = dim + 4 if code in ("int3", "int5") and dim % 8 else dim
    fmt, own = parse_format(f"{code}_per_channel", dim), spec["names"].parse(f"{code}_per_channel", dim)
    source = torch.Generator().manual_seed(dim)
    for size in (1, 16, 32):
        bits = torch.randint(-(2**31), 2**31, (5, size, dim), generator=source, dtype=torch.int64)
        usual = torch.randn(5, size, dim, generator=source) * 2.0 ** torch.randint(
            -12, 13, (5, 1, dim), generator=source
        )
        for x in (bits.to(torch.int32).view(torch.float32), usual, usual + 100 * usual[:, :1]):
            codes, scales, _ = encode_block(x, fmt)
            found = spec["codec"].encode_block(x.numpy(), own)
            spec["check"].same(bytes_of(codes), found[0].tobytes(), "codes")
            spec["check"].same(bytes_of(scales), found[1].tobytes(), "scales")
            rows = spec["codec"].decode(found[0], found[1], own)
            spec["check"].same(bytes_of(decode(codes, scales, fmt)), rows.tobytes(), "rows")
