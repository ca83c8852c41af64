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
    tool("add", "Add two numbers.", a=_A, b=_B),
    tool(
        "subtract",
        "Subtract b from a.",
        a=kind("number", "The larger number."),
        b=kind("number", "Taken away."),
    ),
    tool("multiply", "Multiply two numbers.", a=_A, b=_B),
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
        "id": f"L-{random.randint(1000, 9999)}",
        "date": words.date(random),
        "account": random.choice(_ACCOUNTS),
        "amount": f"{random.randint(1_000, 999_999) / 100:.2f}",
        "note": words.note(random),
    }


def _computed(words: str, name: str, a: float, b: float, result: float) -> Request:
    shown = f"{result:.2f}"
    return Request(words, name, {"a": a, "b": b}, shown, f"The result is {shown}.", last=float(shown))


def _requests(random: Random, one: Row, other: Row, last: Any) -> list[Request]:
    lower, higher = sorted((one, other), key=lambda row: float(row["amount"]))
    a, b, times = float(higher["amount"]), float(lower["amount"]), random.randint(3, 24)
    account, memo, both = (
        random.choice(_ACCOUNTS),
        random.choice(words.ITEMS),
        f"{higher['id']} and {lower['id']}",
    )
    less = f"Subtract the amount of the entry {lower['id']} from the amount of the entry {higher['id']}."
    found = [
        _computed(f"Add the amounts of the entries {both}, in this order.", "add", a, b, a + b),
        _computed(less, "subtract", a, b, a - b),
        _computed(
            f"Multiply the amount of the entry {higher['id']} by {times}.", "multiply", a, times, a * times
        ),
    ]
    if last:
        asked = f'Post the last result to the account {account}, with the memo "{memo}".'
        posted = {"memo": memo, "account": account, "amount": last}
        found += [Request(asked, "post_entry", posted, f"posted {last:.2f} to {account}")] * 3
    return found


ARITHMETIC = Domain(
    tools=_TOOLS,
    opening=Request("Show all entries of 2026.", "show_ledger", {"year": 2026}, ""),
    row=_row,
    keys=(("id",),),
    requests=_requests,
)
