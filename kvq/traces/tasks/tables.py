"""Sessions about a table: it is listed at the start, and each request is about rows that it names."""

from collections.abc import Callable
from random import Random
from typing import Any

from kvq.traces.tasks.worlds import NOTES, WORDS, WORLDS, code, pick, request

_Row = dict[str, str]  # columns, in their order: the name first, then what is asked for most
_Values = dict[str, Any]  # that requests of worlds.json name, beside the columns of the row
_LEAST_ROWS = 12


def table_messages(world: str, random: Random, chars: int) -> list[dict[str, Any]]:
    """Return 3 to 6 requests with calls and results. Each names other rows: no answer depends on changes."""
    make_row, make_values = TABLES[world]
    rows = _rows(make_row, random, chars)
    listing = "\n".join(map(_line, rows))
    form, values = WORLDS[world]["opening"], {"year": 2026, "root": "/home", "listing": listing}
    messages = _filled(form, values, 1)
    unused = random.sample(rows, len(rows))
    for _ in range(random.randint(2, 5)):
        last, row = values.get(form.get("last")), unused.pop()
        values = {**row, **make_values(random, row, unused.pop()), "last": last}
        form = random.choice(WORLDS[world]["requests" if last is None else "follow_ups"])
        messages += _filled(form, values, len(messages) + 1)
    return messages


def _filled(form: dict[str, Any], values: _Values, at: int) -> list[dict[str, Any]]:
    arguments = {name: values[value] for name, value in form["arguments"].items()}
    words, result = form["words"].format_map(values), form["result"].format_map(values)
    return request(at, words, form["tool"], arguments, result)


def _rows(make_row: Callable[[Random], _Row], random: Random, chars: int) -> list[_Row]:
    """Return rows whose lines take so many characters, and whose first two columns differ."""
    rows: list[_Row] = []
    taken: set[str] = set()
    while chars > 0 or len(rows) < _LEAST_ROWS:
        row = make_row(random)
        names = set(list(row.values())[:2])
        if not names & taken:
            taken |= names
            rows.append(row)
            chars -= len(_line(row)) + 1
    return rows


def _line(row: _Row) -> str:
    name, *others = row.items()
    return f"{name[1]}: " + ", ".join(f"{column} {value}" for column, value in others)


def _note(random: Random) -> str:
    return ", ".join(random.sample(NOTES, 2))


def _date(random: Random, year: int = 2026) -> str:
    return f"{year}-{random.randint(1, 12):02d}-{random.randint(1, 28):02d}"


def _time(random: Random) -> str:
    return f"{random.randint(7, 18):02d}:{random.choice((0, 15, 30, 45)):02d}"


def _email(person: str) -> str:
    return f"{person.lower().replace(' ', '.')}@mail.example"


def _event(random: Random) -> _Row:
    return {
        "title": f"{pick(random, 'places')} {pick(random, 'topics')} {random.randint(1, 9)}",
        "event_id": f"evt-{code(random, 8)}",
        "date": _date(random),
        "start": _time(random),
        "owner": _email(pick(random, "people")),
        "note": _note(random),
    }


def _of_calendar(random: Random, event: _Row, other: _Row) -> _Values:
    values: _Values = {
        "new_id": f"evt-{code(random, 8)}",
        "new_title": f"{pick(random, 'places')} visit",
        "new_date": _date(random, 2027),
        "new_start": _time(random),
        "minutes": random.choice((20, 45, 60, 90)),
        "address": (address := _email(pick(random, "people"))),
        "channel": "phone",
    }
    owner = (other["owner"], f'the owner of the event "{other["title"]}"')
    values["email"], values["guest"] = random.choice((owner, (address, address)))
    return values


def _folder(random: Random) -> str:
    first, second = random.sample(WORDS["folders"], 2)
    return f"/home/{first}/{random.randint(2019, 2026)}/{second}"


def _file(random: Random) -> _Row:
    name = f"{pick(random, 'items').replace(' ', '_')}_{random.randint(100, 999)}.txt"
    return {
        "name": name,
        "path": f"{_folder(random)}/{name}",
        "checksum": f"{random.getrandbits(48):012x}",
        "owner": pick(random, "people"),
        "note": _note(random),
    }


def _of_files(random: Random, file: _Row, other: _Row) -> _Values:
    folder, mode = _folder(random), pick(random, "modes")
    text = f"To {other['owner']}: {_note(random)}."
    return {"folder": folder, "mode": mode, "moved": f"{folder}/{file['name']}", "text": text}


def _entry(random: Random) -> _Row:
    return {
        "name": f"{pick(random, 'places')} {pick(random, 'items')}",
        "amount": f"{random.randint(1_000, 999_999) / 100:.2f}",
        "account": pick(random, "accounts"),
        "date": _date(random),
        "note": _note(random),
    }


def _of_arithmetic(random: Random, one: _Row, other: _Row) -> _Values:
    a, b, times = float(one["amount"]), float(other["amount"]), random.randint(3, 24)
    results = {"sum": round(a + b, 2), "difference": round(a - b, 2), "product": round(a * times, 2)}
    named = {"other": other["name"], "account": pick(random, "accounts"), "memo": pick(random, "items")}
    return {"a": a, "b": b, "times": times} | results | named


def _order(random: Random) -> _Row:
    customer = pick(random, "people")
    return {
        "order": f"{customer}, {pick(random, 'items')}",
        "order_id": f"ORD-{code(random, 8)}",
        "amount": f"{random.randint(999, 99_999) / 100:.2f}",
        "address": f"{random.randint(100, 999)}.{_email(customer)}",
        "note": _note(random),
    }


def _of_lookup(random: Random, order: _Row, other: _Row) -> _Values:
    return {
        "named": random.choice((f'the order "{order["order"]}"', f"the order {order['order_id']}")),
        "reason": random.choice(("damaged", "late")),
        "state": pick(random, "states"),
        "subject": f"{pick(random, 'items')} {random.randint(1000, 9999)}",
        "amount": float(order["amount"]),
    }


# Makers of a row, and of the values for a request about a row and another
TABLES: dict[str, tuple[Callable[[Random], _Row], Callable[[Random, _Row, _Row], _Values]]] = {
    "calendar": (_event, _of_calendar),
    "files": (_file, _of_files),
    "arithmetic": (_entry, _of_arithmetic),
    "lookup": (_order, _of_lookup),
}
