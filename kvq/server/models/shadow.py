"""Shadows: copies of some requests go to another version, whose answers are compared and thrown away."""

import asyncio
import logging
import random
from collections.abc import Callable
from dataclasses import dataclass
from math import exp, isfinite, log
from typing import Any

import prometheus_client
from starlette.types import Scope

from kvq.engine import TokenLogprobs
from kvq.server.admission.transcript import Transcript, transcript
from kvq.server.http.problems import OVERFLOWN, Problem
from kvq.server.http.strict_json import DECODED
from kvq.server.logs import describe
from kvq.server.models.hosted import Hosted
from kvq.server.models.inner import ask

_log = logging.getLogger("kvq")
SHADOW = "shadow"  # tenant of the copies; clients can't find its cached prefixes
_MAX_COPIES = 4  # at a time; of further requests, none are made
_LEAST_LOGPROB = -100.0  # nats
_LABELS = ("name", "version")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Comparison:
    """Comparison of two answers to one request."""

    is_equal: bool
    num_same: int  # tokens before the first that differs
    kl: float | None  # nats, mean over these tokens; None: not both have log-probabilities


def compare(shown: Transcript, copy: Transcript) -> _Comparison:
    """Compare the tokens of two complete transcripts.

    KL divergence is over the tokens that are among the likeliest of both, and all others as one, which makes
    it a lower bound. Positions after the first differing token have other contexts and do not count.
    """
    pairs = zip(shown.token_ids, copy.token_ids, strict=False)
    num_same = next((at for at, (one, other) in enumerate(pairs) if one != other), None)
    if num_same is None:
        num_same = min(len(shown.token_ids), len(copy.token_ids))
    known = list(zip(shown.logprobs, copy.logprobs, strict=False))[: num_same + 1]
    kl = [_kl(one, other) for one, other in known if one.top and other.top]
    return _Comparison(
        is_equal=shown.token_ids == copy.token_ids,
        num_same=num_same,
        kl=sum(kl) / len(kl) if kl else None,
    )


def _kl(one: TokenLogprobs, other: TokenLogprobs) -> float:
    theirs = dict(other.top)
    both = [(p, theirs[token]) for token, p in one.top if token in theirs and isfinite(p)]
    rest = [
        max(log(max(1 - sum(map(exp, found)), 0) or 1e-300), _LEAST_LOGPROB)
        for found in zip(*both, strict=True)
    ]
    pairs = [*both, *([tuple(rest)] if rest else [])]
    return max(0.0, sum(exp(p) * (p - max(q, _LEAST_LOGPROB)) for p, q in pairs))


class Shadows:
    """Copies of requests, and counts of how their answers compare."""

    def __init__(
        self,
        registry: prometheus_client.CollectorRegistry,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self._chance = chance
        self._tasks: set[asyncio.Task[None]] = set()
        self.ends = prometheus_client.Counter(
            "kvq_shadow_requests", "Copies, by what became of them: equal, different, failed or skipped.",
            (*_LABELS, "end"), registry=registry,
        )  # fmt: skip
        self.same = prometheus_client.Histogram(
            "kvq_shadow_same_tokens", "Tokens before the first one that differs, of different answers.",
            _LABELS, buckets=(0, 1, 4, 16, 64, 256, 1024), registry=registry,
        )  # fmt: skip
        self.kl = prometheus_client.Summary(
            "kvq_shadow_kl_nats", "Mean KL divergence per answer.", _LABELS, registry=registry
        )

    def draw(self, share: float) -> Transcript | None:
        """Return a transcript for a request that is to be compared, or None."""
        return Transcript(seed=random.getrandbits(31)) if self._chance() < share else None

    def copy(
        self, name: str, shown: Transcript, hosted: Hosted, scope: Scope, body: Any
    ) -> Callable[[], None]:
        """Send a copy of a request to a version. `body`: decoded, and not used by others.

        Return a function to call once the request itself has been answered.
        """
        ends = self.ends.labels
        version = hosted.entry.name
        if len(self._tasks) >= _MAX_COPIES or hosted.is_stopped:
            ends(name, version, "skipped").inc()
            return lambda: None
        answered = asyncio.Event()

        async def run() -> None:
            own = Transcript(seed=shown.seed, is_shadow=True)
            transcript.set(own)
            await _generate(hosted, scope, body)
            await answered.wait()
            if not (shown.is_complete and own.is_complete):
                ends(name, version, "failed" if shown.is_complete else "skipped").inc()
                return
            found = compare(shown, own)
            ends(name, version, "equal" if found.is_equal else "different").inc()
            if not found.is_equal:
                self.same.labels(name, version).observe(found.num_same)
            if found.kl is not None:
                self.kl.labels(name, version).observe(found.kl)

        task = asyncio.create_task(run())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return answered.set

    async def close(self) -> None:
        """Cancel all copies."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def _generate(hosted: Hosted, scope: Scope, body: dict[str, Any]) -> None:
    """Let a version answer a copy of a request, whole, and drop the answer; without one, log the reason."""
    body |= {"model": hosted.service.name, "stream": False}
    body.pop("stream_options", None)
    try:
        with hosted.using():
            await hosted.wait_for_engine()
            stays = [*scope["headers"], (OVERFLOWN.encode(), b"1")]  # no copy goes to an upstream
            await ask(hosted.app, scope, {"kvq_tenant": SHADOW, DECODED: body, "headers": stays})
    except Exception as error:  # noqa: BLE001 - the request itself goes on
        reason = str(error) if isinstance(error, Problem) else describe(error)
        _log.warning("no copy for %s: %s", hosted.entry.name, reason)
