"""Sessions about a table: it is listed at the start, and each request is about rows that it names."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from kvq.traces.tasks.talk import Request, Talk, world_chars

Row = dict[str, str]  # columns, in their order: the name first, then what is asked for most
_LEAST_ROWS = 12


@dataclass(frozen=True, kw_only=True, slots=True)
class Domain:
    """A kind of table, and what can be requested about its rows."""

    tools: Sequence[dict[str, Any]]
    opening: Request  # that lists the table
    row: Callable[[Random], Row]
    # Of randomness, two rows and what was last: the requests that can be made
    requests: Callable[[Random, Row, Row, Any], list[Request]]


def talk_about(domain: Domain, random: Random, tokens: int) -> Talk:
    """Return a session of 3 to 6 requests. Each names other rows, so that no answer depends on changes."""
    talk, rows = Talk(domain.tools), _rows(domain, random, world_chars(domain.tools, tokens))
    talk.add(domain.opening, "\n".join(map(_line, rows)))
    unused, last = random.sample(rows, len(rows)), None
    for _ in range(random.randint(2, 5)):
        request = random.choice(domain.requests(random, unused.pop(), unused.pop(), last))
        talk.add(request)
        last = request.last
    return talk


def _line(row: Row) -> str:
    name, *others = row.items()
    return f"{name[1]}: " + ", ".join(f"{column} {value}" for column, value in others)


def _rows(domain: Domain, random: Random, chars: int) -> list[Row]:
    """Return rows whose lines take so many characters, and whose first two columns differ."""
    rows: list[Row] = []
    taken: set[str] = set()
    while chars > 0 or len(rows) < _LEAST_ROWS:
        row = domain.row(random)
        names = set(list(row.values())[:2])
        if not names & taken:
            taken |= names
            rows.append(row)
            chars -= len(_line(row)) + 1
    return rows
