"""Rounding to GGUF's blocks: bytes of ggml's reference, and K types with less error than its search."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kvq.formats.ggml import GGML_TYPES
from kvq.kernels.codec.ggml import dequantize
from kvq.kernels.codec.ggml_round import round_rows

SIMPLE = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")
K_TYPES = ("Q4_K", "Q5_K", "Q6_K")


@pytest.fixture(scope="module")
def values() -> Tensor:
    """Rows like weights, and rows that break divisions: zeros, constants, one sign, an outlier."""
    x = torch.randn(40, 512, generator=torch.Generator().manual_seed(0)) * 0.05
    x[3], x[5, 7], x[11], x[12, :256] = 0, 3, 0.25, 0
    x[9], x[10] = x[9].abs(), -x[10].abs()
    x[13] = (x[13] * 20).round() / 20
    return x


def squares(x: Tensor, kind: str) -> Tensor:
    """Squared errors of each 256 values after rounding."""
    own = GGML_TYPES[kind]
    error = dequantize(round_rows(x, own), own).float() - x
    return error.square().view(-1, 256).sum(1)


@pytest.mark.parametrize("kind", [*SIMPLE, "F16", "BF16"])
def test_bytes_are_those_of_the_gguf_package(values, kind):
    gguf = pytest.importorskip("gguf")
    wanted = gguf.quants.quantize(values.numpy(), gguf.GGMLQuantizationType[kind])
    found = round_rows(values, GGML_TYPES[kind])
    assert found.numpy().tobytes() == wanted.tobytes()


def test_halves_are_rounded_as_defined():
    x = torch.zeros(1, 32)
    x[0, :4] = torch.tensor([127.0, 0.5, -0.5, 2.5])
    assert round_rows(x, GGML_TYPES["Q8_0"])[0, 2:6].view(torch.int8).tolist() == [127, 1, -1, 3]
    x[0, :4] = torch.tensor([-8.0, 7.0, 0.5, -0.5])  # codes are cut after half is added; 8 stands for 0
    assert (round_rows(x, GGML_TYPES["Q4_0"])[0, 2:6] & 15).tolist() == [0, 15, 9, 8]
    x[0, :4] = torch.tensor([15.0, 0.5, 1.5, 2.4])
    assert (round_rows(x, GGML_TYPES["Q4_1"])[0, 4:8] & 15).tolist() == [15, 1, 2, 2]


@pytest.mark.parametrize(("kind", "most"), [("Q4_K", 15), ("Q5_K", 31)])
def test_searched_minima_lose_less_than_the_range(values, kind, most):
    groups = values.view(-1, 32)
    low = groups.amin(1, keepdim=True).clamp_max(0)
    step = (groups.amax(1, keepdim=True) - low) / most
    d, d_min = (part.view(-1, 8).abs().amax(1) / 63 for part in (step, low))
    scale = (step.view(-1, 8) / d[:, None].clamp_min(1e-9)).round() * d[:, None]
    lowest = (low.view(-1, 8).abs() / d_min[:, None].clamp_min(1e-9)).round() * d_min[:, None]
    scale, lowest = scale.view(-1, 1), lowest.view(-1, 1)
    codes = ((groups + lowest) / scale.clamp_min(1e-9)).round().clamp(0, most)
    naive = (codes * scale - lowest - groups).square().sum()
    assert squares(values, kind).sum() < 0.9 * naive


def reference_search(x: Tensor, most: int, steps: list[float]) -> tuple[float, float]:
    """ggml's search for the scale and minimum of a group, in which all errors count alike."""
    low, high = min(0.0, float(x.min())), float(x.max())
    if low == high:
        return 0.0, -low
    best, found = torch.inf, (0.0, -low)
    for step in steps:
        codes = ((x - low) * (most + step) / (high - low)).round().clamp(0, most)
        c, cc, xc = (other.sum() for other in (codes, codes * codes, codes * x))
        det = len(x) * cc - c * c
        if det <= 0:
            continue
        scale, offset = (len(x) * xc - x.sum() * c) / det, (cc * x.sum() - c * xc) / det
        if offset > 0:
            scale, offset = xc / cc, torch.zeros(())
        if (error := float((scale * codes + offset - x).square().sum())) < best:
            best, found = error, (float(scale), -float(offset))
    return found


def reference_affine(x: Tensor, most: int, steps: list[float]) -> Tensor:
    """Values of ggml's Q4_K or Q5_K block."""
    found = [reference_search(group, most, steps) for group in x.view(8, 32)]
    scales, minima = torch.tensor(found).T
    d, d_min = scales.max() / 63, minima.max() / 63
    scales = (scales / d).nan_to_num().round().clamp_max(63) * d.half().float()
    minima = (minima / d_min).nan_to_num().round().clamp_max(63) * d_min.half().float()
    codes = ((x.view(8, 32) + minima[:, None]) / scales[:, None]).nan_to_num().round().clamp(0, most)
    return (scales[:, None] * codes - minima[:, None]).flatten()


def reference_symmetric(x: Tensor) -> Tensor:
    """Values of ggml's Q6_K block."""
    scales = []
    for group in x.view(16, 16):
        best, peak = (-1.0, 0.0), group[group.abs().argmax()]
        for step in range(-9, 10):
            codes = (group * -(32 + step / 10) / peak).nan_to_num().round().clamp(-32, 31)
            xc, cc = (group * codes).sum(), (codes * codes).sum().clamp_min(1e-30)
            best = max(best, (float(xc * xc / cc), float(xc / cc)))
        scales.append(best[1])
    whole = torch.tensor(scales)
    d = whole[whole.abs().argmax()] / -128
    whole = (whole / d).nan_to_num().round().clamp_max(127)[:, None] * d.half().float()
    return (whole * (x.view(16, 16) / whole).nan_to_num().round().clamp(-32, 31)).flatten()


@pytest.mark.parametrize("kind", K_TYPES)
def test_errors_are_below_those_of_ggmls_search(values, kind):
    x, steps = values[14:40].contiguous(), [i / 10 for i in range(-10, 11)]
    reference: dict[str, Callable[[Tensor], Tensor]] = {
        "Q4_K": lambda x: reference_affine(x, 15, steps),
        "Q5_K": lambda x: reference_affine(x, 31, steps[5:]),
        "Q6_K": reference_symmetric,
    }
    theirs = torch.stack([(reference[kind](block) - block).square().sum() for block in x.view(-1, 256)])
    ours = squares(x, kind)
    assert ours.sum() < 0.99 * theirs.sum()
    assert (ours < 1.05 * theirs).all()


@pytest.mark.parametrize("kind", [*SIMPLE, *K_TYPES])
def test_a_row_has_the_same_bytes_wherever_it_is(values, kind):
    own, x = GGML_TYPES[kind], values.repeat(20, 1)  # more than a piece
    found = round_rows(x, own)
    assert torch.equal(found, round_rows(values, own).repeat(20, 1))
    assert torch.equal(found[7:8], round_rows(x[7:8].clone(), own))


@pytest.mark.parametrize("kind", [*SIMPLE, *K_TYPES])
def test_zeros_and_constants_stay(values, kind):
    own = GGML_TYPES[kind]
    found = dequantize(round_rows(values, own), own)
    assert found.isfinite().all()
    assert not found[3].any()
    assert not found[12, :256].any()
    torch.testing.assert_close(found[11], values[11], rtol=0.04, atol=0)
