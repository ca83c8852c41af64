"""Packed bytes to 16-bit floats without inline assembly, as GPUs do it that are not NVIDIA's: every byte."""

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from kvq.kernels.codec import e4m3
from kvq.kernels.gpu import rows

BYTES = torch.arange(256, dtype=torch.int32).to(torch.uint8)
TYPES = [(torch.bfloat16, tl.bfloat16), (torch.float16, tl.float16)]
IDS = ["bf16", "fp16"]
COMPUTE = pytest.mark.parametrize(("dtype", "compute"), TYPES, ids=IDS)


@triton.jit
def _nibbles(x_ptr, low_ptr, high_ptr, COMPUTE: tl.constexpr):  # noqa: N803
    at = tl.arange(0, 256)
    low, high = rows.nibbles(tl.load(x_ptr + at), COMPUTE)
    tl.store(low_ptr + at, low.to(tl.int16, bitcast=True))
    tl.store(high_ptr + at, high.to(tl.int16, bitcast=True))


@triton.jit
def _int8(x_ptr, out_ptr, COMPUTE: tl.constexpr):  # noqa: N803
    at = tl.arange(0, 256)
    values = rows.int8_codes(tl.load(x_ptr + at), COMPUTE)
    tl.store(out_ptr + at, values.to(tl.int16, bitcast=True))


@triton.jit
def _fp8(x_ptr, out_ptr, COMPUTE: tl.constexpr):  # noqa: N803
    at = tl.arange(0, 256)
    tl.store(out_ptr + at, rows.fp8_codes(tl.load(x_ptr + at), COMPUTE).to(tl.int16, bitcast=True))


@triton.jit
def _rotations(x_ptr, out_ptr, DIM: tl.constexpr, BLOCK: tl.constexpr):  # noqa: N803
    at = tl.arange(0, 4)[:, None] * DIM + tl.arange(0, DIM)[None, :]
    x = tl.load(x_ptr + at)
    tl.store(out_ptr + at, rows.rotate(x, 4, DIM, BLOCK))
    tl.store(out_ptr + 4 * DIM + at, rows.rotated(x, 4, DIM, BLOCK))


def outputs(count: int) -> list[Tensor]:
    return [torch.full((256,), -1, dtype=torch.int16) for _ in range(count)]


@COMPUTE
def test_nibbles_become_their_codes_less_8(dtype: torch.dtype, compute: tl.dtype) -> None:
    low, high = outputs(2)
    _nibbles[(1,)](BYTES, low, high, COMPUTE=compute)
    wide = BYTES.int()
    assert torch.equal(low.view(dtype).float(), (wide & 15) - 8.0)
    assert torch.equal(high.view(dtype).float(), (wide >> 4) - 8.0)


@COMPUTE
def test_int8_bytes_become_their_values(dtype: torch.dtype, compute: tl.dtype) -> None:
    (out,) = outputs(1)
    _int8[(1,)](BYTES, out, COMPUTE=compute)
    assert torch.equal(out.view(dtype).float(), BYTES.view(torch.int8).float())


@COMPUTE
def test_fp8_bytes_become_their_values_over_256(dtype: torch.dtype, compute: tl.dtype) -> None:
    (out,) = outputs(1)
    _fp8[(1,)](BYTES, out, COMPUTE=compute)
    finite = (BYTES & 0x7F) != 0x7F
    want = e4m3.decode(BYTES) / 256
    assert torch.equal(out.view(dtype).float()[finite], want[finite])


@pytest.mark.parametrize(
    ("dim", "block"), [(16, 4), (16, 16), (64, 2), (64, 32), (128, 128), (128, 64), (256, 256)]
)
def test_products_rotate_as_butterflies_do(dim: int, block: int) -> None:
    x = torch.randn(4, dim, generator=torch.Generator().manual_seed(0))
    out = torch.full((2, 4, dim), float("nan"))
    _rotations[(1,)](x, out, DIM=dim, BLOCK=block)
    torch.testing.assert_close(out[1], out[0], rtol=1e-5, atol=1e-5)
    assert not torch.equal(out[0], x)
