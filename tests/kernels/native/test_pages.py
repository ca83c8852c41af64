"""Memory in pages of 2 MiB: tensors that don't touch, in memory that goes with the last of them."""

import gc
import mmap
import os
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from kvq.kernels.native import pages

LARGE = 100_003  # bytes, which is no multiple of anything


@pytest.fixture(autouse=True)
def own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages that no other test's tensors keep."""
    monkeypatch.setattr(pages, "_pages", pages._Pages())


def test_tensors_of_any_type_and_size_are_apart_and_begin_at_a_line() -> None:
    kinds = torch.uint8, torch.float32, torch.bfloat16, torch.int64
    found = [pages.empty((3, LARGE + i), kinds[i % 4]) for i in range(40)]
    found += [pages.empty((2, 3), torch.float16), pages.empty((0, 5), torch.float32)]
    for i, tensor in enumerate(found):
        tensor.view(-1).view(torch.uint8).fill_(i)
    for i, tensor in enumerate(found):
        assert tensor.is_contiguous()
        assert tensor.data_ptr() % 64 == 0 or tensor.nbytes < pages._LEAST
        assert (tensor.view(-1).view(torch.uint8) == i).all()


def test_one_that_no_mapping_holds_has_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "_MAPPED", 1 << 20)
    small, large = pages.empty((1 << 19,), torch.uint8), pages.empty((3 << 20,), torch.uint8)
    small.fill_(1)
    large.fill_(2)
    assert (small == 1).all()


@pytest.mark.skipif(sys.platform != "linux", reason="others have no such pages")
def test_memory_goes_with_the_last_tensor_of_it() -> None:
    first, second = (pages.empty((LARGE,), torch.uint8) for _ in range(2))
    mapped = pages._pages._mapped
    view = second[5:]
    del first, second
    gc.collect()
    assert mapped() is not None
    view.fill_(7)
    del view
    gc.collect()
    assert mapped() is None
    again = pages.empty((LARGE,), torch.uint8).fill_(3)
    assert (again == 3).all()


def test_threads_get_memory_of_their_own() -> None:
    def fill(i: int) -> torch.Tensor:
        return pages.empty((LARGE + i,), torch.uint8).fill_(i)

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(fill, range(200)))
    assert all((tensor == i).all() for i, tensor in enumerate(found))


def test_where_there_are_no_such_pages_memory_is_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "_ADVICE", None)
    monkeypatch.setattr(mmap, "mmap", None)
    tensor = pages.empty((4, LARGE), torch.float32).fill_(1)
    pages.prefer_huge_pages(tensor)
    assert tensor.sum() == 4 * LARGE


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no forks here")
def test_a_child_is_not_kept_waiting_by_a_thread_of_its_parent() -> None:
    with pages._pages._lock:
        child = os.fork()
        if child == 0:
            few = pages.empty((LARGE,), torch.uint8)[:3]  # torch's own threads did not come along
            os._exit(0 if few.fill_(1).tolist() == [1, 1, 1] else 1)
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.skipif(sys.platform != "linux", reason="others are not asked")
def test_a_kernel_without_such_pages_gives_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "_ADVICE", 12345)  # which no kernel knows
    tensor = pages.empty((LARGE,), torch.uint8).fill_(3)
    assert (tensor == 3).all()
