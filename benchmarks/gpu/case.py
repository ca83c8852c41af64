"""One thing to measure, and what it is measured on."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

Rows = list[dict[str, Any]]
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """The device that is measured. On a CPU everything is rehearsed: tiny shapes, the same code."""

    device: str  # "cuda" or "cpu"
    folder: Path  # for models, caches and logs
    out: Path  # what is put here is kept
    rivals: Path | None = None  # a folder with a rivals.py, see `kvq bench attention`

    @property
    def is_rehearsal(self) -> bool:
        """True on a CPU, where figures mean nothing."""
        return self.device == "cpu"

    @property
    def backend(self) -> str:
        """Backend of kvq's kernels."""
        return "auto" if self.is_rehearsal else "triton"

    @property
    def repeats(self) -> int:
        """Samples of every contender."""
        return 2 if self.is_rehearsal else 11

    def pick(self, real: T, rehearsed: T) -> T:
        """A size, and what stands for it in a rehearsal."""
        return rehearsed if self.is_rehearsal else real


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """Contenders that are measured together, interleaved, and fail together.

    If it fails, or its process dies of it, its `pieces` are tried in its place.
    """

    name: str
    run: Callable[[], Rows]
    limit_s: float = 60.0
    pieces: tuple["Case", ...] = field(default=())
