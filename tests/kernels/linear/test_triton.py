"""Quantized Linear layers in Triton's interpreter: the reference's results for every format and odd shape."""

import pytest
import torch
from torch import Tensor

from kvq.errors import UnsupportedKernel
from kvq.formats.weights import Inputs, parse_weight_format
from kvq.kernels import Device, LinearSpec, select
from kvq.kernels.codec import e4m3
from kvq.kernels.gpu import shapes
from kvq.kernels.linear import tiles
from kvq.kernels.linear import triton as kernel
from kvq.kernels.linear.reference import ReferenceLinear, quantize_inputs
from kvq.kernels.linear.tiles import LinearTile
from kvq.kernels.linear.triton import TritonLinear
from kvq.kernels.linear.triton_pack import Kind, kind_of, pack
from tests.kernels.linear.triton_kit import FORMATS, SHAPES, SMALL_SHAPES, fits, random_weight

H100 = Device(type="cuda", name="H100", capability=(9, 0))


pytestmark = pytest.mark.usefixtures("poisoned_memory")


def inputs(rows: int, count: int, seed: int = 1) -> Tensor:
    """Random rows with an outlier column, and one of zeros."""
    x = torch.randn(rows, count, generator=torch.Generator().manual_seed(seed))
    x[:, 1] *= 20
    if rows > 1:
        x[rows // 2] = 0
    return x


def error(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want.double()).abs().max() / want.double().abs().max())


@pytest.mark.daily(25)
@pytest.mark.parametrize("rows", [1, 3, 17, 65])
@pytest.mark.parametrize("name", FORMATS)
def test_results_are_the_references(name: str, rows: int) -> None:
    """One shape for each class of rows, and every odd one for one class."""
    fitting = [shape for shape in SMALL_SHAPES if fits(name, shape[0])]
    fitting = fitting[:3] if "_g8" in name else fitting  # many blocks, so many steps of the interpreter
    check_against_reference(name, rows, fitting if rows == 3 else [min(fitting)])


@pytest.mark.long
@pytest.mark.parametrize("rows", [1, 3, 17, 50, 65])
@pytest.mark.parametrize("name", FORMATS)
def test_results_are_the_references_in_every_shape(name: str, rows: int) -> None:
    check_against_reference(name, rows, [shape for shape in SHAPES if fits(name, shape[0])])


def check_against_reference(name: str, rows: int, sizes: list[tuple[int, int]]) -> None:
    for count, outputs in sizes:
        weight = random_weight(name, count, outputs)
        x = inputs(rows, count)
        assert error(TritonLinear(weight)(x), ReferenceLinear(weight)(x)) < 1e-5, (count, outputs)


@pytest.mark.parametrize("name", ["int4_g64_asym", "int8_g24", "w4a8", "int8_asym_a8", "fp8"])
def test_inputs_in_an_order_of_their_own(name: str) -> None:
    weight = random_weight(name, 1920, 63, ordered=True)
    x = inputs(3, 1920)
    assert error(TritonLinear(weight)(x), ReferenceLinear(weight)(x)) < 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["int4_g128", "int8", "fp8_a8"])
def test_results_have_the_inputs_dtype_and_scales_any(name: str, dtype: torch.dtype) -> None:
    weight = random_weight(name, 384, 63, dtype=dtype)
    x = inputs(5, 384).to(dtype)
    y = TritonLinear(weight)(x)
    assert y.dtype == dtype
    assert error(y, ReferenceLinear(weight)(x)) < (1e-2 if dtype is torch.bfloat16 else 2e-3)


@pytest.mark.parametrize("name", ["int4_g128_asym", "int4_g40", "int8", "w8a8", "fp8_a8"])
def test_what_lies_beside_the_inputs_never_enters(name: str) -> None:
    weight = random_weight(name, 240 if name == "int4_g40" else 384, 63)
    count = weight.in_features
    for poison in (float("nan"), float("inf")):
        memory = torch.full((24, count + 24), poison)
        memory[3:8, 8 : count + 8] = inputs(5, count)
        x = memory[3:8, 8 : count + 8]
        assert torch.equal(TritonLinear(weight)(x), TritonLinear(weight)(x.clone()))
        assert torch.isfinite(TritonLinear(weight)(x)).all()


@pytest.mark.parametrize("name", ["int4_g128", pytest.param("w4a8", marks=pytest.mark.long), "fp8"])
def test_a_row_is_the_same_in_every_step_of_its_class(name: str) -> None:
    layer = TritonLinear(random_weight(name, 640, 63))
    for most, fewer in ((16, (1, 3, 15)), (32, (17, 31)), (64, (33,)), (130, (65,))):
        x = inputs(most, 640)
        whole = layer(x)
        for rows in fewer:  # the interpreter's products also depend on a row's place in its tile
            assert torch.equal(layer(x[:rows]), whole[:rows])


def test_few_rows_split_their_inputs_and_parts_cover_each_block_once() -> None:
    packed = pack(random_weight("int4_g128", 1920, 63), Kind.NIBBLES)
    cpu = torch.device("cpu")
    tile = tiles.fitted(packed, "int4_g128", 16, "interpreter")
    for rows in (1, 16):
        splits, each = tiles.splits(packed, tile, rows, cpu)
        assert splits > 1
        assert (splits - 1) * each < packed.blocks <= splits * each
    assert tiles.splits(packed, tile, 65, cpu) == (1, packed.blocks)


@pytest.mark.parametrize("what", [Inputs.INT8, Inputs.FP8])
def test_rounded_inputs_have_the_references_bits(what: Inputs) -> None:
    x = inputs(9, 5000) * torch.logspace(-30, 30, 9)[:, None]
    x[2] = torch.arange(5000) / 4 - 600  # many ties
    x[3, :4] = torch.tensor([127.0, 0.5, 1.5, -2.5])
    want, scale = quantize_inputs(x, what)
    codes, found = kernel.quantized(x, what, as_bytes=False)
    assert torch.equal(found, scale[:, 0])
    assert torch.equal(codes.float(), want)
    if what is Inputs.FP8:
        stored, _ = kernel.quantized(x, what, as_bytes=True)
        assert torch.equal(e4m3.decode(stored.view(torch.uint8)), want)


@pytest.mark.parametrize("name", ["int4_g128_asym", "int4_g40", "int8_g64_asym", "int8", "fp8", "int3_g32"])
def test_large_steps_multiply_by_dequantized_slices(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "DENSE_ROWS", 8)
    for count, outputs in ((640, 150), (120, 63)):
        if not fits(name, count):
            continue
        monkeypatch.setattr(kernel, "DENSE_BYTES", 64 * count * 4)  # one tile of outputs
        weight = random_weight(name, count, outputs, ordered=True)
        x = inputs(9, count)
        assert error(TritonLinear(weight)(x), ReferenceLinear(weight)(x)) < 1e-5


def test_steps_without_rows_and_inputs_of_any_stride() -> None:
    weight = random_weight("int4_g128", 384, 63)
    layer = TritonLinear(weight)
    assert layer(torch.zeros(0, 384)).shape == (0, 63)
    x = inputs(384, 5).T
    assert error(layer(x), ReferenceLinear(weight)(x)) < 1e-5


@pytest.mark.parametrize(("name", "most"), [("int4_g128", 4.2), ("int4_g64_asym", 4.5), ("int8", 8.01)])
def test_packing_adds_no_bytes_to_usual_shapes(name: str, most: float) -> None:
    weight = random_weight(name, 2048, 128, dtype=torch.float16)
    layer = TritonLinear(weight)
    assert layer.nbytes == weight.nbytes
    assert layer.nbytes * 8 <= most * 2048 * 128


def test_layouts_follow_inputs_and_the_device() -> None:
    kinds = {
        "int4": (Kind.NIBBLES, Kind.NIBBLES),
        "w4a8": (Kind.SIGNED_NIBBLES, Kind.SIGNED_NIBBLES),
        "int8": (Kind.INT8, Kind.INT8),
        "w8a8": (Kind.ROWS, Kind.ROWS),
        "fp8": (Kind.FP8, Kind.FP8),
        "fp8_a8": (Kind.FP8, Kind.ROWS),
    }
    for name, (without, native) in kinds.items():
        weight = random_weight(name, 384, 63)
        assert kind_of(weight, has_fp8=False) is without
        assert kind_of(weight, has_fp8=True) is native


def test_a_tile_of_the_table_takes_the_guesss_place() -> None:
    weight = random_weight("int4_g64_asym", 384, 130)
    layer = TritonLinear(weight)
    key = shapes.table_key("linear", "int4_g64_asym", 16, "interpreter")
    own = LinearTile(rows=16, outputs=64, warps=2, stages=1, programs=1)
    before = tiles.fitted(layer.weight, layer.fmt.name, 16, "interpreter")
    with shapes.using(key, own):
        assert tiles.fitted(layer.weight, layer.fmt.name, 16, "interpreter") == own
        x = inputs(3, 384)
        assert error(layer(x), ReferenceLinear(weight)(x)) < 1e-5
    assert tiles.fitted(layer.weight, layer.fmt.name, 16, "interpreter") == before
    assert shapes.entries().get(key) is None


@pytest.mark.parametrize("warps", [1, 2, 4, 8])
@pytest.mark.parametrize("name", ["int4_g128", "int4_g64_asym", "int3_g32", "int8_g24", "int4_g64_asym_a8"])
def test_outputs_lie_right_for_any_number_of_warps(name: str, warps: int) -> None:
    """Warps decide which of a tile's columns is which output."""
    weight = random_weight(name, 384, 256)
    layer = TritonLinear(weight)
    tile = LinearTile(rows=16, outputs=256, warps=warps, stages=1, programs=1)
    x = inputs(3, 384)
    with shapes.using(shapes.table_key("linear", name, 16, "interpreter"), tile):
        assert error(layer(x), ReferenceLinear(weight)(x)) < 1e-5


@pytest.mark.parametrize("name", FORMATS)
def test_gpus_from_sm80_on_are_supported_and_others_refused_with_the_reason(name: str) -> None:
    spec = LinearSpec(fmt=parse_weight_format(name), in_features=1920, out_features=63)
    assert select(spec.operation, spec, H100).backend == "triton"
    with pytest.raises(UnsupportedKernel, match=r"needs compute capability 8.0, T4 has 7.5"):
        select(spec.operation, spec, Device(type="cuda", name="T4", capability=(7, 5)), "triton")
    with pytest.raises(UnsupportedKernel, match="needs an NVIDIA or AMD GPU, not cpu"):
        select(spec.operation, spec, Device(type="cpu", name="cpu"), "triton")


def test_the_registered_kernel_packs_and_multiplies() -> None:
    weight = random_weight("int4_g128", 384, 63)
    spec = LinearSpec(fmt=weight.fmt, in_features=384, out_features=63)
    layer = select("linear_w4", spec, H100, "triton").run(weight)
    x = inputs(2, 384)
    assert error(layer(x), ReferenceLinear(weight)(x)) < 1e-5
