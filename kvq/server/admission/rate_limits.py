"""Rate limits of an API key: concurrent sequences, and requests and tokens per minute."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import ceil
from time import monotonic

from kvq.server.http.problems import Problem

_MINUTE_S = 60.0


@dataclass(frozen=True, kw_only=True, slots=True)
class TenantLimits:
    """Limits for each API key (None: no limit). Without keys, all clients are one tenant."""

    max_concurrency: int | None = None  # concurrent sequences: prompts times results of a request
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None  # prompt tokens that had to be computed, and generated ones


class _Bucket:
    """Token bucket that refills steadily up to one minute's amount; costs charged later may overdraw it."""

    def __init__(self, per_minute: int, now: float) -> None:
        self._per_minute = per_minute
        self._left = float(per_minute)
        self._filled_s = now

    def wait_s(self, now: float, amount: float) -> float:
        """Return the number of seconds until `amount` is available, or 0 if it is available now."""
        self._fill(now)
        return max(0.0, amount - self._left) / self._per_minute * _MINUTE_S

    def take(self, now: float, amount: float) -> None:
        """Subtract `amount`, even if less is left."""
        self._fill(now)
        self._left -= amount

    def _fill(self, now: float) -> None:
        refilled = (now - self._filled_s) / _MINUTE_S * self._per_minute
        self._left = min(self._left + refilled, float(self._per_minute))
        self._filled_s = now


class Tenant:
    """Tenant: the current requests and the limits of one API key."""

    def __init__(self, limits: TenantLimits, clock: Callable[[], float] = monotonic) -> None:
        self.num_active = 0  # sequences
        self._limits = limits
        self._clock = clock
        now = clock()
        rpm, tpm = limits.requests_per_minute, limits.tokens_per_minute
        self._requests = None if rpm is None else _Bucket(rpm, now)
        self._tokens = None if tpm is None else _Bucket(tpm, now)

    def check(self, sequences: int = 1) -> None:
        """Raise Problem if `sequences` more sequences exceed the limit now (429) or on their own (400)."""
        most = self._limits.max_concurrency
        if most is not None and sequences > most:
            raise Problem(400, f"{sequences} sequences at once; {most} are allowed for this key", param="n")
        if most is not None and self.num_active + sequences > most:
            raise _too_many(f"this key has {self.num_active} sequences running; {most} are allowed", 1.0)
        self.check_rates()

    def check_rates(self) -> None:
        """Raise Problem (429) if this minute's requests or tokens are used up."""
        now = self._clock()
        if self._requests is not None and (wait_s := self._requests.wait_s(now, 1)):
            raise _too_many(f"this key may send {self._limits.requests_per_minute} requests a minute", wait_s)
        if self._tokens is not None and (wait_s := self._tokens.wait_s(now, 1)):
            raise _too_many(f"this key may use {self._limits.tokens_per_minute} tokens a minute", wait_s)

    @contextmanager
    def active(self, sequences: int = 1) -> Iterator[None]:
        """Count an admitted request and its sequences until the request ends."""
        self.num_active += sequences
        self.charge_request()
        try:
            yield
        finally:
            self.num_active -= sequences

    def charge_request(self) -> None:
        """Count a request toward the limit per minute, even if it fails."""
        if self._requests is not None:
            self._requests.take(self._clock(), 1)

    def charge(self, tokens: int) -> None:
        """Count the tokens that a request used toward the limit per minute."""
        if self._tokens is not None:
            self._tokens.take(self._clock(), tokens)


def _too_many(message: str, wait_s: float) -> Problem:
    return Problem(
        429, message, type="rate_limit_error", code="rate_limit_exceeded", retry_after_s=max(1, ceil(wait_s))
    )
