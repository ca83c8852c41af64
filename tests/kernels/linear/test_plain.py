"""Linear layers over weights in floats: fp32 products in every variant, the same for a row in any batch."""

from typing import Any

import pytest
import torch
from torch import Tensor

from kvq.errors import ConfigError
from kvq.kernels import PlainWeight
from kvq.kernels.linear import cpu, pack
from kvq.kernels.linear.cpu import CpuLinear, CpuLinears
from kvq.kernels.native.abi import NUMBERS
from tests.kernels.backends import NAMES, kernel
from tests.kernels.linear.kit import (
    check_broken_row,
    check_surroundings,
    check_threads,
    error,
    rows_of,
    weight_of,
)

VARIANTS = [name for name in NAMES if name not in ("triton", "reference")]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
NAN, INF = float("nan"), float("inf")


@pytest.fixture(autouse=True, params=VARIANTS)
def variant(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every test below holds for every variant of the compiled kernels."""
    kernel("linear_w8", request.param, monkeypatch)
    name: str = request.param
    return name


def plain(outputs: int, inputs: int, dtype: torch.dtype = torch.float32) -> PlainWeight:
    generator = torch.Generator().manual_seed(outputs * 1000 + inputs)
    return PlainWeight(values=torch.randn(outputs, inputs, generator=generator).to(dtype))


def product(weight: PlainWeight, x: Tensor) -> Tensor:
    return x.double() @ weight.values.double().T


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape", [(1, 1), (17, 63), (5, 60), (33, 130), (16, 4), (2, 2050), (100, 576), (130, 3000)], ids=str
)
def test_products_are_those_of_the_weight_as_it_is(shape: tuple[int, int], dtype: torch.dtype) -> None:
    weight, x = plain(*shape, dtype), rows_of(29, shape[1])
    got = CpuLinear(weight)(x)
    assert got.shape == (29, shape[0])
    assert error(got, product(weight, x)) < 1e-7 * (1 + shape[1] ** 0.5)  # as roundings of sums grow


@pytest.mark.parametrize("rows", [1, 16, 17, 40])
@pytest.mark.parametrize("dtype", DTYPES)
def test_numbers_of_any_size_are_multiplied_as_exactly_as_in_fp32(dtype: torch.dtype, rows: int) -> None:
    generator = torch.Generator().manual_seed(0)
    spread = torch.linspace(-4, 4, 390) if dtype is torch.float16 else torch.linspace(-17, 17, 390)
    values = (torch.randn(33, 390, generator=generator) * 10 ** spread.flip(0)).to(dtype)
    x = torch.randn(rows, 390, generator=generator) * 10**spread
    got, want = CpuLinear(PlainWeight(values=values))(x), x.double() @ values.double().T
    magnitudes = x.double().abs() @ values.double().abs().T
    assert ((got.double() - want).abs() <= 390**0.5 * 2**-23 * magnitudes).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("inputs", [100, 2504])  # the second in blocks of columns
def test_a_row_is_the_same_bit_for_bit_alone_and_among_others(inputs: int, dtype: torch.dtype) -> None:
    kernel_, x = CpuLinear(plain(75, inputs, dtype)), rows_of(40, inputs)
    want = kernel_(x)
    for rows in (*range(1, 16), 23, 25, 39):
        assert torch.equal(kernel_(x[:rows]), want[:rows]), rows
    assert torch.equal(kernel_(x[39:]), want[39:])
    many = x.repeat(13, 1)  # more than are made ready at a time
    assert torch.equal(kernel_(many), want.repeat(13, 1))


@pytest.mark.parametrize("dtype", DTYPES)
def test_without_inputs_or_outputs_there_is_nothing_to_add_up(dtype: torch.dtype) -> None:
    nothing = CpuLinear(PlainWeight(values=torch.zeros(17, 0, dtype=dtype)))
    for rows in (0, 1, 30):
        assert torch.equal(nothing(torch.zeros(rows, 0)), torch.zeros(rows, 17))
    assert CpuLinear(PlainWeight(values=torch.zeros(0, 5, dtype=dtype)))(torch.zeros(3, 5)).shape == (3, 0)


def test_16_bits_that_hold_a_weight_change_no_bit() -> None:
    x = rows_of(7, 224)
    for dtype in (torch.bfloat16, torch.float16):
        narrow = plain(33, 224, dtype)
        wide = PlainWeight(values=narrow.values.float())
        found = PlainWeight.narrowest(wide.values)
        assert found.values.dtype is dtype
        assert torch.equal(found.values, narrow.values)
        assert torch.equal(CpuLinear(wide)(x), CpuLinear(narrow)(x))
        assert CpuLinear(narrow).nbytes * 2 == CpuLinear(wide).nbytes


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_packed_weight_can_be_read_again(dtype: torch.dtype) -> None:
    weight = plain(33, 61, dtype)
    assert torch.equal(CpuLinear(weight).values(), weight.values)
    with pytest.raises(ConfigError, match="a weight in codes is no floats"):
        CpuLinear(weight_of("int8", 16, 64)).values()


def at_an_odd_byte(x: Tensor) -> Tensor:
    """A copy between poison, as a tensor of a mapped file may lie."""
    memory = (
        bytearray(b"\xff" * 33) + x.contiguous().view(-1).view(torch.uint8).numpy().tobytes() + b"\xff" * 64
    )
    return torch.frombuffer(memory, dtype=x.dtype, count=x.numel(), offset=33).view(x.shape)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shapes", [[(1, 1)], [(33, 61)], [(16, 8)], [(130, 1300)], [(7, 129), (40, 129), (2, 129)]], ids=str
)
def test_panels_hold_16_outputs_side_by_side_and_zeros_behind_the_last(
    shapes: list[tuple[int, int]], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = [plain(*shape, dtype) for shape in shapes]
    joined = torch.cat([weight.values for weight in weights])
    outputs, inputs = joined.shape
    pair, unit = (2, 32) if dtype is torch.bfloat16 else (1, 8)
    want = torch.zeros(-(-outputs // 16) * 16, -(-inputs // unit) * unit, dtype=dtype)
    want[:outputs, :inputs] = joined
    want = want.view(-1, 16, want.shape[1] // pair, pair).transpose(1, 2)
    want = want if pair == 2 else want.squeeze(3)
    dirty = torch.full_like(want, NAN, memory_format=torch.contiguous_format)
    monkeypatch.setattr(pack, "empty", lambda *_: dirty)
    for lie in (
        at_an_odd_byte,
        lambda x: x.T.contiguous().T,
        lambda x: torch.cat([x, x * NAN], 1)[:, :inputs],
    ):
        found = pack.pack_plain([PlainWeight(values=lie(weight.values)) for weight in weights])
        assert torch.equal(found.codes, want)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_a_packed_weight_can_be_looked_up(dtype: torch.dtype) -> None:
    weight = plain(75, 603, dtype)  # in pieces
    kernel_ = CpuLinear(weight)
    rows = torch.randint(0, 75, (7, 12), generator=torch.Generator().manual_seed(0))
    for wanted in DTYPES:
        got = kernel_.look_up(rows, wanted)
        assert got.dtype is wanted
        assert torch.equal(got, weight.values[rows].to(wanted)), wanted
    assert torch.equal(kernel_.look_up(rows[:, 3], dtype), weight.values[rows[:, 3]])  # strided
    assert kernel_.look_up(rows[:0], dtype).shape == (0, 12, 603)
    for beyond in (-1, 75):  # 80 are there, with those that fill the panel up
        with pytest.raises(IndexError, match="does not have"):
            kernel_.look_up(torch.tensor([3, beyond]), dtype)
    with pytest.raises(ConfigError, match="a weight in codes is no floats"):
        CpuLinear(weight_of("int8", 16, 64)).look_up(rows, dtype)
    for numbers, wanted in ((rows.int(), dtype), (rows, torch.float64)):
        with pytest.raises(ConfigError, match="looked up by int64 numbers"):
            kernel_.look_up(numbers, wanted)


@pytest.mark.parametrize("value", [1e-30, 1e30, 1 + 2**-12, NAN])
def test_a_weight_that_16_bits_do_not_hold_stays_in_32(value: float) -> None:
    values = torch.ones(4, 8)
    values[3, 7] = value
    kept = PlainWeight.narrowest(values)
    assert kept.values.dtype is torch.float32
    assert torch.equal(kept.values, values) or value != value


@pytest.fixture(params=["FP32", "PAIRS", "TILES"])
def products(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every way of multiplying bf16 with bf16 that this CPU and variant have."""
    wanted = NUMBERS[f"KVQ_PRODUCTS_{request.param}"]
    if wanted > cpu.best_products():
        pytest.skip("not on this CPU, or not in this variant")
    monkeypatch.setattr(cpu, "best_products", lambda: wanted)
    name: str = request.param
    return name


def bf16_rows(rows: int, inputs: int) -> Tensor:
    return rows_of(rows, inputs).bfloat16()


@pytest.mark.parametrize("shape", [(1, 1), (17, 63), (5, 60), (130, 3000), (100, 576)], ids=str)
def test_products_of_bf16_are_rounded_once_at_the_end(shape: tuple[int, int], products: str) -> None:
    weight, x = plain(*shape, torch.bfloat16), bf16_rows(45, shape[1])
    got, want = CpuLinear(weight)(x), product(weight, x.double())
    assert got.dtype is torch.bfloat16
    step = want.abs() * 2**-8 + 1e-6 * want.abs().amax(1, keepdim=True)  # half a bf16 number's last bit
    assert ((got.double() - want).abs() <= step).all()


@pytest.mark.parametrize("inputs", [100, 3300])  # the second in blocks of columns
def test_a_row_of_bf16_is_the_same_bit_for_bit_alone_and_among_others(inputs: int, products: str) -> None:
    kernel_, x = CpuLinear(plain(75, inputs, torch.bfloat16)), bf16_rows(40, inputs)
    want = kernel_(x)
    for rows in (*range(1, 20), 31, 32, 33, 39):
        assert torch.equal(kernel_(x[:rows]), want[:rows]), rows
    assert torch.equal(kernel_(x[39:]), want[39:])
    many = x.repeat(15, 1)  # more than are made ready at a time
    assert torch.equal(kernel_(many), want.repeat(15, 1))


@pytest.mark.parametrize("rows", [1, 45])
def test_threads_and_surroundings_change_no_bit_of_bf16(rows: int, products: str) -> None:
    kernel_, x = CpuLinear(plain(515, 1999, torch.bfloat16)), bf16_rows(rows, 1999)
    check_threads(kernel_, x)
    want = kernel_(x)
    kernel_(torch.full((200, 1999), NAN).bfloat16())  # which scratch memory may still hold
    around = torch.full((rows + 2, 2043), NAN).bfloat16()
    around[1:-1, 7:2006] = x
    assert torch.equal(kernel_(around[1:-1, 7:2006]), want)


@pytest.mark.parametrize("bad", [NAN, INF])
def test_what_is_no_number_in_bf16_spoils_its_own_row_and_output_alone(bad: float, products: str) -> None:
    weight = plain(33, 390, torch.bfloat16)
    check_broken_row(CpuLinear(weight), bf16_rows(34, 390), bad)
    x, want = bf16_rows(9, 390).abs() + 1, CpuLinear(weight)(bf16_rows(9, 390).abs() + 1)
    weight.values[17, 389] = bad
    got = CpuLinear(weight)(x)
    assert not got[:, 17].isfinite().any()
    assert torch.equal(got[:, :17], want[:, :17])
    assert torch.equal(got[:, 18:], want[:, 18:])


@pytest.mark.parametrize("rows", [1, 29])
@pytest.mark.parametrize("inputs", [384, 2000])
def test_threads_change_no_bit(rows: int, inputs: int) -> None:
    check_threads(CpuLinear(plain(515, inputs)), rows_of(rows, inputs))


def test_nothing_around_the_inputs_is_read() -> None:
    check_surroundings(CpuLinear(plain(33, 1999)), rows_of(13, 1999))


@pytest.mark.parametrize("bad", [NAN, INF])
def test_what_is_no_number_spoils_its_own_row_and_no_other(bad: float) -> None:
    check_broken_row(CpuLinear(plain(33, 384)), rows_of(14, 384), bad)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_inputs_give_16_bit_results(dtype: torch.dtype) -> None:
    weight, x = plain(50, 384), rows_of(9, 384).to(dtype)
    got = CpuLinear(weight)(x)
    assert got.dtype == dtype
    assert torch.equal(got, CpuLinear(weight)(x.float()).to(dtype))


def test_joined_weights_are_each_of_them() -> None:
    weights: list[Any] = [plain(33, 256), plain(7, 256, torch.bfloat16), plain(20, 256, torch.float16)]
    x = rows_of(9, 256)
    assert torch.equal(CpuLinear(*weights)(x), torch.cat([CpuLinear(w)(x) for w in weights], 1))
    assert CpuLinear(*weights).nbytes == 64 * 256 * 4
    with pytest.raises(ConfigError, match="of the same inputs can be joined"):
        CpuLinear(weights[0], plain(5, 128))
    with pytest.raises(ConfigError, match="can't be joined"):
        CpuLinear(weights[0], weight_of("int8", 16, 256))


@pytest.mark.parametrize("dtype", DTYPES)
def test_several_products_at_once_have_the_bits_of_each_alone(dtype: torch.dtype) -> None:
    weights = torch.stack([plain(35, 70).values * i for i in range(1, 12)]).to(dtype).float()
    together, x = CpuLinears(weights), rows_of(5 * 11, 90).view(5, 11, 90)[..., 20:]
    got = together(x, room=3)
    assert got.shape == (5, 11, 38)
    for i, weight in enumerate(weights):
        alone = CpuLinear(PlainWeight.narrowest(weight))
        assert torch.equal(got[:, i, :35], alone(x[:, i]))
    assert torch.equal(together.values(), weights)
    assert together(x[:0]).shape == (0, 11, 35)
    with pytest.raises(ConfigError, match=r"\[rows, 11, 70\], got torch.float32 \[11, 5, 70\]"):
        together(x.transpose(0, 1))
