"""rope_write in Triton: one launch, and the same bits however its heads are cut into programs."""

from typing import Any

import pytest
import torch

from kvq.kernels.rope_write import triton as kernel
from tests.kernels.kit import poisoned_cache
from tests.kernels.rope_write.test_rope_write import SLOTS, TOKENS, angles_of, heads_of, layer_of, norms_of
from tests.kernels.write_kv.test_triton import Counted


@pytest.mark.parametrize(("elements", "programs"), [(64, 3 + 3 + 7), (128, 2 + 2 + 4), (512, 1 + 1 + 1)])
@pytest.mark.parametrize("kv", ["int4", "fp8_per_head_rot/bf16"])
def test_heads_are_the_same_in_any_tiles(
    kv: str, elements: int, programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = Counted(kernel.rope_write_kernel)
    monkeypatch.setattr(kernel, "rope_write_kernel", counted)
    monkeypatch.setattr(kernel, "_ELEMENTS", 1 << 20)
    layer, found = layer_of(norms=norms_of(60, 60)), []
    for few in (elements, 1 << 20):
        monkeypatch.setattr(kernel, "_FEW_ELEMENTS", few)
        heads, cache = heads_of(layer), poisoned_cache(kv, [(60, 48)])
        bad = torch.zeros(TOKENS, dtype=torch.bool)
        kernel.rope_write(heads, angles_of(layer), cache.layer(0), SLOTS, bad, layer)
        found.append((heads[:TOKENS], cache.pool(0)))
    assert counted.grids == [(TOKENS, programs, 1), (TOKENS, 3, 1)]
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)


def test_heads_that_are_normed_together_are_one_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs turn queries in place: none may read what another writes."""
    counted = Counted(kernel.rope_write_kernel)
    monkeypatch.setattr(kernel, "rope_write_kernel", counted)
    monkeypatch.setattr(kernel, "_FEW_ELEMENTS", 64)
    monkeypatch.setattr(kernel, "_MOST_WARPS", 1)
    layer = layer_of(norms=norms_of(60 * 7, 60 * 3))
    kv, bad = poisoned_cache("int4", [(60, 48)]).layer(0), torch.zeros(TOKENS, dtype=torch.bool)
    kernel.rope_write(heads_of(layer), angles_of(layer), kv, SLOTS, bad, layer)
    assert counted.grids == [(TOKENS, 1 + 3 + 1, 1)]


class Ignored:
    """A kernel that does nothing."""

    arg_names = kernel.rope_write_kernel.arg_names

    def __getitem__(self, grid: Any) -> Any:
        return lambda *values, **named: None


def test_what_does_not_change_is_worked_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    worked_out: list[bool] = []
    own = kernel._constants

    def constants(kv: Any, layer: Any, is_turned: bool, elements: int) -> Any:
        worked_out.append(is_turned)
        return own(kv, layer, is_turned, elements)

    monkeypatch.setattr(kernel, "_constants", constants)
    monkeypatch.setattr(kernel, "rope_write_kernel", Ignored())
    layer = layer_of()
    kv, bad = poisoned_cache("int4", [(60, 48)]).layer(0), torch.zeros(TOKENS, dtype=torch.bool)
    for angles in (angles_of(layer), angles_of(layer), None, None):
        kernel.rope_write(heads_of(layer), angles, kv, SLOTS, bad, layer)
    assert worked_out == [True, False]
