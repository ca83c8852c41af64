"""A calendar: events with similar names, ids, dates and owners."""

from random import Random
from typing import Any

from kvq.traces.tasks import words
from kvq.traces.tasks.table import Domain, Row
from kvq.traces.tasks.talk import Request, choice, kind, tool

_ID = kind("string", "As listed. It begins with evt-.")
_MINUTES = kind("integer", "How long it takes.", default=30)
_CHANNEL = choice("email", "phone", default="email")
_TOOLS = [
    tool("list_events", "List all events of a year.", year=kind("integer", "Such as 2025.")),
    tool("create_event", "Add an event. Dates are YYYY-MM-DD.", "title", "date", "start", minutes=_MINUTES),
    tool("move_event", "Move an event to another time.", "date", "start", event_id=_ID),
    tool("cancel_event", "Cancel an event.", event_id=_ID),
    tool("invite", "Invite a person to an event.", "email", event_id=_ID),
    tool("remind", "Remind a person of an event.", "email", event_id=_ID, channel=_CHANNEL),
]


def _row(random: Random) -> Row:
    return {
        "title": f"{random.choice(words.PLACES)} {random.choice(words.TOPICS)} {random.randint(1, 9)}",
        "event_id": f"evt-{words.code(random, 8)}",
        "date": words.date(random),
        "start": words.time(random),
        "owner": words.email(random.choice(words.PEOPLE)),
        "note": words.note(random),
    }


def _requests(random: Random, event: Row, other: Row, last: Any) -> list[Request]:
    id, new, title = event["event_id"], f"evt-{words.code(random, 8)}", f"{random.choice(words.PLACES)} visit"
    named, owned, owner = f'the event "{event["title"]}"', f'the event "{other["title"]}"', other["owner"]
    when: dict[str, Any] = {"date": words.date(random, 2027), "start": words.time(random)}
    at = f"{when['date']} at {when['start']}"
    length, address = random.choice((20, 45, 60, 90)), words.email(random.choice(words.PEOPLE))
    email, guest = random.choice(((owner, f"the owner of {owned}"), (address, address)))
    create, made = f'Add an event "{title}" of {length} minutes on {at}.', {"title": title, "minutes": length}
    if last is not None:
        again = f"Remind {address} by phone of the event that was just moved or added."
        person = {"email": address, "event_id": last, "channel": "phone"}
        return [Request(again, "remind", person, f"{address} is reminded of {last}")]
    move, invite = f"Move {named} to {at}, by its event_id.", f"Invite {guest} to {named}, by its event_id."
    return [
        Request(f"Cancel {named}, by its event_id.", "cancel_event", {"event_id": id}, f"cancelled {id}"),
        Request(move, "move_event", {**when, "event_id": id}, f"moved {id}", last=id),
        Request(invite, "invite", {"email": email, "event_id": id}, f"invited {email} to {id}"),
        Request(create, "create_event", {**made, **when}, f"created {new}", last=new),
    ]


_OPENING = Request("List all events of 2026.", "list_events", {"year": 2026})
CALENDAR = Domain(tools=_TOOLS, opening=_OPENING, row=_row, requests=_requests)
