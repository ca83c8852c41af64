"""Linear layers over codes: right in every format and shape, whatever lies around and beside a row."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from kvq.errors import ConfigError
from kvq.formats.weights import Inputs, parse_weight_format
from kvq.kernels import Device, LinearSpec, QuantizedWeight, select
from kvq.kernels.linear.cpu import CpuLinear
from kvq.kernels.native import library
from tests.kernels.backends import NAMES, kernel
from tests.kernels.linear.kit import (
    FORMATS,
    PER_CHANNEL,
    check_broken_row,
    check_surroundings,
    check_threads,
    error,
    exact,
    rows_of,
    weight_of,
)

CPU = Device(type="cpu", name="cpu")
NAMED = [name for name in NAMES if name != "triton"]
SHAPES = [(1, 192), (17, 192), (63, 384), (40, 1152), (100, 576)]
NAN, INF = float("nan"), float("inf")

linear: Any = None  # the implementation under test


@pytest.fixture(autouse=True, params=NAMED)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every test below holds for every implementation."""
    monkeypatch.setitem(globals(), "linear", kernel("linear_w8", request.param, monkeypatch))
    name: str = request.param
    return name


def formats_for(inputs: int) -> list[str]:
    """Those whose groups divide that many inputs."""
    sizes = {name: parse_weight_format(name).group_size for name in ALL}
    return [name for name, size in sizes.items() if size is None or inputs % size == 0]


ALL = (*FORMATS, *PER_CHANNEL)


def allowed(name: str) -> float:
    """Inputs as they are become 16-bit numbers beside integer codes; all else is exact but for sums."""
    return 2e-6 if name.startswith("fp8") or name.endswith("a8") else 2e-4


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products_are_those_of_the_dequantized_weight(shape: tuple[int, int]) -> None:
    for name in formats_for(shape[1]):
        weight, x = weight_of(name, *shape), rows_of(19, shape[1])
        got, want = linear(weight)(x), exact(weight, x)
        assert got.shape == want.shape
        assert got.dtype == torch.float32
        assert error(got, want) < allowed(name), name


@pytest.mark.parametrize(("outputs", "inputs"), [(1, 1), (17, 63), (5, 60), (33, 130), (16, 4), (2, 2050)])
def test_no_shape_is_odd(outputs: int, inputs: int) -> None:
    for name in ("int8", "int8_asym", "w8a8", "fp8", "fp8_a8", *(PER_CHANNEL if inputs % 2 == 0 else ())):
        weight, x = weight_of(name, outputs, inputs), rows_of(13, inputs)
        assert error(linear(weight)(x), exact(weight, x)) < allowed(name), name


@pytest.mark.parametrize("name", ["int8", "int8_g32", "int4", "int4_g64_asym", "w8a8", "w4a8", "fp8"])
def test_inputs_may_lie_in_another_order(name: str) -> None:
    weight, x = weight_of(name, 50, 256, ordered=True), rows_of(9, 256)
    assert error(linear(weight)(x), exact(weight, x)) < allowed(name)
    if weight.fmt.inputs is Inputs.FULL:
        assert error(linear(weight)(x), x.double() @ weight.dequantize().double().T) < allowed(name)


@pytest.mark.parametrize("name", ["int8", "int4_g64_asym", "w4a8", "fp8"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_inputs_and_scales(name: str, dtype: torch.dtype, backend: str) -> None:
    weight, x = weight_of(name, 50, 384, dtype=dtype), rows_of(9, 384).to(dtype)
    got = linear(weight)(x)
    assert got.dtype == dtype
    # The reference rounds the weight to the scale's dtype.
    step = 2**-8 if dtype is torch.bfloat16 else 2**-11
    assert error(got, exact(weight, x)) < (2 * step if backend == "reference" else step) + allowed(name)


@pytest.mark.parametrize("name", ["int8", "int4", "w8a8", "fp8", "fp8_a8"])
def test_nothing_around_the_inputs_is_read(name: str) -> None:
    check_surroundings(linear(weight_of(name, 33, 256)), rows_of(13, 256))


@pytest.mark.parametrize("name", ALL)
def test_zeros_give_zeros_and_no_rows_no_rows(name: str) -> None:
    kernel_ = linear(weight_of(name, 17, 384))
    assert not kernel_(torch.zeros(5, 384)).any()
    assert kernel_(torch.zeros(0, 384)).shape == (0, 17)


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("name", ["int8", "int4_g64_asym", "w8a8", "w4a8", "fp8", "fp8_a8"])
def test_what_is_no_number_spoils_its_own_row_and_no_other(name: str, bad: float, backend: str) -> None:
    if backend == "reference" and name == "fp8_a8":
        pytest.skip("its encoder takes finite numbers")
    check_broken_row(linear(weight_of(name, 33, 384)), rows_of(14, 384), bad)


def cpu_only(backend: str) -> None:
    """What follows is promised by the C++ kernels."""
    if backend == "reference":
        pytest.skip("torch's product promises none of it")


@pytest.mark.parametrize("name", ALL)
def test_a_row_is_the_same_bit_for_bit_alone_and_among_others(name: str, backend: str) -> None:
    cpu_only(backend)
    kernel_, x = linear(weight_of(name, 75, 384)), rows_of(70, 384)
    want = kernel_(x)
    for rows in range(1, 70):
        assert torch.equal(kernel_(x[:rows]), want[:rows]), rows
    assert torch.equal(kernel_(x[69:]), want[69:])
    many = x.repeat(9, 1)  # more than are rounded at a time
    assert torch.equal(kernel_(many), want.repeat(9, 1))


@pytest.mark.parametrize("name", ["int8", "int4", "w8a8", "fp8"])
@pytest.mark.parametrize("rows", [1, 23])
def test_threads_change_no_bit(name: str, rows: int, backend: str) -> None:
    cpu_only(backend)
    check_threads(linear(weight_of(name, 515, 384)), rows_of(rows, 384))


@pytest.mark.parametrize("name", [name for name in ALL if name.endswith("a8") and not name.startswith("fp8")])
def test_int8_inputs_are_multiplied_exactly(name: str, backend: str) -> None:
    """Whole numbers whose product fp32 holds: no rounding is left but that of the scales, powers of two."""
    cpu_only(backend)
    weight = weight_of(name, 19, 384)
    exact_scale = torch.full_like(weight.scale, 0.5)
    weight = QuantizedWeight(fmt=weight.fmt, codes=weight.codes, scale=exact_scale, zero=weight.zero)
    x = torch.randint(-127, 128, (11, 384), generator=torch.Generator().manual_seed(1)).float()
    x[:, 5] = 127  # so the scale is 1
    assert torch.equal(linear(weight)(x).double(), exact(weight, x))


def test_joined_weights_are_each_of_them(backend: str) -> None:
    cpu_only(backend)
    for name in ("int8", "int4_g64_asym", "w4a8", "fp8"):
        weights = [weight_of(name, outputs, 256) for outputs in (33, 7, 20)]
        x = rows_of(9, 256)
        joined = CpuLinear(*weights)
        assert torch.equal(joined(x), torch.cat([CpuLinear(w)(x) for w in weights], 1))
        assert joined.out_features == 60
    a, b = (weight_of("int4", 16, 256, ordered=ordered) for ordered in (False, True))
    for other in (b, weight_of("int8", 16, 256), weight_of("int4", 16, 128)):
        with pytest.raises(ConfigError, match="can be joined"):
            CpuLinear(a, other)


def test_a_broken_fp8_code_spoils_its_output(backend: str) -> None:
    weight = weight_of("fp8", 18, 64)
    weight.codes[17, 3] = 0xFF
    got = linear(weight)(torch.ones(2, 64))
    assert got[:, 17].isnan().all()
    assert got[:, :17].isfinite().all()


def test_inputs_that_do_not_fit_are_refused(backend: str) -> None:
    cpu_only(backend)
    kernel_ = linear(weight_of("int8", 8, 64))
    for bad in (
        torch.zeros(2, 63),
        torch.zeros(64),
        torch.zeros(2, 64, dtype=torch.float64),
        torch.zeros(1, 2, 64),
    ):
        with pytest.raises(ConfigError, match=r"inputs must be fp32, bf16 or fp16 \[rows, 64\]"):
            kernel_(bad)


def test_weights_whose_parts_do_not_fit_are_refused(backend: str) -> None:
    cpu_only(backend)
    good = weight_of("int4_g64_asym", 16, 256, ordered=True)
    beyond = good.order.clone()
    beyond[3] = 256
    for part in ({"scale": good.scale[:, :3]}, {"zero": good.zero[:15]}, {"order": beyond}):
        with pytest.raises(ConfigError, match="must"):
            CpuLinear(replace(good, **part))


def test_nothing_beyond_the_outputs_is_written(backend: str) -> None:
    cpu_only(backend)
    kernel_, x = linear(weight_of("int8", 21, 64)), rows_of(13, 64)
    around = torch.full((15, 40), 7.0)
    library.loaded().kernels["linear"](
        kernel_.struct, x.data_ptr(), 256, around[1:, 4:].data_ptr(), 160, 0, 13, 1
    )
    assert torch.equal(around[1:14, 4:25], kernel_(x))
    around[1:14, 4:25] = 7
    assert (around == 7).all()


def test_bytes_are_those_of_the_codes_and_scales(backend: str) -> None:
    weight = weight_of("int4_g64_asym", 64, 512, dtype=torch.bfloat16)
    assert linear(weight).nbytes == weight.nbytes == 64 * (256 + 8 * 3)


def test_auto_takes_the_compiled_kernel(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = LinearSpec(fmt=parse_weight_format("int4"), in_features=256, out_features=3)
    assert select(spec.operation, spec, CPU).backend == "cpu"
    gpu = Device(type="cuda", name="H200", capability=(9, 0))
    assert library.supports_linear(spec, gpu).reason == "works on CPU memory, not on H200"
    monkeypatch.setattr(library, "load", lambda: "not built")
    assert select(spec.operation, spec, CPU).backend == "reference"
