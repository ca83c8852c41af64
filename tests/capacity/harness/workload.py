"""Requests to come: when they arrive, how long they are, what they share, and how their users behave."""

import math
import random
from array import array
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace

from kvq.errors import ConfigError
from kvq.scheduler import Priority, Request


@dataclass(kw_only=True, slots=True, eq=False)
class SessionRequest(Request):
    """Request that may name its session, as an engine's jobs do."""

    session: str | None = None
    retain_s: float | None = None

    @property
    def timing(self) -> "SessionRequest":
        """What has `arrival_s`."""
        return self


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulatedRequest:
    """One request to come."""

    arrival_s: float
    prompt: "array[int]"
    max_tokens: int | None  # per branch; None as far as context and pool reach
    num_branches: int = 1
    is_beam_search: bool = False  # branches are chosen anew after every token
    end_token: int | None = None  # ends a branch before `max_tokens`; not in beam search
    priority: Priority = Priority.INTERACTIVE
    tenant: str = ""
    shared_salt: str | None = None
    reuse: bool = True
    max_chunk: int | None = None
    patience_s: float | None = None  # the user cancels this long after the arrival
    session: str | None = None
    retain_s: float | None = None

    def request(self, number: int) -> SessionRequest:
        """A fresh request, as the scheduler takes it."""
        return SessionRequest(
            id=str(number),
            tokens=self.prompt,
            max_tokens=self.max_tokens,
            num_branches=self.num_branches,
            priority=self.priority,
            tenant=self.tenant,
            shared_salt=self.shared_salt,
            max_reuse=None if self.reuse else 0,
            max_chunk=self.max_chunk,
            session=self.session,
            retain_s=self.retain_s,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Mix:
    """What requests are like on the whole. Lengths are log-normal; shares lie in 0 to 1."""

    rate: float  # requests per second, with exponential gaps
    prompt_tokens: float  # median
    output_tokens: float  # median
    spread: float = 0.7  # sigma of the lengths' logarithm
    longest: int = 1 << 17  # tokens of a prompt, and of an output
    vocabulary: int = 1000  # token ids of prompts
    burst_share: float = 0.0  # arrive together with the one before
    prefix_share: float = 0.0  # start as one of the last prompts did
    batch_share: float = 0.0
    branched_share: float = 0.0  # several results of one prompt; half of them beam search
    max_branches: int = 4
    unlimited_share: float = 0.0  # leave `max_tokens` to the scheduler
    whole_share: float = 0.0  # compute their whole prompt, whatever is cached
    public_share: float = 0.0  # share prefixes with other tenants
    chunk_share: float = 0.0  # limit their own prefill chunks
    impatient_share: float = 0.0
    patience_s: float = 1.0  # mean of the impatient
    num_tenants: int = 1
    end_token: int | None = None
    session_share: float = 0.0  # name one of a few sessions
    num_sessions: int = 6

    def __post_init__(self) -> None:
        for name in ("rate", "prompt_tokens", "output_tokens"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be above 0, got {getattr(self, name)}")


def jobs(mix: Mix, seed: int) -> Iterator[SimulatedRequest]:
    """Jobs without end, in order of arrival; the same for the same seed."""
    rng = random.Random(seed)
    recent: deque[array[int]] = deque(maxlen=8)
    now = 0.0
    while True:
        if rng.random() >= mix.burst_share:
            now += rng.expovariate(mix.rate)
        prompt = _prompt(mix, rng, recent)
        recent.append(prompt)
        yield _job(mix, rng, now, prompt)


def _prompt(mix: Mix, rng: random.Random, recent: "deque[array[int]]") -> "array[int]":
    tokens = array("I", rng.choices(range(mix.vocabulary), k=_length(mix, rng, mix.prompt_tokens)))
    if recent and rng.random() < mix.prefix_share:
        known = rng.choice(recent)
        tokens = (known[: rng.randint(1, len(known))] + tokens)[: mix.longest]
    return tokens


def _job(mix: Mix, rng: random.Random, now: float, prompt: "array[int]") -> SimulatedRequest:
    has_branches = rng.random() < mix.branched_share
    is_beam_search = has_branches and rng.random() < 0.5
    is_unlimited = not is_beam_search and rng.random() < mix.unlimited_share
    job = SimulatedRequest(
        arrival_s=now,
        prompt=prompt,
        max_tokens=None if is_unlimited else _length(mix, rng, mix.output_tokens),
        num_branches=rng.randint(2, mix.max_branches) if has_branches else 1,
        is_beam_search=is_beam_search,
        end_token=None if is_beam_search else mix.end_token,
        priority=Priority.BATCH if rng.random() < mix.batch_share else Priority.INTERACTIVE,
        tenant=f"tenant-{rng.randrange(mix.num_tenants)}",
        shared_salt="public" if rng.random() < mix.public_share else None,
        reuse=rng.random() >= mix.whole_share,
        max_chunk=rng.randint(1, 16) if rng.random() < mix.chunk_share else None,
        patience_s=rng.expovariate(1 / mix.patience_s) if rng.random() < mix.impatient_share else None,
    )
    if mix.session_share and rng.random() < mix.session_share:  # without sessions, nothing is drawn
        session, retain_s = f"s{rng.randrange(mix.num_sessions)}", rng.choice([None, None, 0.0, 0.05, 1.0])
        return replace(job, session=session, retain_s=retain_s)
    return job


def _length(mix: Mix, rng: random.Random, median: float) -> int:
    return min(mix.longest, max(1, round(rng.lognormvariate(math.log(median), mix.spread))))
