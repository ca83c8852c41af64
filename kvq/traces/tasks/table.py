"""Sessions about a table: it is listed at the start, and each request is about rows that are named by values."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from kvq.traces.tasks.talk import Request, Talk, world_chars

Row = dict[str, str]  # columns, in their order
_LEAST_ROWS = 12


@dataclass(frozen=True, kw_only=True, slots=True)
class Domain:
    """A kind of table, and what can be requested about its rows."""

    tools: Sequence[dict[str, Any]]
    opening: Request  # that lists the table
    row: Callable[[Random], Row]
    keys: tuple[tuple[str, ...], ...]  # columns whose values together name one row
    # Of randomness, two rows and what was last: the requests that can be made
    requests: Callable[[Random, Row, Row, Any], list[Request]]


def talk_about(domain: Domain, random: Random, tokens: int) -> Talk:
    """Return a session of 2 to 6 requests. No row is named by two requests, so that none depends on a change."""
    talk, rows = Talk(domain.tools), _rows(domain, random, world_chars(domain.tools, tokens))
    opening = domain.opening
    listed = "\n".join(" | ".join(row.values()) for row in rows)
    talk.add(Request(opening.words, opening.tool, opening.arguments, listed, "Here it is."))
    unused, last = random.sample(rows, len(rows)), None
    for _ in range(random.randint(1, 5)):
        request = random.choice(domain.requests(random, unused.pop(), unused.pop(), last))
        talk.add(request)
        last = request.last
    return talk


def _rows(domain: Domain, random: Random, chars: int) -> list[Row]:
    rows: list[Row] = []
    taken: set[tuple[str, ...]] = set()
    while chars > 0 or len(rows) < _LEAST_ROWS:
        row = domain.row(random)
        names = {tuple(row[column] for column in key) for key in domain.keys}
        if not names & taken:
            taken |= names
            rows.append(row)
            chars -= len(" | ".join(row.values())) + 1
    return rows
