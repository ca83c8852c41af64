"""Waiting between torch's threads: by spinning, or by sleeping if other processes need the cores.

The kernels' own threads (native/pool.h) don't need this. Torch computes with a team of libgomp threads, which
spin while they wait. If another process is busy, a spinning thread may occupy the very core needed by the
thread for which it waits, for a scheduler slice (4 ms) at every step of every layer.

A process therefore samples the times of its threads. If a thread is ready to run but lacks a core much of the
time, for entire slices, libgomp is made to put waiting threads to sleep at once. libgomp does this by itself
if a process has more libgomp threads than there are CPUs (`gomp_throttled_spin_count_var`; libgomp/env.c,
config/linux/wait.h). A second, sleeping team raises their number for as long as needed. Results do not depend
on it.
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
_LOOKS = 4  # samples that are judged together: the system's own housekeeping takes a core for only 20 ms
_LOOK_SHARE = 0.01  # maximum share of the time that sampling takes if a process has many threads
_WORKS = 0.2  # minimum share of the time (ran + waited) for a thread to count
# Waited / (ran + waited), and the time per wait. With one or two busy processes 0.45 and 4 ms; alone 0.04;
# with a server's own HTTP process 0.25 and 0.8 ms, where spinning is still faster.
_CROWDED, _SLICE_S = 0.3, 1e-3
_QUIET = 0.15  # the same for threads that sleep: alone 0.12, with a busy process 0.24 or more
# D109: a second team makes libgomp throttle its spinning
_QUIET_LOOKS = 10  # samples before threads spin again, as other processes come and go
_REST_S = (2.0, 16.0)  # longest sleep before spinning is tried again; the second if it failed

_beginning = threading.Lock()
_SOFTLY = 1  # omp_pause_soft: data private to threads stay

Times = dict[str, tuple[int, int, int]]  # by thread: ns that it ran, ns that it was ready, how often it ran


def watch_other_threads() -> None:
    """Sample this process's threads until it ends; call this once per process, and again after a fork."""
    with _beginning:  # a cache alone would let concurrent first callers start a sampler each
        _watch(os.getpid())


if hasattr(os, "register_at_fork"):  # a thread of the parent may have held it
    os.register_at_fork(after_in_child=_beginning._at_fork_reinit)  # type: ignore[attr-defined]


@cache
def _watch(process: int) -> None:
    if sys.platform != "linux" or any(map(os.environ.get, _CHOSEN_BY_USERS)):
        return
    if not read_times() or not _runtimes():
        return
    threading.Thread(target=_run, name="kvq-other-threads", daemon=True).start()


def end_team() -> None:  # D110: one thread loads, another runs steps: end the first team
    """End the calling thread's libgomp team; the thread gets a new team when it next computes.

    Call this before another thread takes over the computation: two teams have more threads than there are
    CPUs, so their threads would sleep while waiting. Call it before a fork, too: the child inherits the team
    without its threads, and would wait for them forever.
    """
    if sys.platform == "linux":
        for library in _runtimes():
            library.omp_pause_resource(_SOFTLY, library.omp_get_initial_device())


def read_times() -> Times:
    """Return the times of all threads of this process; empty if the kernel doesn't report them."""
    times: Times = {}
    for thread in os.listdir("/proc/self/task"):
        with suppress(OSError, ValueError):  # the thread has ended meanwhile, or the kernel doesn't count
            ran, waited, turns = Path(f"/proc/self/task/{thread}/schedstat").read_text("ascii").split()
            times[thread] = int(ran), int(waited), int(turns)
    return times


def crowding(before: Times, after: Times, elapsed_s: float) -> tuple[float, float]:
    """Return the largest share of time that a working thread lacked a core, and its seconds per wait."""
    worst = (0.0, 0.0)
    for thread in before.keys() & after.keys():
        ran, waited, turns = (new - old for new, old in zip(after[thread], before[thread], strict=True))
        if ran + waited > _WORKS * elapsed_s * 1e9:
            worst = max(worst, (waited / (ran + waited), waited / 1e9 / max(1, turns)))
    return worst


class _Waiting:
    """Decision on whether threads should sleep (`are_asleep`), updated with each sample."""

    def __init__(self) -> None:
        self.are_asleep = False
        self._changed_s = -math.inf  # when that changed
        self._rest_s = _REST_S[0]
        self._quiet_looks = 0

    def look(self, now_s: float, share: float, wait_s: float) -> None:
        """Update the decision with a result of `crowding`."""
        since_s = now_s - self._changed_s
        self._quiet_looks = self._quiet_looks + 1 if share < _QUIET else 0
        if not self.are_asleep and share >= _CROWDED and wait_s >= _SLICE_S:
            is_again = since_s < _REST_S[0]  # spinning was tried and failed
            self._rest_s = min(2 * self._rest_s, _REST_S[1]) if is_again else _REST_S[0]
            self.are_asleep, self._changed_s, self._quiet_looks = True, now_s, 0
        elif self.are_asleep and (self._quiet_looks >= _QUIET_LOOKS or since_s >= self._rest_s):
            self.are_asleep, self._changed_s = False, now_s


class _SecondTeam:
    """Sleeping threads that raise libgomp's thread count above that of CPUs, from `hold` to `release`."""

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
    """Return all loaded copies of libgomp: torch's and, if loaded, the system's."""
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
