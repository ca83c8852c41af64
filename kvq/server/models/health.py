"""Health of a version: its latest requests, and whether they are past a limit of its roll-out."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import ceil
from time import monotonic

from kvq.server.admission.transcript import transcript
from kvq.server.models.config import Limits

_FAILED = ("error", "timeout", "refused")  # outcomes that are the server's fault: 5xx, for clients
_MOST = 10_000  # requests of a version that are remembered


@dataclass(slots=True, eq=False)
class Health:
    """Outcomes and TTFT of a version's latest requests, without copies for comparison."""

    clock: Callable[[], float] = monotonic
    _endings: deque[tuple[float, bool]] = field(default_factory=lambda: deque(maxlen=_MOST))
    _ttft: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=_MOST))
    _alerts: deque[tuple[float, int]] = field(default_factory=deque)  # totals of the guard, as they rose

    def ended(self, ending: str) -> None:
        """Record an outcome in the terms of `Metrics.count`."""
        if (ending == "success" or ending in _FAILED) and not _is_shadow():
            self._endings.append((self.clock(), ending in _FAILED))

    def began(self, ttft_s: float) -> None:
        """Record the time to a first token."""
        if not _is_shadow():
            self._ttft.append((self.clock(), ttft_s))

    def guarded(self, num_alerts: int) -> None:
        """Record the number of the guard's alerts so far."""
        if not self._alerts or self._alerts[-1][1] != num_alerts:
            self._alerts.append((self.clock(), num_alerts))

    def forget(self) -> None:
        """Forget all requests and alerts, for a new trial with other weights."""
        self._endings.clear()
        self._ttft.clear()
        while len(self._alerts) > 1:
            self._alerts.popleft()

    def why_unfit(self, limits: Limits, others: "Sequence[Health]") -> str | None:
        """Return which limit the version is past, or None. `others`: versions that could get its requests."""
        since = self.clock() - limits.window_s
        endings = [failed for at, failed in self._endings if at >= since]
        num_failed = sum(endings)
        share = num_failed / max(1, len(endings))
        if limits.errors is not None and len(endings) >= limits.least and share > limits.errors:
            return f"{num_failed} of {len(endings)} requests failed, {share:.0%}; {limits.errors:.0%} may"
        if limits.ttft_ratio is not None:
            own, other = (_latest(healths, since) for healths in ([self], others))
            if min(len(own), len(other)) >= limits.least:
                slow, usual = _p95(own), _p95(other)
                if slow > limits.ttft_ratio * usual:
                    return (
                        f"TTFT p95 is {1e3 * slow:.0f} ms, {slow / max(usual, 1e-9):.1f} times the "
                        f"{1e3 * usual:.0f} ms of the others; {limits.ttft_ratio:g} times is allowed"
                    )
        return self._alerted(limits, since)

    def _alerted(self, limits: Limits, since_s: float) -> str | None:
        if limits.guard_alerts is None or len(self._alerts) < 2:
            return None
        before = max((number for at, number in self._alerts if at < since_s), default=self._alerts[0][1])
        count = self._alerts[-1][1] - before
        return f"the guard alerted {count} times" if count >= limits.guard_alerts else None


def _is_shadow() -> bool:
    kept = transcript.get()
    return kept is not None and kept.is_shadow


def _latest(healths: Sequence[Health], since_s: float) -> list[float]:
    return [ttft for health in healths for at, ttft in health._ttft if at >= since_s]


def _p95(values: Sequence[float]) -> float:
    return sorted(values)[ceil(0.95 * len(values)) - 1]
