"""An agent trace: turns of sessions that pause for tools, fork, and start sub-agents, as JSON lines.

The first line is about the whole: `format_version` 1, the seed and the shape that it was drawn from. Every
other line is a turn, after all turns that it refers to:

    {"session": "s3", "turn": 2, "base": ["s3", 1], "after": [["s3", 1]], "pause_s": 4.1,
     "added": [[81, 412]], "answer": [82, 64]}

`base`: the turn whose prompt and answer this prompt begins with: the one before, or that of another session
for a fork; null if the session begins anew. `after`: the turns that must have ended, among them those of
sub-agents that the session waits for. `pause_s`: from the last of their ends, or from the beginning of the
run, until the turn is sent. `added`: what follows in the prompt, in pieces of [seed, tokens], such as the
system prompt, a task, or the result of a tool; equal seeds mean equal tokens. `answer`: [seed, tokens] of
what the model says, as later turns repeat it.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

from kvq.capacity.fleet.agents import FORMAT_VERSION, read_agents
from kvq.errors import ConfigError

TurnId = tuple[str, int]  # session, turn


class Piece(NamedTuple):
    """So many of the first tokens of a seed's stream."""

    seed: int
    tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """One request of a session."""

    session: str
    turn: int
    base: TurnId | None
    after: tuple[TurnId, ...]
    pause_s: float
    added: tuple[Piece, ...]
    answer: Piece

    @property
    def id(self) -> TurnId:
        """Session and turn."""
        return self.session, self.turn

    def line(self) -> str:
        """Return the turn as a line of a trace."""
        names = ("session", "turn", "base", "after", "pause_s", "added", "answer")
        return json.dumps({name: getattr(self, name) for name in names})


class Trace:
    """All turns of a trace."""

    def __init__(self, turns: Sequence[Turn], about: Mapping[str, Any]) -> None:
        """`about`: what the first line says.

        Raises:
            ConfigError: a turn refers to one that does not come before it.
        """
        self.turns, self.about = list(turns), dict(about)
        self._pieces: dict[TurnId, tuple[Piece, ...]] = {}  # of each turn's prompt
        answers: dict[TurnId, Piece] = {}
        for turn in self.turns:
            for other in (*turn.after, *([turn.base] if turn.base else [])):
                if other not in answers:
                    raise ConfigError(f"turn {turn.id} refers to {other}, which does not come before it")
            if turn.id in answers:
                raise ConfigError(f"turn {turn.id} comes twice")
            begin = (*self._pieces[turn.base], answers[turn.base]) if turn.base else ()
            self._pieces[turn.id] = (*begin, *turn.added)
            answers[turn.id] = turn.answer

    def pieces(self, turn: Turn) -> tuple[Piece, ...]:
        """Return what a turn's prompt consists of."""
        return self._pieces[turn.id]

    def prompt_tokens(self, turn: Turn) -> int:
        """Return the length of a turn's prompt."""
        return sum(piece.tokens for piece in self.pieces(turn))

    def last_turns(self) -> list[Turn]:
        """Return the last turn of each session."""
        return list({turn.session: turn for turn in self.turns}.values())

    def longest(self) -> int:
        """Return the tokens of the longest prompt with its answer."""
        return max(self.prompt_tokens(turn) + turn.answer.tokens for turn in self.turns)

    def demand_blocks(self, block_size: int) -> int:
        """Return the blocks that hold all sessions at their ends, common beginnings once."""
        found: set[bytes] = set()
        for turn in self.last_turns():
            found.update(block_keys((*self.pieces(turn), turn.answer), block_size))
        return len(found)


def block_keys(pieces: Sequence[Piece], block_size: int) -> Iterator[bytes]:
    """Yield a key for each block, the last one possibly partial, that names its tokens and all before."""
    digest, parts, room = b"", list[tuple[int, int, int]](), block_size
    for seed, tokens in pieces:
        at = 0
        while at < tokens:
            took = min(room, tokens - at)
            parts.append((seed, at, at + took))
            at, room = at + took, room - took
            if not room:
                digest = sha256(digest + repr(parts).encode()).digest()
                yield digest
                parts, room = [], block_size
    if parts:
        yield sha256(digest + repr(parts).encode()).digest()


def write_trace(trace: Trace, path: Path) -> None:
    """Write a trace."""
    lines = [json.dumps({"format_version": FORMAT_VERSION, **trace.about}), *(x.line() for x in trace.turns)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def read_trace(path: Path) -> Trace:
    """Read a trace.

    Raises:
        ConfigError: a line is invalid; the message includes its number.
    """
    turns = [_turn(turn) for turn in read_agents(path).values()]
    with path.open(encoding="utf-8") as file:
        about = json.loads(file.readline())
    del about["format_version"]
    return Trace(turns, about)


def _turn(data: dict[str, Any]) -> Turn:
    *added, answer = [Piece(*piece) for piece in (*data["added"], data["answer"])]
    plain = {name: data[name] for name in ("session", "turn", "base", "pause_s")}
    return Turn(**plain, after=tuple(data["after"]), added=tuple(added), answer=answer)
