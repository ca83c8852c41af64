"""Bound launches: what a compiled kernel is handed, and when Triton has to look again."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from triton import knobs

from kvq.kernels.gpu.launch import Bound


class Kernel:
    """Stands for a function of `triton.jit`: says what Triton would look at, and what runs afterwards."""

    __name__ = "kernel"
    arg_names = ("x", "out", "rows", "stride", "scale", "WIDTH")

    def __init__(self) -> None:
        self.looked: list[dict[str, Any]] = []
        self.ran: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: Any) -> Any:
        def launch(**given: Any) -> Any:
            self.looked.append(given)
            number = len(self.looked)
            run = lambda *values: self.ran.append((number, *values))  # noqa: E731
            return SimpleNamespace(run=run, function="code", packed_metadata="settings")

        return launch


class There(Tensor):
    """A tensor that says it lies on GPU 1."""

    device = torch.device("cuda", 1)


def there(count: int = 8, offset: int = 0) -> Tensor:
    return torch.zeros(count + 8)[offset : offset + count].as_subclass(There)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 70 + device, raising=False)
    return Kernel()


def bound(kernel: Kernel) -> Bound:
    return Bound(kernel, ("x", "out"), ("rows", "stride"), {"scale": 0.5, "WIDTH": 128, "num_warps": 4})


def test_the_second_launch_hands_all_arguments_in_their_order_to_what_was_compiled(kernel: Kernel) -> None:
    launch, x, out = bound(kernel), there(), there()
    launch((3, 2, 1), (x, out), (5, 64))
    assert [given["rows"] for given in kernel.looked] == [5]
    assert kernel.looked[0] | {} == {
        "x": x, "out": out, "rows": 5, "stride": 64, "scale": 0.5, "WIDTH": 128, "num_warps": 4
    }  # fmt: skip
    launch((4, 2, 1), (out, x), (7, 32))  # other numbers of the same kinds
    assert len(kernel.looked) == 1
    [ran] = kernel.ran
    assert ran[:10] == (1, 4, 2, 1, 71, "code", "settings", None, None, None)
    assert ran[10] is out
    assert ran[11] is x
    assert ran[12:] == (7, 32, 0.5, 128)


@pytest.mark.parametrize("numbers", [(1, 64), (16, 64), (5, 1), (5, 63)])
def test_numbers_of_another_kind_are_looked_at(kernel: Kernel, numbers: tuple[int, int]) -> None:
    launch = bound(kernel)
    for sizes in ((5, 64), numbers, (5, 64), numbers):
        launch((1, 1, 1), (there(), there()), sizes)
    assert [(given["rows"], given["stride"]) for given in kernel.looked] == [(5, 64), numbers]
    assert [ran[0] for ran in kernel.ran] == [1, 2]


def test_addresses_that_16_does_not_divide_and_hooks_go_triton_s_way(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch, x = bound(kernel), there()
    launch((1, 1, 1), (x, x), (5, 64))
    launch((1, 1, 1), (x, there(offset=1)), (5, 64))
    assert len(kernel.looked) == 2
    launch((1, 1, 1), (x, x), (5, 64))
    assert [ran[0] for ran in kernel.ran] == [1], "what was compiled for other addresses is not kept"
    monkeypatch.setattr(knobs.runtime.launch_enter_hook, "calls", [lambda metadata: None])
    launch((1, 1, 1), (x, x), (5, 64))
    assert len(kernel.looked) == 3


def test_what_is_interpreted_is_never_kept_and_numbers_have_32_bits(kernel: Kernel) -> None:
    launch, x = bound(kernel), torch.zeros(8)
    for _ in range(2):
        launch((1, 1, 1), (x, x), (5, 64))
    assert (len(kernel.looked), kernel.ran) == (2, [])
    for sizes in ((5, 64), (5, 1 << 31)):
        with pytest.raises(AssertionError, match="32 bits") if sizes[1] > 64 else nullcontext():
            launch((1, 1, 1), (there(), there()), sizes)


def test_varying_arguments_come_first(kernel: Kernel) -> None:
    with pytest.raises(AssertionError, match="come first"):
        Bound(kernel, ("out", "x"), ("rows",), {})


def test_arguments_that_the_kernel_does_not_have_are_refused(kernel: Kernel) -> None:
    """Compiled kernels refuse them only at a launch on a GPU, interpreted ones never do."""
    with pytest.raises(AssertionError, match="no such arguments"):
        Bound(kernel, ("x", "out"), ("rows", "stride"), {"scale": 0.5, "WIDTH": 128, "HEIGHT": 4})
    with pytest.raises(AssertionError, match="no such arguments"):
        Bound(kernel, ("x", "out"), ("rows", "stride"), {"rows": 3})
