"""The guard itself: what waits is refused, what doesn't is not."""

from collections.abc import Callable

import pytest
import torch

from tests.engine.guard import HostWait, no_host_waits
from tests.engine.imaginary_gpu import imaginary_gpu


@pytest.fixture
def gpu():
    with imaginary_gpu() as there:
        yield there


def numbers(gpu, count=4):
    return torch.arange(count, device=gpu.device)


WAITS: dict[str, Callable] = {
    "tensor": lambda x: torch.tensor([1, 2], device=x.device),
    "as_tensor": lambda x: torch.as_tensor([1, 2], device=x.device),
    "new_tensor": lambda x: x.new_tensor([1, 2]),
    "to device": lambda x: torch.ones(3).to(x.device),
    "to device, not pinned": lambda x: torch.ones(3).to(x.device, non_blocking=True),
    "cuda": lambda x: torch.empty(3, device=x.device).copy_(torch.ones(3)),
    "item": lambda x: x[0].item(),
    "tolist": lambda x: x.tolist(),
    "cpu": lambda x: x.cpu(),
    "to host": lambda x: x.to("cpu", non_blocking=True),
    "numpy": lambda x: x.numpy(),
    "bool": lambda x: bool((x > 1).any()),
    "int": lambda x: int(x[0]),
    "float": lambda x: float(x[0]),
    "range": lambda x: range(x[0]),
    "nonzero": lambda x: x.nonzero(),
    "where": lambda x: torch.where(x > 1),
    "mask": lambda x: x[x > 1],
    "put by a mask": lambda x: x.__setitem__(x > 1, 0),
    "masked_select": lambda x: x.masked_select(x > 1),
    "index by a list": lambda x: x[[0, 1]],
    "index by the host": lambda x: x[torch.tensor([0, 1])],
    "unique": lambda x: x.unique(),
    "bincount": lambda x: x.bincount(),
    "repeat_interleave": lambda x: x.repeat_interleave(x),
    "equal": lambda x: torch.equal(x, x),
    "pinned": lambda x: torch.empty(3, pin_memory=True),
    "pin": lambda x: torch.ones(3).pin_memory(),
    "synchronize": lambda x: torch.cuda.synchronize(),
    "event": lambda x: torch.cuda.Event().synchronize(),
}


@pytest.mark.parametrize("waits", WAITS.values(), ids=WAITS)
def test_what_waits_is_refused(gpu, waits):
    x = numbers(gpu)
    with pytest.raises(HostWait), no_host_waits(gpu):
        waits(x)


@pytest.mark.parametrize("staged", [lambda x, host: (x[:, 1:], host[:, 1:]), lambda x, host: (x.int(), host)])
def test_copies_of_other_strides_or_types_are_refused(gpu, staged):
    pinned = torch.zeros(2, 4, dtype=torch.int64, pin_memory=True)
    target, source = staged(numbers(gpu, 8).view(2, 4), pinned)
    with pytest.raises(HostWait, match="other strides or types"), no_host_waits(gpu):
        target.copy_(source, non_blocking=True)


def test_what_does_not_wait_is_carried_out(gpu):
    x, pinned = numbers(gpu), torch.zeros(8, dtype=torch.int64, pin_memory=True)
    with no_host_waits(gpu):
        pinned.numpy()[:4] = 7
        y = torch.empty(4, dtype=torch.int64, device=gpu.device)
        y.copy_(pinned[:4], non_blocking=True)
        pinned[4:].copy_(y, non_blocking=True)
        y[1:3] = x[None, :2][0] * 2 + torch.where(x > 1, x, 0)[2:]
        assert x[x, None].repeat_interleave(x, dim=0, output_size=9).shape == (9, 1)
        assert torch.ones(3)[[1, 2]].tolist() == [1, 1]


def test_a_graph_holds_no_copies_and_leaves_nothing_behind(gpu):
    x, pinned, kept = numbers(gpu), torch.zeros(4, dtype=torch.int64, pin_memory=True), []
    with pytest.raises(HostWait, match="a graph would hold"), no_host_waits(gpu, captured=True):
        x.copy_(pinned, non_blocking=True)
    with no_host_waits(gpu, captured=True) as made:
        kept.append(x + 1)
        kept.append((x * 2)[:3])
    assert made.left(besides=[kept[0][1:]]) == ["torch.int64 [3]"]
    del kept[1]
    assert made.left(besides=[kept[0]]) == []
