"""How threads wait: by themselves, beside busy processes, and where a user has chosen."""

import os
import subprocess
import sys

import pytest

from kvq.kernels.other_threads import _Waiting, crowding
from tests.waiting import HANG_S

MS = 1_000_000  # in ns
QUIET, CROWDED, SLEEPING = (0.04, 0.1e-3), (0.5, 4e-3), (0.3, 0.1e-3)  # share, seconds at a time

linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux says how long a thread was ready")
two_cores = pytest.mark.skipif(
    sys.platform != "linux" or len(os.sched_getaffinity(0)) < 2,
    reason="no thread waits for another on one core",
)


def look(waiting: _Waiting, began_s: float, seconds: float, seen: tuple[float, float]) -> float | None:
    """Look 20 times a second; when `are_asleep` changed first, if it did."""
    before = waiting.are_asleep
    for step in range(round(20 * seconds)):
        waiting.look(began_s + step / 20, *seen)
        if waiting.are_asleep != before:
            return began_s + step / 20
    return None


def test_threads_spin_where_nothing_crowds_them():
    waiting = _Waiting()
    assert look(waiting, 0, 60, QUIET) is None
    assert look(waiting, 60, 60, (0.25, 0.8e-3)) is None, "a server's own HTTP process"
    assert look(waiting, 120, 60, (0.9, 0.5e-3)) is None, "no whole slices"


def test_threads_sleep_beside_a_busy_process_and_spin_when_it_is_gone():
    waiting = _Waiting()
    assert look(waiting, 0, 1, CROWDED) == 0
    assert look(waiting, 0.05, 1, SLEEPING) is None
    woke = look(waiting, 1.05, 5, QUIET)
    assert woke is not None
    assert 0.3 < woke - 1.05 < 1
    assert look(waiting, woke + 0.05, 60, QUIET) is None


def test_one_quiet_look_wakes_nobody():
    waiting = _Waiting()
    look(waiting, 0, 1, CROWDED)
    for step in range(1, 19):
        assert look(waiting, step / 10, 0.05, QUIET) is None
        assert look(waiting, step / 10 + 0.05, 0.05, SLEEPING) is None


def test_spinning_is_tried_ever_more_rarely_while_it_fails_and_soon_again_once_it_held():
    waiting = _Waiting()
    now_s = look(waiting, 0, 1, CROWDED)
    rests = []
    for _ in range(5):
        woke = look(waiting, now_s, 60, SLEEPING)
        rests.append(woke - now_s)
        now_s = look(waiting, woke + 0.25, 1, CROWDED)
    assert rests == pytest.approx([2, 4, 8, 16, 16], abs=0.1)
    woke = look(waiting, now_s, 60, SLEEPING)
    assert look(waiting, woke, 10, QUIET) is None
    slept = look(waiting, woke + 10, 1, CROWDED)
    assert look(waiting, slept, 60, SLEEPING) - slept == pytest.approx(2, abs=0.1)


def test_crowding_is_that_of_the_working_thread_that_lacked_a_core_most():
    before = dict.fromkeys(("idle", "main", "worker", "gone"), (0, 0, 0))
    after = {
        "idle": (1 * MS, 9 * MS, 1),  # crowded, and without work
        "main": (190 * MS, 10 * MS, 20),
        "worker": (100 * MS, 100 * MS, 25),
        "new": (0, 200 * MS, 1),
    }
    assert crowding(before, after, 0.2) == pytest.approx((0.5, 4e-3))
    assert crowding(before, {"main": (190 * MS, 0, 0)}, 0.2) == (0, 0)
    assert crowding({}, after, 0.2) == (0, 0)


def run(code: str, **environment: str) -> str:
    """What a process prints that may use two cores."""
    cleared = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))}
    command = [sys.executable, "-c", _START + code]
    ran = subprocess.run(
        command, env=cleared | environment, capture_output=True, text=True, timeout=HANG_S, check=False
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


_START = """
import os, subprocess, sys, threading, time
cores = sorted(os.sched_getaffinity(0))[:2]
os.sched_setaffinity(0, cores)
import torch
from kvq.kernels import other_threads

def threads():
    return {thread.name for thread in threading.enumerate()}

def wait_for(condition):
    while not condition():
        product()

a = torch.randn(400, 400)
def product():
    return a @ a
"""

_SLEEPS = """
def sleeps():
    '''How many of 20 times the other threads of a product had to be woken.'''
    me = str(threading.get_native_id())
    before = other_threads.read_times()
    for _ in range(20):
        product()
        ready = time.perf_counter() + 3e-4
        while time.perf_counter() < ready:
            pass
    after = other_threads.read_times()
    return sum(after[name][2] - before[name][2] for name in before.keys() & after.keys() if name != me)
"""

_TEAM = """
product()
expected = product()
wait_for(lambda: sleeps() < 6)
team = other_threads._SecondTeam()
team.hold()
assert team.is_held
wait_for(lambda: sleeps() >= 16)
assert torch.equal(product(), expected)
before = len(other_threads.read_times())
team.release()
assert not team.is_held
wait_for(lambda: len(other_threads.read_times()) < before)
wait_for(lambda: sleeps() < 6)
assert torch.equal(product(), expected)
team.release()
team.hold()
team.release()
print("done")
"""

_HANDED_ON = """
expected = product()
handed_on, ended = threading.Event(), threading.Event()
def compute():
    product()
    wait_for(lambda: sleeps() >= 16)
    handed_on.set()
    ended.wait()
    wait_for(lambda: sleeps() < 6)
thread = threading.Thread(target=compute)
thread.start()
handed_on.wait()
other_threads.end_team()
ended.set()
thread.join()
assert torch.equal(product(), expected)
other_threads.end_team()
other_threads.end_team()
print("done")
"""

_BUSY = """
other_threads.watch_other_threads()
other_threads.watch_other_threads()
assert [thread.name for thread in threading.enumerate()].count("kvq-other-threads") == 1
expected = product()
busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
try:
    wait_for(lambda: "kvq-second-team" in threads())
    assert torch.equal(product(), expected)
finally:
    for process in busy:
        process.kill()
        process.wait()
wait_for(lambda: "kvq-second-team" not in threads())
print("done")
"""

_WHO = """
import kvq
assert "kvq-other-threads" not in threads()
kvq.load("tiny")
assert "kvq-other-threads" in threads()
print("done")
"""

_CHOSEN = """
other_threads.watch_other_threads()
assert "kvq-other-threads" not in threads()
print("done")
"""


@pytest.mark.long
@two_cores
def test_a_second_team_makes_threads_sleep_and_changes_no_result():
    assert run(_SLEEPS + _TEAM) == "done\n"


@two_cores
def test_who_hands_the_computing_on_leaves_the_next_thread_its_cores():
    assert run(_SLEEPS + _HANDED_ON) == "done\n"


@pytest.mark.long
@two_cores
def test_threads_sleep_beside_busy_processes_for_as_long_as_these_last():
    assert run(_BUSY) == "done\n"


@linux
def test_who_loads_a_model_is_watched():
    assert run(_WHO) == "done\n"


@linux
@pytest.mark.parametrize("chosen", [{"OMP_WAIT_POLICY": "ACTIVE"}, {"GOMP_SPINCOUNT": "100"}])
def test_what_a_user_has_chosen_stays(chosen):
    assert run(_CHOSEN, **chosen) == "done\n"


@linux
def test_concurrent_first_callers_start_one_sampler():
    printed = run("""
together = threading.Barrier(8)

def come():
    together.wait()
    other_threads.watch_other_threads()

callers = [threading.Thread(target=come) for _ in range(8)]
for caller in callers: caller.start()
for caller in callers: caller.join()
print([thread.name for thread in threading.enumerate()].count("kvq-other-threads"))
""")
    assert printed == "1\n"
