"""Waiting of torch's threads for each other: spinning while their cores are theirs, else asleep.

The kernels' own threads (native/pool.h) need none of this. What torch computes with several is done by a team
of libgomp's, whose threads spin while they wait. Beside a busy process the one that spins holds the core that
the one it waits for should have, a slice of the scheduler (4 ms) at every step of every layer.

So a process looks at its threads now and then. While one of them is ready to run and has no core for much of
its time, whole slices of it, libgomp is made to let threads sleep at once. It does so by itself when a
process holds more of its threads than there are CPUs (`gomp_throttled_spin_count_var`; libgomp/env.c,
config/linux/wait.h), which a second team of them, asleep for as long as it is needed, brings about. No
result depends on it.
"""

import ctypes
import math
import os
import sys
import threading
import time
from collections import deque
from contextlib import suppress
from functools import cache
from pathlib import Path

import torch

_CHOSEN_BY_USERS = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
_LOOK_S = 0.05
_LOOKS = 4  # that are judged together: a machine's own housekeeping takes a core for 20 ms and is gone
_LOOK_SHARE = 0.01  # of the time, at most, where a process has many threads
_WORKS = 0.2  # ran + waited, as a share of the time: a thread that counts
# Waited / (ran + waited), and how long at a time. Beside one or two busy processes 0.45 and 4 ms; alone 0.04,
# beside a server's own HTTP process 0.25 and 0.8 ms, which spinning outruns.
_CROWDED, _SLICE_S = 0.3, 1e-3
_QUIET = 0.15  # threads that sleep, alone 0.12, beside a busy process from 0.24
# D109: a second team makes libgomp throttle its spinning
_QUIET_LOOKS = 10  # before they spin again: neighbours come and go
_REST_S = (2.0, 16.0)  # and however it looks, to see whether they could; the second where they could not

_SOFTLY = 1  # omp_pause_soft: what threads hold of their own stays

Times = dict[str, tuple[int, int, int]]  # by thread: ns that it ran, ns that it was ready, how often it ran


def watch_other_threads() -> None:
    """Look at this process's threads from now on, until it ends; once is enough, and a fork starts anew."""
    _watch(os.getpid())


@cache
def _watch(process: int) -> None:
    if sys.platform != "linux" or any(map(os.environ.get, _CHOSEN_BY_USERS)):
        return
    if not read_times() or not _runtimes():
        return
    threading.Thread(target=_run, name="kvq-other-threads", daemon=True).start()


def end_team() -> None:  # D110: loaded here, stepped there: end the first team
    """End the calling thread's team of libgomp; it gets another when it computes again.

    Whoever hands the computing on to another thread calls this: two teams are more threads than there are
    CPUs, and make each other sleep. So does whoever forks: a child that has a team without its threads waits
    for them for ever.
    """
    if sys.platform == "linux":
        for library in _runtimes():
            library.omp_pause_resource(_SOFTLY, library.omp_get_initial_device())


def read_times() -> Times:
    """Return the times of every thread of this process; empty where the kernel doesn't say."""
    times: Times = {}
    for thread in os.listdir("/proc/self/task"):
        with suppress(OSError, ValueError):  # a thread that has ended meanwhile; a kernel that doesn't count
            ran, waited, turns = Path(f"/proc/self/task/{thread}/schedstat").read_text("ascii").split()
            times[thread] = int(ran), int(waited), int(turns)
    return times


def crowding(before: Times, after: Times, elapsed_s: float) -> tuple[float, float]:
    """Return the share of time that the working thread worst off lacked a core, and seconds at a time."""
    worst = (0.0, 0.0)
    for thread in before.keys() & after.keys():
        ran, waited, turns = (new - old for new, old in zip(after[thread], before[thread], strict=True))
        if ran + waited > _WORKS * elapsed_s * 1e9:
            worst = max(worst, (waited / (ran + waited), waited / 1e9 / max(1, turns)))
    return worst


class _Waiting:
    """Decides, look by look, whether threads sleep: `are_asleep`."""

    def __init__(self) -> None:
        self.are_asleep = False
        self._changed_s = -math.inf  # when they were told to
        self._rest_s = _REST_S[0]
        self._quiet_looks = 0

    def look(self, now_s: float, share: float, wait_s: float) -> None:
        """Take note of `crowding` at a time."""
        since_s = now_s - self._changed_s
        self._quiet_looks = self._quiet_looks + 1 if share < _QUIET else 0
        if not self.are_asleep and share >= _CROWDED and wait_s >= _SLICE_S:
            is_again = since_s < _REST_S[0]  # spinning was tried in vain
            self._rest_s = min(2 * self._rest_s, _REST_S[1]) if is_again else _REST_S[0]
            self.are_asleep, self._changed_s, self._quiet_looks = True, now_s, 0
        elif self.are_asleep and (self._quiet_looks >= _QUIET_LOOKS or since_s >= self._rest_s):
            self.are_asleep, self._changed_s = False, now_s


class _SecondTeam:
    """More of libgomp's threads than there are CPUs, from `hold` until `release`; they sleep."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._over = threading.Event()

    @property
    def is_held(self) -> bool:
        return self._thread is not None

    def hold(self) -> None:
        self._over.clear()
        self._thread = threading.Thread(target=self._hold, name="kvq-second-team", daemon=True)
        self._thread.start()

    def release(self) -> None:
        if self._thread is not None:
            self._over.set()
            self._thread.join()  # libgomp counts its team as gone
            self._thread = None

    def _hold(self) -> None:
        size = max(2, len(os.sched_getaffinity(0)) - torch.get_num_threads() + 2)
        for library in _runtimes():
            # every thread of the team calls free(NULL), which does nothing
            library.GOMP_parallel(ctypes.CDLL(None).free, None, size, 0)
        self._over.wait()


@cache
def _runtimes() -> list[ctypes.CDLL]:
    """libgomp, as often as it is loaded: torch's, and maybe the system's."""
    maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    paths = {line.split(maxsplit=5)[-1] for line in maps if "libgomp" in line}
    return [ctypes.CDLL(path) for path in sorted(paths)]


def _run() -> None:
    team, waiting = _SecondTeam(), _Waiting()
    looks = deque([(time.monotonic(), read_times())], maxlen=1 + _LOOKS)
    wait_s = _LOOK_S
    while True:
        time.sleep(wait_s)
        looked = time.monotonic()
        looks.append((looked, read_times()))
        (began, before), (_, after) = looks[0], looks[-1]
        waiting.look(looked, *crowding(before, after, looked - began))
        if waiting.are_asleep != team.is_held:
            (team.hold if waiting.are_asleep else team.release)()
        wait_s = max(_LOOK_S, (time.monotonic() - looked) / _LOOK_SHARE)
