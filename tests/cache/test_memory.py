"""Free memory is asked before it is taken."""

import builtins
import io
import os
from typing import Any

import pytest
import torch

from kvq.cache import available_bytes, memory
from kvq.errors import OutOfMemory

CPU = torch.device("cpu")


def fake_open(text: str | None) -> Any:
    """An `open` whose /proc/meminfo holds `text`, or is missing."""
    real = builtins.open

    def opened(path: Any, *args: Any, **kwargs: Any) -> Any:
        if path != "/proc/meminfo":
            return real(path, *args, **kwargs)
        if text is None:
            raise FileNotFoundError(path)
        return io.StringIO(text)

    return opened


def test_linux_reports_what_is_available_and_not_what_is_unused(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "MemTotal:  100 kB\nMemFree:  7 kB\nMemAvailable:  63 kB\nCached:  50 kB\n"
    monkeypatch.setattr(builtins, "open", fake_open(text))
    assert available_bytes(CPU) == 63 * 1024


@pytest.mark.parametrize("text", [None, "MemTotal: 100 kB\n"])
def test_elsewhere_free_pages_are_counted(text: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builtins, "open", fake_open(text))
    monkeypatch.setattr(os, "sysconf", {"SC_AVPHYS_PAGES": 5, "SC_PAGE_SIZE": 4096}.__getitem__)
    assert available_bytes(CPU) == 5 * 4096


def test_where_it_cannot_be_told_none_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: str) -> int:
        raise ValueError("unrecognized configuration name")

    monkeypatch.setattr(builtins, "open", fake_open(None))
    monkeypatch.setattr(os, "sysconf", refuse)
    assert available_bytes(CPU) is None


def test_a_gpu_is_asked_for_its_own_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (123, 456))
    assert available_bytes(torch.device("cuda:0")) == 123


def test_exactly_the_free_bytes_can_be_had_and_one_more_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda _: 4096)
    taken = memory.allocate_bytes(4096, CPU)
    assert (taken.dtype, taken.numel()) == (torch.uint8, 4096)
    assert not taken.any()
    with pytest.raises(OutOfMemory):
        memory.allocate_bytes(4097, CPU)


@pytest.mark.parametrize("nbytes", [1, 4096, (4 << 20) + 4097])
def test_memory_is_zeroed_and_writable_to_the_last_byte_whatever_its_pages(nbytes: int) -> None:
    taken = memory.allocate_bytes(nbytes, CPU)
    assert not taken.any()
    taken.fill_(255)
    assert (taken == 255).all()


@pytest.mark.parametrize("error", [RuntimeError("DefaultCPUAllocator: can't allocate memory"), MemoryError()])
@pytest.mark.parametrize(
    ("free", "left"), [(2**40, r"1\.00 TiB is free"), (None, "an unknown amount is free")]
)
def test_a_device_that_refuses_after_all_is_reported_alike(
    error: Exception, free: int | None, left: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(memory, "available_bytes", lambda _: free)
    monkeypatch.setattr(torch, "empty", refuse)
    with pytest.raises(OutOfMemory, match=rf"needs 2\.00 GiB on cpu, but {left}"):
        memory.allocate_bytes(2**31, CPU)
