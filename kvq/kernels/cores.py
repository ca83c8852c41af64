"""CPU quota: the number of cores that the container grants this process, which torch ignores.

With a quota of one core, two threads run for half of every period and are throttled for the other half; a
single thread is hardly ever throttled.
"""

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path, PurePosixPath

import torch

_log = logging.getLogger("kvq")
_GROUPS = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")
_CHOSEN_BY_USERS = "OMP_NUM_THREADS"


def settle_threads() -> None:
    """Limit the threads of torch and the kernels to the quota's cores; one call per process suffices."""
    _settle(os.getpid())


@cache
def _settle(process: int) -> None:
    if sys.platform != "linux" or _CHOSEN_BY_USERS in os.environ:
        return
    cores = quota_cores()
    if cores is None or (threads := max(1, round(cores))) >= torch.get_num_threads():
        return
    _log.info("a quota of %g cores: %d threads in place of %d", cores, threads, torch.get_num_threads())
    torch.set_num_threads(threads)


def quota_cores(groups: Path = _GROUPS, own: Path = _OWN) -> float | None:
    """Return the CPU time, in cores, that the process's cgroups (v1 or v2) grant, or None without a limit."""
    with suppress(OSError):
        return min(_quotas(groups, own.read_text("utf-8")), default=None)
    return None


def _quotas(groups: Path, own: str) -> Iterator[float]:
    """Yield the quotas of a process's group and its parents. `own`: lines number:controllers:path."""
    for line in own.splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        root = groups / "cpu" if controllers else groups
        group = PurePosixPath(path.lstrip("/"))
        for folder in (group, *group.parents):
            with suppress(OSError, ValueError):  # not seen from inside a container; "max" or -1: none
                yield _quota(root / folder, is_v2=not controllers)


def _quota(folder: Path, *, is_v2: bool) -> float:
    if is_v2:
        quota, period = (folder / "cpu.max").read_text("ascii").split()
    else:
        names = "cpu.cfs_quota_us", "cpu.cfs_period_us"
        quota, period = ((folder / name).read_text("ascii") for name in names)
    if int(quota) <= 0:
        raise ValueError("no limit")
    return int(quota) / int(period)
