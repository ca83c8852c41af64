"""CPU quotas of Linux' cgroups, v1 and v2, as containers have them."""

from dataclasses import dataclass
from pathlib import Path

from kvq.errors import ConfigError

_ROOT = Path("/sys/fs/cgroup")
_PERIOD_US = 100_000
_LEAST_US = 1000  # Linux takes no smaller quota


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """A cgroup of this process's own making."""

    folder: Path

    def add(self, pid: int) -> None:
        """Move a process, all its threads and all that they start from now on into the group."""
        (self.folder / "cgroup.procs").write_text(f"{pid}\n", encoding="ascii")

    def close(self) -> None:
        """Remove the group, which has to be empty."""
        self.folder.rmdir()


def limited(cores: float, name: str, root: Path = _ROOT) -> Group:
    """A new cgroup whose processes together get `cores` CPU seconds a second.

    Raises:
        ConfigError: no such group can be made here, or Linux takes no such quota.
    """
    quota_us = round(cores * _PERIOD_US)
    if quota_us < _LEAST_US:
        raise ConfigError(f"a quota must be at least {_LEAST_US / _PERIOD_US} cores, got {cores}")
    try:
        if "cpu" in _words(root / "cgroup.controllers"):
            (root / "cgroup.subtree_control").write_text("+cpu\n", encoding="ascii")
            return _made(root / name, {"cpu.max": f"{quota_us} {_PERIOD_US}"})
        if (root / "cpu" / "cpu.cfs_quota_us").exists():
            limits = {"cpu.cfs_period_us": str(_PERIOD_US), "cpu.cfs_quota_us": str(quota_us)}
            return _made(root / "cpu" / name, limits)
    except OSError as error:
        raise ConfigError(
            f"a quota of {cores} cores can't be set: {error}; run as root, where {root} may be written to, "
            f"or leave --quota out"
        ) from error
    raise ConfigError(
        f"a quota of {cores} cores needs the cpu controller of cgroup v2 ({root}/cgroup.controllers) or of "
        f"v1 ({root}/cpu/cpu.cfs_quota_us), and neither is there; mount one, or leave --quota out"
    )


def _words(path: Path) -> list[str]:
    return path.read_text(encoding="ascii").split() if path.exists() else []


def _made(folder: Path, limits: dict[str, str]) -> Group:
    folder.mkdir()
    try:
        for file, text in limits.items():
            (folder / file).write_text(text + "\n", encoding="ascii")
    except OSError:
        folder.rmdir()
        raise
    return Group(folder=folder)
