"""A table of orders: customers with similar names, addresses, items and totals."""

from random import Random
from typing import Any

from kvq.traces.tasks import words
from kvq.traces.tasks.table import Domain, Row
from kvq.traces.tasks.talk import Request, choice, kind, tool

_STATES = ("paid", "packed", "shipped", "returned")
_REASONS = choice("damaged", "late", "unwanted", default="unwanted")
_TOOLS = [
    tool("list_orders", "List all orders of a year.", year=kind("integer", "Such as 2025.")),
    tool("refund", "Pay an order back.", "order_id", amount=kind("number", "In euros."), reason=_REASONS),
    tool("set_state", "Change the state of an order.", "order_id", state=choice(*_STATES)),
    tool("write_email", "Send a message.", "address", "subject"),
    tool("track_order", "Say where an order is.", "order_id"),
]


def _row(random: Random) -> Row:
    customer = random.choice(words.PEOPLE)
    return {
        "id": f"ORD-{words.code(random, 8)}",
        "customer": customer,
        "address": f"{random.randint(100, 999)}.{words.email(customer)}",
        "item": random.choice(words.ITEMS),
        "total": f"{random.randint(999, 99_999) / 100:.2f}",
        "note": words.note(random),
    }


def _requests(random: Random, order: Row, other: Row, last: Any) -> list[Request]:
    id, subject = order["id"], f"{other['item']} {random.randint(1000, 9999)}"
    reason, state = random.choice(("damaged", "late")), random.choice(_STATES)
    named, total = f"{order['customer']}'s order of a {order['item']}", float(order["total"])
    back = {"order_id": id, "amount": total, "reason": reason}
    mail, sent = {"address": order["address"], "subject": subject}, f"sent to {order['address']}"
    asked = f'Write to the address of {named}, with the subject "{subject}".'
    found = [
        Request(
            f"Refund the total of {named}, which was {reason}.", "refund", back, f"refunded {id}", last=id
        ),
        Request(f"Track {named}.", "track_order", {"order_id": id}, f"{id} is on its way", last=id),
        Request(asked, "write_email", mail, sent),
    ]
    if last:
        asked, back = f"Set the state of this order to {state}.", {"order_id": last, "state": state}
        found += [Request(asked, "set_state", back, f"{last} is {state}")] * 3
    return found


LOOKUP = Domain(
    tools=_TOOLS,
    opening=Request("List all orders of 2026.", "list_orders", {"year": 2026}, ""),
    row=_row,
    keys=(("id",), ("customer", "item")),
    requests=_requests,
)
