"""Chunks as sealed kvq blocks, without LMCache: what is read is what the formats make of it."""

import random

import pytest
import torch
from torch import Tensor

from kvq.errors import ConfigError, DamagedData, NumericalError
from kvq.formats import KVFormat, KVRecipe
from kvq.formats.recipe import LayerFormats
from kvq.integrations.lmcache.chunk import ChunkCodec
from kvq.kernels.codec import decode, decode_means, encode, encode_block, rotate
from tests.kernels.kit import KINDS, static_scales

LAYERS, HEADS, DIM, TOKENS = 3, 3, 48, 45


def chunk(tokens: int = TOKENS, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    x = torch.randn(2, LAYERS, tokens, HEADS * DIM, generator=torch.Generator().manual_seed(seed))
    x[..., 1::DIM] *= 4  # an outlier channel, as K has
    return x.to(dtype)


def recipe(kv: str) -> KVRecipe:
    found = KVRecipe.uniform(kv, [(DIM, DIM)] * LAYERS)
    return found.with_scales(static_scales([HEADS] * LAYERS)) if found.is_static else found


def codec(kv: str | KVRecipe = "int4", dtype: torch.dtype = torch.bfloat16, **options: int) -> ChunkCodec:
    shape = {"num_layers": LAYERS, "channels": HEADS * DIM, **options}
    return ChunkCodec(recipe(kv) if isinstance(kv, str) else kv, dtype=dtype, **shape)


def stored(own: ChunkCodec, x: Tensor, place: str = "a") -> Tensor:
    out = torch.full((own.nbytes(x.shape[2]) + 7,), 0xAB, dtype=torch.uint8)
    size = own.encode(x, out, place)
    assert size == own.nbytes(x.shape[2])
    assert out[size:].eq(0xAB).all()
    return out[:size]


def expected(x: Tensor, formats: LayerFormats, scales: dict[str, Tensor | None], part: int) -> Tensor:
    """What the reference makes of K (0) or V (1) of one layer, [tokens, channels], fp32."""
    fmt = (formats.k, formats.v)[part]
    rows, static = x.float().unflatten(-1, (HEADS, DIM)), scales["kv"[part]]
    codes, stored_scales = encode(rows, fmt, static, clip=(formats.k_clip, formats.v_clip)[part])
    found = decode(codes, stored_scales, fmt, static)
    return (rotate(found) if fmt.rotated else found).flatten(-2)


@pytest.mark.parametrize("kv", [*KINDS, "int4_g24_rot", "int2_g12", "int3/int5"])
def test_every_format_comes_back_as_the_reference_makes_it(kv: str) -> None:
    own, x, formats = codec(kv), chunk(), recipe(kv)
    out = torch.full_like(x, float("nan"))
    own.decode(stored(own, x), out, "a")
    for index, layer in enumerate(formats.layers):
        for part, fmt in enumerate((layer.k, layer.v)):
            static = None
            if fmt.is_static:
                assert formats.static_scales is not None
                found = formats.static_scales.layers[index].scales("kv"[part], fmt)
                static = torch.tensor(found)[:, None]
            wanted = expected(x[part, index], layer, {"kv"[part]: static}, part)
            torch.testing.assert_close(out[part, index].float(), wanted, rtol=2**-7, atol=1e-5)


@pytest.mark.parametrize("kv", ["int4_per_channel/int4", "int8_per_channel/fp8", "int3_mean/int2"])
def test_formats_of_whole_blocks_fill_the_last_one_with_the_last_token(kv: str) -> None:
    own, x, formats = codec(kv), chunk(), recipe(kv).layers[0]
    x[0, :, :, ::7] += 50  # what keys of some models have in common, K per token would spend its codes on it
    out = torch.empty_like(x)
    own.decode(stored(own, x), out, "a")
    padded = torch.cat((x, x[:, :, -1:].expand(-1, -1, -TOKENS % 32, -1)), dim=2).float()
    for part, fmt in enumerate((formats.k, formats.v)):
        blocks = padded[part].unflatten(-1, (HEADS, DIM)).unflatten(1, (-1, 32)).transpose(2, 3)
        for layer, own_blocks in enumerate(blocks):  # [blocks, heads, 32, dim]
            wanted = torch.cat([read_block(block, fmt) for block in own_blocks], dim=1)[:, :TOKENS]
            found = out[part, layer].unflatten(-1, (HEADS, DIM)).transpose(0, 1)
            torch.testing.assert_close(found.float(), wanted, rtol=2**-7, atol=1e-4)
    assert (out[0] - x[0]).abs().max() < (8 if "int3" in kv else 1)


def read_block(rows: Tensor, fmt: KVFormat) -> Tensor:
    """What is read of one block's rows, [heads, block_size, dim], fp32."""
    codes, scales, means = encode_block(rows, fmt)
    found = decode(codes, scales, fmt)
    if means is not None:
        found += decode_means(means, rows.shape[-1])[..., None, :]
    return rotate(found) if fmt.rotated else found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("tokens", [1, 31, 32, 33, 63])
def test_any_number_of_tokens_in_any_order(dtype: torch.dtype, tokens: int) -> None:
    """A pool that held a longer chunk leaves nothing of it in a shorter one's bytes."""
    own, x = codec("int8", dtype), chunk(tokens, dtype)
    fresh = stored(own, x)
    stored(own, chunk(100, dtype, seed=1))
    assert torch.equal(stored(own, x), fresh)
    out = torch.empty_like(x)
    own.decode(fresh, out, "a")
    step = x.float().unflatten(-1, (HEADS, DIM)).abs().amax(-1) / 127
    error = (out.float() - x.float()).unflatten(-1, (HEADS, DIM)).abs().amax(-1)
    assert (error <= step * 0.51 + step * 127 * 2**-8 + 2**-20).all()


def test_float_formats_are_exact_and_int4_is_a_quarter() -> None:
    x = chunk(64)
    exact, small = codec("bf16"), codec("int4")
    out = torch.empty_like(x)
    exact.decode(stored(exact, x), out, "a")
    assert torch.equal(out, x)
    assert x.nbytes / (small.nbytes(64) - small.nbytes(0)) > 3.3  # 4 bits, a scale and a minimum a row


def test_every_single_flipped_bit_is_found() -> None:
    own, x = codec("int4"), chunk(2)
    content = stored(own, x)
    out = torch.full_like(x, 7.0)
    header = own.nbytes(0)
    every = [*range(8 * header), *random.Random(1).sample(range(8 * header, 8 * content.numel()), 500)]
    for bit in every:
        broken = content.clone()
        broken[bit // 8] ^= 1 << (bit % 8)
        with pytest.raises(DamagedData, match="stored chunk"):
            own.decode(broken, out, "a")
    assert out.eq(7.0).all()
    own.decode(content, out, "a")
    assert not out.eq(7.0).all()


def test_cut_and_lengthened_bytes_are_refused() -> None:
    own, x = codec("int4"), chunk(2)
    content, out = stored(own, x), torch.empty_like(x)
    for size in (0, 1, 79, 80, 200, own.nbytes(0), content.numel() - 1):
        with pytest.raises(DamagedData, match="cut short"):
            own.decode(content[:size], out, "a")
    with pytest.raises(DamagedData, match="too long"):
        own.decode(torch.cat((content, content[:1])), out, "a")


def test_what_was_made_for_something_else_is_refused_with_the_reason() -> None:
    own, x = codec("int4"), chunk()
    content = stored(own, x)
    with pytest.raises(DamagedData, match="belongs to another chunk"):
        own.decode(content, torch.empty_like(x), "b")
    with pytest.raises(DamagedData, match="another format or recipe"):
        codec("int8").decode(content, torch.empty_like(x), "a")
    with pytest.raises(DamagedData, match="another number of layers, tokens"):
        own.decode(content, torch.empty_like(x[:, :, 1:]), "a")
    with pytest.raises(DamagedData, match="another dtype"):
        codec("int4", torch.float16).decode(content, torch.empty_like(x, dtype=torch.float16), "a")
    newer = content.clone()
    newer[8] = 2
    with pytest.raises(DamagedData, match="version 2, this kvq reads 1"):
        own.decode(newer, torch.empty_like(x), "a")


def test_infinite_rows_are_not_stored() -> None:
    own, x = codec("int4"), chunk()
    x[1, 2, 3, 4] = float("inf")
    with pytest.raises(NumericalError, match="layer 2 hold NaN or infinity"):
        own.encode(x, torch.empty(own.nbytes(TOKENS), dtype=torch.uint8))


def test_chunks_and_options_that_do_not_fit_are_refused() -> None:
    own = codec("int4")
    room = torch.empty(own.nbytes(TOKENS), dtype=torch.uint8)
    with pytest.raises(ConfigError, match="must be \\[2, 3, tokens, 144\\]"):
        own.encode(chunk()[:1], room)
    with pytest.raises(ConfigError, match="must be bf16"):
        own.encode(chunk(dtype=torch.float16), room)
    with pytest.raises(ConfigError, match="takes"):
        own.encode(chunk(), room[1:])
    with pytest.raises(ConfigError, match="give head_dim"):
        ChunkCodec("int4", num_layers=1, channels=64, dtype=torch.bfloat16)
    with pytest.raises(ConfigError, match="multiple of head_dim"):
        ChunkCodec("int4", num_layers=1, channels=65, dtype=torch.bfloat16, head_dim=64)
    with pytest.raises(ConfigError, match="must be bf16, fp16, fp32"):
        ChunkCodec("int4", num_layers=1, channels=64, dtype=torch.float64, head_dim=64)
    for kv in ("int4+recent=64", "int8+sinks=4"):
        with pytest.raises(ConfigError, match=r"a chunk may lie anywhere in a text; leave out"):
            ChunkCodec(kv, num_layers=1, channels=64, dtype=torch.bfloat16, head_dim=64)
    with pytest.raises(ConfigError, match="recipe is for 3 layers"):
        ChunkCodec(recipe("int4"), num_layers=2, channels=144, dtype=torch.bfloat16)
