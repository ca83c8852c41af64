"""A table of orders: customers with similar names, addresses, items and totals."""

from random import Random
from typing import Any

from kvq.traces.tasks import words
from kvq.traces.tasks.table import Domain, Row
from kvq.traces.tasks.talk import Request, choice, kind, tool

_STATES = ("paid", "packed", "shipped", "returned")
_ID = kind("string", "As listed. It begins with ORD-.")
_REASONS = choice("damaged", "late", "unwanted", default="unwanted")
_TOOLS = [
    tool("list_orders", "List all orders of a year.", year=kind("integer", "Such as 2025.")),
    tool("refund", "Pay an order back.", order_id=_ID, amount=kind("number", "In euros."), reason=_REASONS),
    tool("set_state", "Change the state of an order.", order_id=_ID, state=choice(*_STATES)),
    tool("write_email", "Send a message.", "subject", address=kind("string", "As listed, with an @.")),
    tool("track_order", "Say where an order is.", order_id=_ID),
]


def _row(random: Random) -> Row:
    customer = random.choice(words.PEOPLE)
    return {
        "order": f"{customer}, {random.choice(words.ITEMS)}",
        "order_id": f"ORD-{words.code(random, 8)}",
        "amount": f"{random.randint(999, 99_999) / 100:.2f}",
        "address": f"{random.randint(100, 999)}.{words.email(customer)}",
        "note": words.note(random),
    }


def _requests(random: Random, order: Row, other: Row, last: Any) -> list[Request]:
    id, address = order["order_id"], order["address"]
    named = random.choice((f'the order "{order["order"]}"', f"the order {id}"))
    reason, state = random.choice(("damaged", "late")), random.choice(_STATES)
    subject = f"{random.choice(words.ITEMS)} {random.randint(1000, 9999)}"
    if last is not None:
        asked = f"Set the state of the order that was just tracked or refunded to {state}."
        return [Request(asked, "set_state", {"order_id": last, "state": state}, f"{last} is {state}")]
    back: dict[str, Any] = {"order_id": id, "amount": float(order["amount"]), "reason": reason}
    mail, refund = {"subject": subject, "address": address}, f"Refund {named}, with its amount, as {reason}."
    write = f'Write an email with the subject "{subject}" to the address of {named}.'
    track = f"Track {named}, by its order_id."
    return [
        Request(refund, "refund", back, f"refunded {id}", last=id),
        Request(track, "track_order", {"order_id": id}, f"{id} is on its way", last=id),
        Request(write, "write_email", mail, f"sent to {address}"),
    ]


_OPENING = Request("List all orders of 2026.", "list_orders", {"year": 2026})
LOOKUP = Domain(tools=_TOOLS, opening=_OPENING, row=_row, requests=_requests)
