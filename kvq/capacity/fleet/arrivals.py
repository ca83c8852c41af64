"""Request arrivals for a simulation, sampled at random or read from a trace."""

import random
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from pathlib import Path

from kvq.capacity.lengths import HASHED_TOKENS, Lengths, read_lines
from kvq.capacity.plan.gpus import check_positive
from kvq.errors import ConfigError
from kvq.scheduler import Priority

_MULTIPLIER = 2_654_435_761  # Knuth's multiplicative hash
_ANSWERS = 1 << 31  # number of possible first tokens of an answer


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Call:
    """One future request. Only the simulation knows the length of its output."""

    number: int  # in order of arrival
    arrival_s: float
    prompt: "array[int]"  # token ids
    output_tokens: int  # at least 1
    kept_tokens: int | None = None  # output tokens before the client disconnects; None: it stays connected
    whole: "Call | None" = None  # the full request, if this one is only its prompt and first token
    is_cut: bool = False  # whether the request was truncated to the context
    session: str = ""  # session routing sends all requests of a session to one replica
    tenant: str = ""
    priority: Priority = Priority.INTERACTIVE

    @property
    def tokens_taken(self) -> int:
        """Number of output tokens that are generated before the client disconnects."""
        return self.output_tokens if self.kept_tokens is None else self.kept_tokens

    def answer(self, first: int, count: int) -> "array[int]":
        """Return `count` output tokens starting at index `first`; they are artificial but deterministic."""
        begin = self.number * _MULTIPLIER % _ANSWERS + first
        return array("I", range(begin, begin + count))


@dataclass(frozen=True, kw_only=True, slots=True)
class Arrivals:
    """Requests with exponentially distributed gaps, standalone or as turns of conversations.

    The next prompt of a conversation is the previous prompt, its answer, and a random number of new tokens.
    It is sent some time after the previous prompt, whether or not the previous prompt has been answered.
    """

    rate: float  # requests per second
    input_lengths: Lengths
    output_lengths: Lengths
    max_context: int  # tokens; longer requests are truncated
    shared_prefix: float = 0.0  # share of a prompt taken up by one of `num_prefixes` common prefixes
    num_prefixes: int = 1
    turns: int = 1  # per conversation
    think_s: float = 30.0  # mean time between turns
    batch_share: float = 0.0  # share of requests with batch priority
    num_tenants: int = 1

    def __post_init__(self) -> None:
        check_positive("the rate", self.rate)
        check_positive("the time between turns", self.think_s)

    def calls(self, number: int, seed: int) -> Iterator[Call]:
        """Yield `number` requests in order of arrival; equal seeds yield equal requests."""
        rng = random.Random(seed)
        starts = self._conversations(rng)
        due: list[tuple[float, int, _Conversation]] = []  # heap of next turns
        upcoming = next(starts)
        for index in range(number):
            while not due or upcoming.begin_s <= due[0][0]:
                heappush(due, (upcoming.begin_s, upcoming.number, upcoming))
                upcoming = next(starts)
            now, _, talk = heappop(due)
            call = self._turn(rng, index, now, talk)
            if talk.turns_left:
                heappush(due, (now + rng.expovariate(1 / self.think_s), talk.number, talk))
            yield call

    def _conversations(self, rng: random.Random) -> "Iterator[_Conversation]":
        now = 0.0
        number = self.num_prefixes if self.shared_prefix else 0
        prefixes = [drawn_tokens(rng, self.max_context) for _ in range(number)]
        for number in count():
            now += rng.expovariate(self.rate / self.turns)
            yield _Conversation(
                number=number,
                begin_s=now,
                prefix=rng.choice(prefixes) if prefixes else None,
                tenant=f"tenant-{rng.randrange(self.num_tenants)}" if self.num_tenants > 1 else "",
                priority=Priority.BATCH if rng.random() < self.batch_share else Priority.INTERACTIVE,
                turns_left=self.turns,
            )

    def _turn(self, rng: random.Random, index: int, now: float, talk: "_Conversation") -> Call:
        drawn = self.input_lengths.draw(rng)
        whole = len(talk.so_far) + drawn
        length = min(whole, self.max_context - 1)
        prompt = talk.so_far[:length]
        if not prompt and talk.prefix is not None:
            prompt = talk.prefix[: round(self.shared_prefix * length)]
        prompt = prompt + drawn_tokens(rng, length - len(prompt))
        asked = self.output_lengths.draw(rng)
        output = min(asked, self.max_context - length)
        call = Call(
            number=index,
            arrival_s=now,
            prompt=prompt,
            output_tokens=output,
            is_cut=whole + asked > self.max_context,
            session=str(talk.number),
            tenant=talk.tenant,
            priority=talk.priority,
        )
        talk.turns_left -= 1
        if talk.turns_left:
            talk.so_far = prompt + call.answer(0, output)
            if len(talk.so_far) >= self.max_context - 1:
                talk.turns_left = 0
        return call


def traced(path: Path, *, max_context: int, rate: float | None, seed: int) -> Iterator[Call]:
    """Yield the requests of a trace, truncated to the context as a client would truncate them.

    `rate`: requests per second with exponentially distributed gaps, replacing the trace's arrival times.
    Prompts with equal `hash_ids` have equal prefixes; all other tokens are random.

    Raises:
        ConfigError: a line is invalid, or has no arrival time and no rate is given.
    """
    if rate is not None:
        check_positive("the rate", rate)
    rng, now = random.Random(seed), 0.0
    number = -1
    for number, line in enumerate(read_lines(path)):
        if rate is not None:
            now += rng.expovariate(rate)
        elif line.arrival_s is None:
            raise ConfigError(f"{path}: request {number + 1} says no time of arrival; give --rate")
        elif line.arrival_s < now:
            raise ConfigError(f"{path}: request {number + 1} arrives before the one ahead of it; sort them")
        else:
            now = line.arrival_s
        length = min(line.prompt_tokens, max_context - 1)
        prompt = array("I")
        for one in line.hash_ids[: -(-length // HASHED_TOKENS)]:  # the same tokens for the same id
            prompt += drawn_tokens(random.Random(one), HASHED_TOKENS)
        prompt = prompt[:length]
        yield Call(
            number=number,
            arrival_s=now,
            prompt=prompt + drawn_tokens(rng, length - len(prompt)),
            output_tokens=max(1, min(line.output_tokens, max_context - length)),
            is_cut=line.prompt_tokens + line.output_tokens > max_context,
            session=line.session or str(number),
            tenant=line.tenant,
            priority=line.priority,
        )
    if number < 0:
        raise ConfigError(f"{path} has no requests")


@dataclass(kw_only=True, slots=True)
class _Conversation:
    number: int
    begin_s: float
    prefix: "array[int] | None"
    tenant: str
    priority: Priority
    turns_left: int
    so_far: "array[int]" = field(default_factory=lambda: array("I"))


def drawn_tokens(rng: random.Random, number: int) -> "array[int]":
    tokens = array("I")
    tokens.frombytes(rng.randbytes(tokens.itemsize * number))
    return tokens
