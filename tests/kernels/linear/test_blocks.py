"""Weights in GGUF blocks: the values and products of every type, in any batch and beside other weights."""

import mmap
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvq.errors import ConfigError
from kvq.formats.ggml import GGML_TYPES, GgmlType
from kvq.formats.weights import Inputs
from kvq.kernels import BlockWeight, PlainWeight, QuantizedWeight
from kvq.kernels.linear.cpu import CpuLinear
from kvq.kernels.linear.reference import ReferenceLinear, rounded_inputs
from tests.kernels.backends import NAMES, kernel
from tests.kernels.linear.kit import (
    check_broken_row,
    check_surroundings,
    check_threads,
    error,
    rows_of,
    weight_of,
)

KINDS = [kind for kind in GGML_TYPES.values() if not kind.is_float]
HALVES = {  # where a block has 16-bit floats
    "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "MXFP4": (),
    "Q4_1": (0, 2), "Q5_1": (0, 2),
}  # fmt: skip
SHAPES = [(17, 256), (37, 512), (63, 768)]

linear: Any = None  # the implementation under test


@pytest.fixture(autouse=True, params=[name for name in NAMES if name != "triton"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every test below holds for every implementation."""
    monkeypatch.setitem(globals(), "linear", kernel("linear_blocks", request.param, monkeypatch))
    name: str = request.param
    return name


def blocks_of(kind: GgmlType, outputs: int, inputs: int, how: Inputs = Inputs.GROUPS) -> BlockWeight:
    """A weight of random bytes whose scales are finite, of either sign."""
    source = torch.Generator().manual_seed(outputs * 1000 + inputs + kind.number)
    count = inputs // kind.values
    blocks = torch.randint(0, 256, (outputs, count, kind.nbytes), dtype=torch.uint8, generator=source)
    for at in HALVES.get(kind.name, (0,)):
        scale = (torch.rand(outputs, count, 1, generator=source) - 0.5).half()
        blocks[:, :, at : at + 2] = scale.view(torch.uint8)
    if kind.name == "MXFP4":  # exponents
        blocks[:, :, 0] = torch.randint(0, 140, (outputs, count), dtype=torch.uint8, generator=source)
    return BlockWeight(fmt=replace(kind, inputs=how), rows=blocks.flatten(1))


def exact(weight: BlockWeight, x: Tensor) -> Tensor:
    """The product in fp64 with the inputs that the format rounds to."""
    grouped = rounded_inputs(x.float().unflatten(1, (-1, weight.fmt.group)), weight.fmt.inputs)
    return grouped.flatten(1).double() @ weight.dequantize().double().T


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("how", [Inputs.GROUPS, Inputs.FULL], ids=lambda how: how.value)
def test_products_are_those_of_the_values(kind: GgmlType, how: Inputs) -> None:
    for outputs, inputs in SHAPES:
        weight, x = blocks_of(kind, outputs, inputs, how), rows_of(19, inputs)
        got = linear(weight)(x)
        assert got.shape == (19, outputs)
        for row, want in zip(got, exact(weight, x), strict=True):
            assert error(row, want) < (1e-5 if how is Inputs.GROUPS else 3e-4)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_a_row_has_the_same_bits_in_every_batch(backend: str, kind: GgmlType) -> None:
    cpp_only(backend)
    for how in (Inputs.GROUPS, Inputs.FULL):
        run, x = CpuLinear(blocks_of(kind, 40, 512, how)), rows_of(41, 512)
        whole = run(x)
        for size in (1, 2, 3, 4, 5, 7, 8, 11, 13, 25):
            assert torch.equal(torch.cat([run(piece) for piece in x.split(size)]), whole)
        check_threads(run, x)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_rows_looked_up_have_the_bits_of_the_reference(backend: str, kind: GgmlType) -> None:
    cpp_only(backend)
    weight = blocks_of(kind, 37, 512)
    rows = torch.tensor([[0, 36], [15, 16]])
    assert torch.equal(CpuLinear(weight).look_up(rows, torch.float32), weight.dequantize()[rows])
    assert torch.equal(CpuLinear(weight).values(), weight.dequantize())
    found = CpuLinear(weight).look_up(rows, torch.bfloat16)
    assert torch.equal(found, weight.dequantize(torch.bfloat16)[rows])


def test_blocks_of_several_types_and_floats_are_one_product(backend: str) -> None:
    cpp_only(backend)
    weights: list[Any] = [
        blocks_of(GGML_TYPES[name], n, 512) for name, n in (("Q4_K", 48), ("Q4_K", 19), ("Q6_K", 5))
    ]
    weights.append(PlainWeight(values=rows_of(7, 512).half()))
    joined = CpuLinear(*weights)
    assert joined.out_features == 79
    for rows in (1, 14):
        x = rows_of(rows, 512)
        assert torch.equal(joined(x), torch.cat([CpuLinear(weight)(x) for weight in weights], 1))
    for other in (weight_of("int8", 16, 512), blocks_of(GGML_TYPES["Q4_K"], 16, 256)):
        with pytest.raises(ConfigError, match="joined"):
            CpuLinear(weights[0], other)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_nothing_around_inputs_and_rows_is_read(backend: str, kind: GgmlType) -> None:
    cpp_only(backend)
    check_surroundings(CpuLinear(blocks_of(kind, 33, 256)), rows_of(13, 256))
    weight = blocks_of(kind, 33, 256)
    wide = torch.full((33, weight.rows.shape[1] + 7), 255, dtype=torch.uint8)  # rows apart, at any byte
    wide[:, 5:-2] = weight.rows
    apart = BlockWeight(fmt=weight.fmt, rows=wide[:, 5:-2])
    x = rows_of(3, 256)
    assert torch.equal(CpuLinear(apart)(x), CpuLinear(weight)(x))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("is_mapped", [True, False])
def test_pages_of_a_mapped_file_are_dropped_when_they_are_packed(
    backend: str, tmp_path: Path, is_mapped: bool
) -> None:
    """Joined parts that begin in the middle of pages, beside other bytes; their panels are the same."""
    cpp_only(backend)
    first, second = blocks_of(GGML_TYPES["Q6_K"], 5003, 1024), blocks_of(GGML_TYPES["Q6_K"], 1999, 1024)
    parts = [weight.rows.numpy().tobytes() for weight in (first, second)]
    whole = b"a" * 1001 + parts[0] + b"b" * 77 + parts[1] + b"c" * 99
    path = tmp_path / "rows"
    path.write_bytes(whole)
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    raw, weights = torch.frombuffer(mapped, dtype=torch.uint8), []
    for weight, at in ((first, 1001), (second, 1078 + len(parts[0]))):
        rows = raw[at : at + weight.rows.numel()].view(weight.rows.shape)
        weights.append(BlockWeight(fmt=weight.fmt, rows=rows, is_mapped=is_mapped).to(torch.device("cpu")))
    packed, x = CpuLinear(*weights), rows_of(3, 1024)
    resident = resident_bytes(raw.data_ptr())
    assert resident < len(whole) * 0.2 if is_mapped else resident > len(whole) * 0.9, resident
    assert torch.equal(packed(x), CpuLinear(first, second)(x))
    assert bytes(mapped) == whole == path.read_bytes()


def resident_bytes(address: int) -> int:
    """The size of the mapping's pages at `address` that are in memory."""
    lines = Path("/proc/self/smaps").read_text().splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith(f"{address:08x}-"))
    return int(next(line for line in lines[at:] if line.startswith("Rss:")).split()[1]) * 1024


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_no_number_spoils_its_own_row_and_no_other(bad: float) -> None:
    for how in (Inputs.GROUPS, Inputs.FULL):
        check_broken_row(linear(blocks_of(GGML_TYPES["Q4_K"], 33, 512, how)), rows_of(14, 512), bad)


def test_a_scale_that_is_no_number_spoils_its_output_alone() -> None:
    weight = blocks_of(GGML_TYPES["Q6_K"], 18, 512)
    weight.rows[17, 208:210] = 255
    got = linear(weight)(rows_of(5, 512)[:2])
    assert got[:, 17].isnan().all()
    assert got[:, :17].isfinite().all()


def test_panels_take_the_bytes_that_are_planned(backend: str) -> None:
    cpp_only(backend)
    for kind in KINDS:
        assert CpuLinear(blocks_of(kind, 32, 512)).nbytes == 32 * 512 // kind.values * kind.panel_bytes


def test_rows_that_are_no_whole_blocks_are_refused(backend: str) -> None:
    cpp_only(backend)
    weight = blocks_of(GGML_TYPES["Q5_0"], 16, 256)
    with pytest.raises(ConfigError, match="blocks of 22"):
        CpuLinear(BlockWeight(fmt=weight.fmt, rows=weight.rows[:, :-1]))
    assert not isinstance(weight, QuantizedWeight)


def cpp_only(backend: str) -> None:
    if linear is ReferenceLinear or not backend.startswith("cpu:"):
        pytest.skip("for the C++ kernels")
