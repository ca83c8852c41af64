"""Tables about agents' sessions: what formats decide otherwise and what fails, by depth and kind."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from kvq.evals.report.page import columns_of, span, table

Row = dict[str, Any]
_FREE = ("asked", "invalid", "as_recorded", "changed", "failed", "foreseen")  # of generated turns


class _SessionTable(NamedTuple):
    """Table with a title."""

    title: str
    heads: Sequence[str]
    cells: Sequence[Sequence[str]]
    note: str
    is_drawn: bool = False  # whether a plot of all rows belongs above it


def session_tables(name: str, rows: list[Row], facts: Mapping[str, Any]) -> Iterator[_SessionTable]:
    """Yield the tables of one task. `facts`: what `kvq eval` stores beside its rows."""
    checked = (
        "fails if its calls are not the right ones"
        if facts["checked"]
        else "fails if it is invalid or changed"
    )
    left_out = len(facts["left_out"]) + len(facts["refused"])
    note = f"{facts['sessions']:,} sessions" + (f", {left_out:,} more were left out" if left_out else "")
    base = rows[0]["kv"]
    note += (
        f". A turn is invalid if its answer is no call that fits an offered tool, changed if its calls "
        f"are not those of {base}; it {checked}. Foreseen: failures that scores along {base}'s own answers "
        f"foretell. {facts['advice'].capitalize()}."
    )
    if not facts["checked"]:
        note += " Changed calls need not be worse ones: compare how many are as recorded."
    columns = columns_of("sessions")
    if not rows[0]["asked"]:
        columns = {key: column for key, column in columns.items() if key not in _FREE}
    whole = table(rows, columns)
    yield _SessionTable(f"{name}: what agents' turns come to", *whole, note, is_drawn=True)
    yield _by_kind(name, rows)
    yield _by(name, rows, "depth", "tokens of context before the answer")
    yield _by(name, rows, "turn", "turns of a session")
    if facts["left_out"] or facts["refused"]:
        reasons = [*facts["refused"].items(), *facts["left_out"].items()]
        yield _SessionTable(f"{name}: what was left out", ("session", "reason"), reasons, "")
    if facts["examples"]:
        yield _examples(name, facts["examples"])


def _by_kind(name: str, rows: list[Row]) -> _SessionTable:
    kinds = [one["kind"] for one in rows[0]["by_kind"]]
    heads = ["kv", *(f"{one['kind']} ({one['tokens']:,} tokens)" for one in rows[0]["by_kind"])]
    cells = []
    for row in rows:
        found = {one["kind"]: f"{one['kl_mean']:.5f}, {one['top1_agreement']:.2%}" for one in row["by_kind"]}
        cells.append([row["kv"], *(found.get(kind, "-") for kind in kinds)])
    note = "Mean KL and top-1 agreement along the recorded answers, by what their tokens decide."
    return _SessionTable(f"{name}: by kind of token", heads, cells, note)


def _by(name: str, rows: list[Row], key: str, words: str) -> _SessionTable:
    parts = rows[0][f"by_{key}"]
    heads = ["kv", *(f"{part[f'first_{key}']:,}-{part[f'last_{key}']:,}" for part in parts)]
    cells = [[row["kv"], *map(_part, row[f"by_{key}"])] for row in rows]
    counts = ", ".join(f"{part['turns']:,}" for part in parts)
    note = (
        f"By {words}: decisions alike; turns that fail, and how many points more than the baseline's (95%). "
        f"Turns: {counts}."
    )
    return _SessionTable(f"{name}: by {key}", heads, cells, note)


def _part(part: Row) -> str:
    more = part["more_failed"]
    told = f" ({span('+.1f')((100 * more[0], 100 * more[1]))})" if more else ""
    failed = f"; {part['failed']:.1%}{told}" if part["asked"] else ""
    return f"{part['top1_decisive']:.2%}{failed}"


def _examples(name: str, found: Sequence[Row]) -> _SessionTable:
    texts = [key for key in found[0] if key not in ("kv", "session", "message", "depth", "is_valid", "lost")]
    heads = ["kv", "session", "message", "depth", "lost at", *("answer" if x == "text" else x for x in texts)]
    cells = [
        [
            *(one["kv"], one["session"], str(one["message"]), f"{one['depth']:,}", one["lost"] or "-"),
            *(one[key] for key in texts),
        ]
        for one in found
    ]
    note = "Turns that fail in a format, but not in the baseline, the shallowest first."
    if not texts:
        note += " Their texts are shown with --show-texts."
    return _SessionTable(f"{name}: examples", heads, cells, note)
