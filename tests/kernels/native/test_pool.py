"""The kernels' threads: who takes part, who is waited for, and what a fork or another caller changes."""

import ctypes
import hashlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import pytest
import torch

from benchmarks.peers.neighbours import neighbours
from kvq.kernels import PlainWeight
from kvq.kernels.linear.cpu import CpuLinear
from kvq.kernels.native import library
from tests.schedstat import needs_schedstat
from tests.waiting import HANG_S

Work = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int)


def on_threads(threads: int, work: Callable[[int], None]) -> None:
    """`work(thread)` on the calling thread and on others that come."""
    run = ctypes.CDLL(str(library._path())).kvq_on_threads
    run.argtypes = [ctypes.c_int, Work, ctypes.c_void_p]
    run(threads, Work(lambda _, thread: work(thread)), None)


def test_who_takes_part_has_a_number_of_its_own_and_has_ended_when_the_call_returns():
    came, round_, end = 0, 0, time.monotonic() + HANG_S
    while round_ < 300 or not came:
        assert time.monotonic() < end, "no thread ever came"
        round_ += 1
        threads, began, ended = 1 + round_ % 5, [], []

        def work(thread: int, began: list[int] = began, ended: list[int] = ended) -> None:
            began.append(thread)
            time.sleep(0.0005 if thread == 0 else 0)
            ended.append(thread)

        on_threads(threads, work)
        seen = list(ended)
        assert sorted(seen) == sorted(began)
        assert 0 in seen
        assert len(set(seen)) == len(seen)
        assert max(seen) < threads
        came += len(seen) - 1


def test_threads_that_slept_come_again():
    for _ in range(5):
        time.sleep(0.01)
        together, came = threading.Barrier(3), []

        def meet(thread: int, together: threading.Barrier = together, came: list[int] = came) -> None:
            together.wait(HANG_S)  # what it raises is lost in C++
            came.append(thread)

        on_threads(3, meet)
        assert sorted(came) == [0, 1, 2]


def test_beside_the_job_of_another_caller_one_works_alone():
    inside, alone = threading.Event(), threading.Event()

    def hold(_: int) -> None:
        inside.set()
        assert alone.wait(HANG_S)

    holder = threading.Thread(target=on_threads, args=(2, hold))
    holder.start()
    assert inside.wait(HANG_S)
    seen: list[int] = []
    on_threads(4, seen.append)
    alone.set()
    holder.join(HANG_S)
    assert seen == [0]


def test_callers_side_by_side_get_the_results_of_one():
    rows, weight = torch.randn(37, 96), torch.randn(2100, 96)
    linear = CpuLinear(PlainWeight(values=weight))
    expected, wrong = linear(rows), []

    def call() -> None:
        torch.set_num_threads(3)
        wrong.extend(i for i in range(60) if not torch.equal(linear(rows), expected))

    callers = [threading.Thread(target=call) for _ in range(4)]
    before = torch.get_num_threads()
    try:
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join(HANG_S)
    finally:
        torch.set_num_threads(before)
    assert not wrong


def test_threads_that_rest_beside_busy_processes_leave_no_task_undone():
    # often on fewer cores than have work: threads lose theirs, rest, and come again
    rows, weight = torch.randn(37, 256), torch.randn(2100, 256)
    linear = CpuLinear(PlainWeight(values=weight))
    expected, before = linear(rows), torch.get_num_threads()
    with neighbours(2):
        torch.set_num_threads(3)
        try:
            end = time.monotonic() + 1.5
            while time.monotonic() < end:
                assert torch.equal(linear(rows), expected)
        finally:
            torch.set_num_threads(before)


@needs_schedstat
def test_a_thread_that_shares_its_core_leaves_between_tasks_and_comes_again_under_its_number():
    has_to_rest = ctypes.CDLL(str(library._path())).kvq_has_to_rest
    end, block = time.monotonic() + HANG_S, bytes(500_000)
    with neighbours(2 * len(os.sched_getaffinity(0))):
        came: list[int] = []
        while came.count(1) < 2:
            assert time.monotonic() < end, "it never left"
            came.clear()

            def work(thread: int, came: list[int] = came) -> None:
                came.append(thread)
                until = time.monotonic() + 0.015
                while time.monotonic() < until and not has_to_rest(thread):
                    hashlib.sha256(block) if thread else time.sleep(0.001)  # without Python's lock

            on_threads(2, work)
            assert came[0] in (0, 1)
            assert came.count(0) == 1
            assert set(came) <= {0, 1}


_FORK = """
import os, torch
from kvq.kernels import PlainWeight
from kvq.kernels.linear.cpu import CpuLinear

torch.set_num_threads(3)
linear, rows = CpuLinear(PlainWeight(values=torch.randn(2100, 96))), torch.randn(37, 96)

def product():
    return linear(rows).numpy().tobytes()  # compared by torch, it would take libgomp, which no fork survives

expected = product()
for _ in range(3):
    child = os.fork()
    if not child:
        os._exit(0 if all(product() == expected for _ in range(20)) else 1)
    assert product() == expected
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
print("done")
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_makes_threads_of_its_own():
    ran = subprocess.run(
        [sys.executable, "-c", _FORK], capture_output=True, text=True, timeout=HANG_S, check=False
    )
    assert ran.stdout == "done\n", ran.stderr
