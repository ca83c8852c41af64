"""A ledger: entries with amounts, which are added, subtracted, multiplied and posted."""

from random import Random
from typing import Any

from kvq.traces.tasks import words
from kvq.traces.tasks.table import Domain, Row
from kvq.traces.tasks.talk import Request, choice, kind, tool

_ACCOUNTS = ("travel", "rent", "repairs", "office", "insurance")
_A, _B = kind("number", "The number that is named first."), kind("number", "The number that is named second.")
_TOOLS = [
    tool("show_ledger", "Show all entries of a year.", year=kind("integer", "Such as 2025.")),
    tool("add", "Compute a + b.", a=_A, b=_B),
    tool("subtract", "Compute a - b.", a=_A, b=_B),
    tool("multiply", "Compute a * b.", a=_A, b=_B),
    tool(
        "post_entry",
        "Post an amount.",
        "memo",
        account=choice(*_ACCOUNTS),
        amount=kind("number", "In euros."),
    ),
]


def _row(random: Random) -> Row:
    return {
        "name": f"{random.choice(words.PLACES)} {random.choice(words.ITEMS)}",
        "amount": f"{random.randint(1_000, 999_999) / 100:.2f}",
        "account": random.choice(_ACCOUNTS),
        "date": words.date(random),
        "note": words.note(random),
    }


def _requests(random: Random, one: Row, other: Row, last: Any) -> list[Request]:
    a, b, times = float(one["amount"]), float(other["amount"]), random.randint(3, 24)
    account, memo, named = random.choice(_ACCOUNTS), random.choice(words.ITEMS), f'"{one["name"]}"'
    if last is not None:
        asked = f'Post the last result to the account {account}, with the memo "{memo}".'
        posted = {"memo": memo, "account": account, "amount": last}
        return [Request(asked, "post_entry", posted, f"posted {last:.2f} to {account}")]
    asked = f'the amount of {named} {{}} the amount of "{other["name"]}".'
    return [
        _computed(f"Compute {asked.format('plus')}", "add", a, b, a + b),
        _computed(f"Compute {asked.format('minus')}", "subtract", a, b, a - b),
        _computed(f"Compute the amount of {named} times {times}.", "multiply", a, times, a * times),
    ]


def _computed(words: str, name: str, a: float, b: float, result: float) -> Request:
    return Request(words, name, {"a": a, "b": b}, f"{result:.2f}", last=float(f"{result:.2f}"))


_OPENING = Request("Show all entries of 2026.", "show_ledger", {"year": 2026})
ARITHMETIC = Domain(tools=_TOOLS, opening=_OPENING, row=_row, requests=_requests)
