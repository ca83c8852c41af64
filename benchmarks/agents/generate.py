"""Draw an agent trace from a seed.

    python -m benchmarks.agents.generate --preset bench --out trace.jsonl [--seed 1] [--minutes 2]

bench: 60 sessions of 6 to 10 turns that grow from 1,000 to at most 6,000 tokens, for the bench model and a
run of some 20 minutes. real: 8 such sessions, for a real model of 0.5 B parameters. many: 240 sessions, for a
simulation. All begin with one of two system prompts with tools. Between two turns tools work: a log-normal
pause, after which their result is appended. Some sessions are forks, which go on from a turn in the middle of
another one, which goes on, too; some are sub-agents, with the other system prompt, for whose end another
session waits. `--minutes` makes sessions fewer and pauses shorter in proportion, so that requests compete as
they do in the whole; `--tokens` scales contexts, and with `--minutes` leaves more sessions: all 60 are left
by `--minutes 5 --tokens 0.25`.
"""

import argparse
import random
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from math import log
from pathlib import Path

from benchmarks.agents.trace import Piece, Trace, Turn, TurnId, write_trace
from kvq.errors import ConfigError

_LEAST_ADDED = 8  # tokens of a tool's result
_LEAST_PAUSE_S = 0.001  # so that turns sorted by their times come after those that they refer to


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """What is drawn. Pairs are the least and the most."""

    sessions: int = 60  # with forks and sub-agents
    turns: tuple[int, int] = (6, 10)  # of a fork, with those before it
    first_tokens: int = 1000  # of a session's first prompt
    shared_tokens: int = 600  # of these, the system prompt
    last_tokens: tuple[int, int] = (4500, 6000)  # of its last prompt with the answer
    answer_tokens: tuple[int, int] = (32, 96)
    pause_s: float = 8.0  # median
    pause_sigma: float = 0.9  # of its logarithm
    begin_s: float = 60.0  # within which sessions begin
    forks: float = 0.1  # of all sessions
    sub_agents: float = 0.2  # of all sessions
    minutes: float = 20.0  # of a run

    def __post_init__(self) -> None:
        if not 0 < self.shared_tokens < self.first_tokens < self.last_tokens[0] <= self.last_tokens[1]:
            raise ConfigError("tokens must rise: shared, first, last")
        room = self.last_tokens[0] - self.first_tokens - self.turns[1] * self.answer_tokens[1]
        if self.turns[0] < 4 or room < self.turns[1] * _LEAST_ADDED:
            raise ConfigError(f"{self.turns} turns must be 4 or more, and fit into the growth")
        if self.sessions < 2 or self.forks + self.sub_agents > 0.5:
            raise ConfigError("there must be 2 sessions or more, and half of them their own")

    def scaled(self, minutes: float, tokens: float) -> "Shape":
        """Return the shape of a run that takes so many minutes, with contexts scaled by `tokens`."""
        share = minutes / self.minutes  # of all that is computed
        return replace(
            self,
            sessions=max(2, round(self.sessions * share / tokens)),
            pause_s=self.pause_s * share,
            begin_s=self.begin_s * share,
            minutes=minutes,
            first_tokens=round(self.first_tokens * tokens),
            shared_tokens=round(self.shared_tokens * tokens),
            last_tokens=_times(self.last_tokens, tokens),
            answer_tokens=_times(self.answer_tokens, tokens),
        )


def _times(pair: tuple[int, int], factor: float) -> tuple[int, int]:
    return max(1, round(pair[0] * factor)), max(1, round(pair[1] * factor))


PRESETS = {"bench": Shape(), "real": Shape(sessions=8), "many": Shape(sessions=240)}


def draw(shape: Shape, seed: int) -> Trace:
    """Return the trace of a seed; equal seeds give equal traces."""
    turns = _Drawing(shape, seed).turns()
    return Trace(turns, {"seed": seed, "shape": asdict(shape)})


@dataclass(kw_only=True, slots=True)
class _Session:
    name: str
    kind: str  # "own", "fork", "sub-agent"
    turns: list[Turn]


class _Drawing:
    def __init__(self, shape: Shape, seed: int) -> None:
        self._shape = shape
        self._rng = random.Random(seed)
        self._seeds = iter(range(seed * 1_000_000, (seed + 1) * 1_000_000))
        self._system = {kind: next(self._seeds) for kind in ("own", "sub-agent")}

    def turns(self) -> list[Turn]:
        """Return all turns, in the order in which they would be sent if answers took no time."""
        forks, agents = (round(self._shape.sessions * x) for x in (self._shape.forks, self._shape.sub_agents))
        own = self._shape.sessions - forks - agents
        sessions = [self._fresh(f"s{i}", "own") for i in range(own)]
        parents = sessions.copy()
        for i in range(forks):
            sessions.append(self._fork(f"f{i}", self._rng.choice(parents)))
        for i in range(agents):
            sessions.append(self._sub_agent(f"a{i}", self._rng.choice(parents)))
        return sorted((turn for one in sessions for turn in one.turns), key=_order(sessions))

    def _fresh(self, name: str, kind: str) -> _Session:
        """A session that begins with a system prompt and a task."""
        shape = self._shape
        system = Piece(self._system[kind], shape.shared_tokens)
        task = Piece(next(self._seeds), shape.first_tokens - shape.shared_tokens)
        begin_s = round(self._rng.uniform(0, shape.begin_s), 3) + _LEAST_PAUSE_S
        first = Turn(
            session=name, turn=0, base=None, after=(), pause_s=begin_s,
            added=(system, task), answer=self._answer(),
        )  # fmt: skip
        turns = [first, *self._rest(name, first, shape.first_tokens, self._num_turns() - 1, 1)]
        return _Session(name=name, kind=kind, turns=turns)

    def _fork(self, name: str, parent: _Session) -> _Session:
        """A session that goes on from the middle of another one."""
        at = self._rng.randrange(1, len(parent.turns) - 2)
        base = parent.turns[at]
        left = max(2, self._num_turns() - at - 1)
        tokens = sum(x.tokens for turn in parent.turns[: at + 1] for x in (*turn.added, turn.answer))
        turns = list(self._rest(name, base, tokens - base.answer.tokens, left, 0))
        return _Session(name=name, kind="fork", turns=turns)

    def _sub_agent(self, name: str, parent: _Session) -> _Session:
        """A session that begins when a turn of another one ends, whose next turn waits for it."""
        session = self._fresh(name, "sub-agent")
        at = self._rng.randrange(1, len(parent.turns) - 1)
        session.turns[0] = replace(
            session.turns[0],
            after=(parent.turns[at].id,),
            pause_s=round(self._pause_s() / 10 + _LEAST_PAUSE_S, 3),
        )
        waits = parent.turns[at + 1]
        parent.turns[at + 1] = replace(waits, after=(*waits.after, session.turns[-1].id))
        return session

    def _rest(self, name: str, base: Turn, prompt: int, count: int, number: int) -> Iterator[Turn]:
        """The `count` turns after `base`, whose prompt has `prompt` tokens; the first is turn `number`."""
        answers = [self._answer() for _ in range(count)]
        last = self._rng.randint(*self._shape.last_tokens)
        room = last - prompt - base.answer.tokens - sum(answer.tokens for answer in answers)
        weights = [self._rng.lognormvariate(0, 0.6) for _ in range(count)]
        for i, answer in enumerate(answers):
            added = max(_LEAST_ADDED, int(room * weights[i] / sum(weights)))
            base = Turn(
                session=name, turn=number + i, base=base.id, after=(base.id,), pause_s=self._pause_s(),
                added=(Piece(next(self._seeds), added),), answer=answer,
            )  # fmt: skip
            yield base

    def _num_turns(self) -> int:
        return self._rng.randint(*self._shape.turns)

    def _answer(self) -> Piece:
        return Piece(next(self._seeds), self._rng.randint(*self._shape.answer_tokens))

    def _pause_s(self) -> float:
        drawn = self._rng.lognormvariate(log(self._shape.pause_s), self._shape.pause_sigma)
        return max(_LEAST_PAUSE_S, round(drawn, 3))


def _order(sessions: list[_Session]) -> Callable[[Turn], tuple[float, str, int]]:
    """Return a key: when a turn would be sent if answers took no time."""
    known = {turn.id: turn for one in sessions for turn in one.turns}
    sent: dict[TurnId, float] = {}

    def sent_s(turn: Turn) -> float:
        if turn.id not in sent:
            sent[turn.id] = turn.pause_s + max((sent_s(known[x]) for x in turn.after), default=0.0)
        return sent[turn.id]

    return lambda turn: (sent_s(turn), turn.session, turn.turn)


def main() -> None:
    """Draw a trace, write it, and print what it asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", choices=PRESETS, default="bench")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, help="of a run; by default the preset's, scaled, too")
    parser.add_argument("--tokens", type=float, default=1.0, help="factor of all contexts")
    parser.add_argument("--pause", type=float, help="median pause in seconds of the whole preset")
    parser.add_argument("--sigma", type=float, help="of the logarithm of pauses")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    shape = PRESETS[given.preset]
    shape = replace(
        shape,
        pause_s=shape.pause_s if given.pause is None else given.pause,
        pause_sigma=shape.pause_sigma if given.sigma is None else given.sigma,
    )
    trace = draw(shape.scaled(given.minutes or shape.minutes * given.tokens, given.tokens), given.seed)
    write_trace(trace, given.out)
    asked = sum(trace.prompt_tokens(turn) for turn in trace.turns)
    print(
        f"{given.out}: {len(trace.last_turns())} sessions, {len(trace.turns)} turns, {asked:,} tokens of "
        f"prompts, {sum(turn.answer.tokens for turn in trace.turns):,} of answers; "
        f"{16 * trace.demand_blocks(16):,} tokens hold all sessions"
    )


if __name__ == "__main__":
    main()
