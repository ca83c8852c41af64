"""Which tiles a format gets, where the table has no entry and where an H200 showed what is wrong."""

import pytest
import torch

from kvq.formats import KVRecipe
from kvq.kernels.gpu import shapes
from kvq.kernels.gpu.shapes import TileShape


def shape(kind: str, kv: str, device: str = "sm90", dim: int = 128, block_size: int = 64) -> TileShape:
    return shapes.shape_for(kind, KVRecipe.uniform(kv, [(dim, dim)]).layers[0], device, block_size)


@pytest.mark.parametrize("kv", ["k8v4", "fp8_per_head/int4", "int8/int4_g32", "bf16/int4"])
def test_int4_values_beside_other_keys_are_extended_by_tiles_of_16_rows_on_hopper(kv: str) -> None:
    for dim in (64, 128):
        assert shape("extend", kv, dim=dim).rows == 16
        assert shape("extend", kv, dim=dim) == shape("decode", kv, dim=dim)
        assert shape("extend", kv, "sm80", dim).rows == 64


@pytest.mark.parametrize("kv", ["int4", "int8", "fp8", "int4/int8", "bf16"])
def test_others_are_extended_by_tiles_of_64_rows(kv: str) -> None:
    assert shape("extend", kv).rows == 64


@pytest.mark.parametrize(
    ("kv", "count"), [("bf16", 132 * 3), ("int4", 132 * 12), ("fp8", 132 * 12), ("int8", 132 * 12)]
)
def test_pieces_are_12_warps_a_multiprocessor_where_so_many_fit_and_24_elsewhere(
    kv: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four warps a program in bf16, one in int4, two in fp8 and int8."""
    monkeypatch.setattr(shapes, "multiprocessors", lambda _: 132)
    assert shapes.pieces(shape("decode", kv), 1, torch.device("cpu")) == count


@pytest.mark.parametrize("device", ["sm80", "sm89", "sm90", "sm100"])
def test_int4_decodes_with_one_warp_and_8_bits_with_two(device: str) -> None:
    """What was the fastest on an H200, taken on other devices, too."""
    for kv in ("int4", "int4_g64", "int4_g32", "k8v4"):
        assert (shape("decode", kv, device).keys, shape("decode", kv, device).warps) == (32, 1)
    for kv in ("fp8", "int8"):
        assert (shape("decode", kv, device).keys, shape("decode", kv, device).warps) == (64, 2)
