"""Quotas of containers: found in either kind of cgroup, and what they make of threads."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvq.kernels.cores import quota_cores
from tests.waiting import HANG_S


def write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text + "\n", encoding="ascii")


@pytest.fixture
def groups(tmp_path: Path) -> Path:
    return tmp_path / "cgroup"


def quota(groups: Path, own: str) -> float | None:
    (groups.parent / "own").write_text(own, encoding="ascii")
    return quota_cores(groups, groups.parent / "own")


def test_a_quota_of_version_2_is_the_lowest_of_all_groups_above(groups):
    write(groups / "a", cpu__max="150000 100000")
    write(groups / "a" / "b", cpu__max="max 100000")
    assert quota(groups, "0::/a/b\n") == 1.5
    write(groups / "a" / "b", cpu__max="50000 100000")
    assert quota(groups, "0::/a/b\n") == 0.5
    assert quota(groups, "0::/c\n") is None
    write(groups, cpu__max="300000 100000")  # of a container, which sees itself as the root
    assert quota(groups, "0::/not/seen/inside\n") == 3


def test_a_quota_of_version_1_is_that_of_the_cpu_controller(groups):
    write(groups / "cpu" / "a", cpu__cfs_quota_us="200000", cpu__cfs_period_us="50000")
    write(groups / "cpuset" / "a", cpu__cfs_quota_us="1000", cpu__cfs_period_us="50000")
    own = "4:cpuset:/a\n3:cpu,cpuacct:/a\n1:name=systemd:/x\n"
    assert quota(groups, own) == 4
    write(groups / "cpu" / "a", cpu__cfs_quota_us="-1")
    assert quota(groups, own) is None


def test_without_cgroups_there_is_no_quota(tmp_path):
    assert quota_cores(tmp_path / "none", tmp_path / "none") is None


_PROGRAM = """
import torch
from pathlib import Path
from kvq.kernels import cores
torch.set_num_threads(6)
cores.quota_cores.__defaults__ = Path({groups!r}), Path({own!r})
cores.settle_threads()
cores.settle_threads()
print(torch.get_num_threads())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="quotas are Linux's")
@pytest.mark.parametrize(
    ("given", "chosen", "threads"),
    [("240000", {}, 2), ("30000", {}, 1), ("900000", {}, 6), ("240000", {"OMP_NUM_THREADS": "6"}, 6)],
)
def test_threads_are_as_many_as_the_quota_has_cores_unless_a_user_chose(groups, given, chosen, threads):
    write(groups, cpu__max=f"{given} 100000")
    own = groups.parent / "own"
    own.write_text("0::/\n", encoding="ascii")
    program = _PROGRAM.format(groups=str(groups), own=str(own))
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"} | chosen
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment, timeout=HANG_S
    )
    assert ran.stdout == f"{threads}\n", ran.stderr
