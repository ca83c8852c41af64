"""Weights in GGUF blocks in Triton's interpreter: products of their values in any shape and class of rows."""

from importlib import import_module

import pytest
import torch
from torch import Tensor

from benchmarks.as_on_gpu import _Hopper
from kvq.errors import UnsupportedKernel
from kvq.formats.ggml import GGML_TYPES
from kvq.formats.weights import Inputs
from kvq.kernels import BlockWeight, Device, LinearSpec, select
from kvq.kernels.gpu import shapes
from kvq.kernels.linear import tiles
from kvq.kernels.linear import triton as kernel
from kvq.kernels.linear.reference import ReferenceLinear
from kvq.kernels.linear.tiles import LinearTile
from kvq.kernels.linear.triton import TritonLinear
from kvq.kernels.linear.triton_pack import pack_blocks
from kvq.weights.install import _Beside, _joined
from tests.kernels.linear.kit import check_broken_row, check_surroundings, error, rows_of
from tests.kernels.linear.triton_kit import BLOCKS, random_blocks

H100 = Device(type="cuda", name="H100", capability=(9, 0))


pytestmark = pytest.mark.usefixtures("poisoned_memory")


def exact(weight: BlockWeight, x: Tensor) -> Tensor:
    return x.double() @ weight.dequantize().double().T


@pytest.mark.parametrize("name", BLOCKS)
def test_products_are_those_of_the_values(name: str) -> None:
    for outputs, inputs, rows in ((17, 256, 3), (37, 1280, 1), (63, 768, 19), (130, 512, 35), (5, 256, 67)):
        weight, x = random_blocks(name, inputs, outputs), rows_of(rows, inputs)
        got = TritonLinear(weight)(x)
        assert got.shape == (rows, outputs)
        for row, want in zip(got, exact(weight, x), strict=True):
            assert error(row, want) < 2e-6


@pytest.mark.parametrize("name", BLOCKS)
def test_large_steps_multiply_by_dequantized_slices(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "DENSE_ROWS", 8)
    monkeypatch.setattr(kernel, "DENSE_BYTES", 64 * 512 * 4)  # one tile of outputs
    weight, x = random_blocks(name, 512, 150), rows_of(9, 512)
    assert error(TritonLinear(weight)(x), exact(weight, x)) < 2e-6
    assert error(TritonLinear(weight)(torch.eye(512)), weight.dequantize().double().T) < 1e-6


@pytest.mark.parametrize("name", BLOCKS)
def test_every_code_and_scale_is_decoded(name: str) -> None:
    """Products with a unit matrix in one class of rows are the values."""
    weight = random_blocks(name, 256, 300, seed=7)
    got = torch.cat([TritonLinear(weight)(x) for x in torch.eye(256).split(64)])
    assert error(got, weight.dequantize().double().T) < 1e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", BLOCKS)
def test_results_have_the_inputs_dtype(name: str, dtype: torch.dtype) -> None:
    weight, x = random_blocks(name, 512, 63), (rows_of(5, 512) / 16).to(dtype)  # in fp16's range
    got = TritonLinear(weight)(x)
    assert got.dtype == dtype
    assert error(got, exact(weight, x)) < (1e-2 if dtype is torch.bfloat16 else 2e-3)


@pytest.mark.usefixtures("steady_dot")
@pytest.mark.parametrize("name", BLOCKS)
def test_a_row_is_the_same_in_every_step_of_its_class(name: str) -> None:
    layer = TritonLinear(random_blocks(name, 768, 63))
    for most, fewer in ((16, (1, 3, 15)), (32, (17, 31)), (64, (33,)), (130, (65,))):
        x = rows_of(most, 768)
        whole = layer(x)
        for rows in fewer:
            assert torch.equal(layer(x[:rows]), whole[:rows])
        if most == 16:
            assert torch.equal(layer(torch.cat((x[7:8], x[:5] * 3)))[0], whole[7])


@pytest.mark.parametrize("name", BLOCKS)
def test_nothing_around_inputs_and_rows_is_read(name: str) -> None:
    weight = random_blocks(name, 256, 33)
    check_surroundings(TritonLinear(weight), rows_of(13, 256))
    wide = torch.full((33, weight.rows.shape[1] + 7), 255, dtype=torch.uint8)  # rows apart, at any byte
    wide[:, 5:-2] = weight.rows
    apart = BlockWeight(fmt=weight.fmt, rows=wide[:, 5:-2])
    x = rows_of(3, 256)
    assert torch.equal(TritonLinear(apart)(x), TritonLinear(weight)(x))


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_what_is_no_number_spoils_its_own_row_and_no_other(name: str, bad: float) -> None:
    check_broken_row(TritonLinear(random_blocks(name, 512, 33)), rows_of(14, 512), bad)


@pytest.mark.parametrize(("name", "at"), [("Q4_K", 0), ("Q4_K", 2), ("Q6_K", 208), ("Q8_0", 0)])
def test_a_scale_that_is_no_number_spoils_its_output_alone(name: str, at: int) -> None:
    weight = random_blocks(name, 512, 18)
    weight.rows[17, at : at + 2] = 255
    got = TritonLinear(weight)(rows_of(5, 512)[:2])
    assert got[:, 17].isnan().all()
    assert got[:, :17].isfinite().all()


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_take_the_bytes_that_are_planned(name: str) -> None:
    layer, kind = TritonLinear(random_blocks(name, 512, 128)), GGML_TYPES[name]
    assert layer.nbytes == 128 * 512 // kind.values * kind.panel_bytes
    assert (layer.in_features, layer.out_features) == (512, 128)


@pytest.mark.parametrize("name", ["Q4_K", "Q6_K"])
def test_few_rows_split_their_inputs_anywhere_in_the_256_values(name: str) -> None:
    packed = pack_blocks(random_blocks(name, 1280, 63))
    tile = tiles.fitted(packed, name, 16, "interpreter")
    splits, each = tiles.splits(packed, tile, 1, torch.device("cpu"))
    assert (splits - 1) * each < packed.blocks <= splits * each
    assert splits > 1
    own = LinearTile(rows=16, outputs=64, warps=2, stages=1, programs=64)
    weight, x = random_blocks(name, 1280, 63), rows_of(3, 1280)
    with shapes.using(shapes.table_key("linear", name, 16, "interpreter"), own):
        assert error(TritonLinear(weight)(x), exact(weight, x)) < 2e-6


@pytest.mark.parametrize("warps", [1, 4, 8])
@pytest.mark.parametrize("name", ["Q4_K", "Q6_K"])
def test_outputs_lie_right_for_any_number_of_warps(name: str, warps: int) -> None:
    weight, x = random_blocks(name, 256, 256), rows_of(3, 256)
    tile = LinearTile(rows=16, outputs=256, warps=warps, stages=1, programs=1)
    with shapes.using(shapes.table_key("linear", name, 16, "interpreter"), tile):
        assert error(TritonLinear(weight)(x), exact(weight, x)) < 2e-6


def test_types_without_a_kernel_and_rounded_inputs_are_left_to_the_reference() -> None:
    for name, kind in GGML_TYPES.items():
        if kind.is_float:
            continue
        for how in (Inputs.FULL, Inputs.GROUPS):
            fmt = random_blocks("Q4_K", 256, 1, how=how).fmt if name == "Q4_K" else kind
            spec = LinearSpec(fmt=fmt, in_features=256, out_features=63)
            takes = name in BLOCKS and fmt.inputs is Inputs.FULL
            assert select("linear_blocks", spec, H100).backend == ("triton" if takes else "reference")
    spec = LinearSpec(fmt=GGML_TYPES["Q5_K"], in_features=256, out_features=63)
    with pytest.raises(UnsupportedKernel, match="does not multiply Q5_K"):
        select("linear_blocks", spec, H100, "triton")


@pytest.mark.usefixtures("steady_dot")
def test_weights_of_several_types_are_one_product(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(import_module("kvq.weights.install"), "Device", _Hopper)
    weights = [random_blocks(name, 256, n) for name, n in (("Q4_K", 48), ("Q4_K", 19), ("Q6_K", 5))]
    x, cpu = rows_of(3, 256), torch.device("cpu")
    joined = _joined(weights, cpu, "auto")
    assert isinstance(joined, _Beside)
    assert [one.out_features for one in joined.kernels] == [67, 5]
    assert joined.out_features == 72
    assert torch.equal(joined(x), torch.cat([TritonLinear(weight)(x) for weight in weights], 1))
    assert isinstance(_joined(weights[:2], cpu, "auto"), TritonLinear)
    assert _joined(weights, cpu, "reference") is None
    assert error(joined(x), torch.cat([ReferenceLinear(own)(x) for own in weights], 1).double()) < 1e-5
