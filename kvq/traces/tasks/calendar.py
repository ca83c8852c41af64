"""A calendar: events with ids, dates and owners, of which several have the same title."""

from random import Random
from typing import Any

from kvq.traces.tasks import words
from kvq.traces.tasks.table import Domain, Row
from kvq.traces.tasks.talk import Request, choice, kind, tool

_MINUTES = kind("integer", "How long it takes.", default=30)
_CHANNEL = choice("email", "phone", default="email")
_TOOLS = [
    tool("list_events", "List all events of a year.", year=kind("integer", "Such as 2025.")),
    tool("create_event", "Add an event. Dates are YYYY-MM-DD.", "title", "date", "start", minutes=_MINUTES),
    tool("move_event", "Move an event to another time.", "event_id", "date", "start"),
    tool("cancel_event", "Cancel an event.", "event_id"),
    tool("invite", "Invite a person to an event.", "event_id", "email"),
    tool("remind", "Remind a person of an event.", "event_id", "email", channel=_CHANNEL),
]


def _row(random: Random) -> Row:
    return {
        "id": f"evt-{words.code(random, 8)}",
        "title": random.choice(words.TOPICS),
        "date": words.date(random),
        "start": words.time(random),
        "owner": words.email(random.choice(words.PEOPLE)),
        "note": words.note(random),
    }


def _requests(random: Random, event: Row, other: Row, last: Any) -> list[Request]:
    id, new, title = event["id"], f"evt-{words.code(random, 8)}", f"{random.choice(words.PLACES)} visit"
    named, owned = (f'the event "{one["title"]}" of {one["date"]}' for one in (event, other))
    when = {"date": words.date(random, 2027), "start": words.time(random)}
    at, to = f"{when['date']} at {when['start']}", {"event_id": id, "email": other["owner"]}
    length, address = random.choice((20, 45, 60, 90)), words.email(random.choice(words.PEOPLE))
    made, invited = {"title": title, **when, "minutes": length}, f"invited {to['email']} to {id}"
    found = [
        Request(f"Cancel {named}.", "cancel_event", {"event_id": id}, f"cancelled {id}"),
        Request(f"Move {named} to {at}.", "move_event", {"event_id": id, **when}, f"moved {id}", last=id),
        Request(f"Invite the owner of {owned} to {named}.", "invite", to, invited),
        Request(
            f'Add an event "{title}" of {length} minutes on {at}.',
            "create_event",
            made,
            f"created {new}",
            last=new,
        ),
    ]
    if last:
        asked = f"Remind {address} by phone of the event that was just moved or added."
        to = {"event_id": last, "email": address, "channel": "phone"}
        found += [Request(asked, "remind", to, f"{address} is reminded of {last}")] * 4
    return found


CALENDAR = Domain(
    tools=_TOOLS,
    opening=Request("List all events of 2026.", "list_events", {"year": 2026}, ""),
    row=_row,
    keys=(("id",), ("title", "date")),
    requests=_requests,
)
