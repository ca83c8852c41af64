"""Words that worlds are made of, and values made of them."""

from random import Random

PEOPLE = [
    f"{first} {last}"
    for last in "Moss Marsh Keller Okafor Lindt Santos Moreau Novak".split()
    for first in "Dana Diana Jonas Johan Mira Maria Tomas Ines".split()
]
ITEMS = [
    f"{kind} {thing}"
    for thing in "lamp kettle chair desk mirror clock shelf".split()
    for kind in "copper walnut glass folding garden reading wall".split()
]
PLACES = [
    f"{name} {kind}"
    for kind in "depot mill harbour office station archive garage".split()
    for name in "Alder Birch Cedar Elm Hazel Juniper Larch Maple Rowan Willow".split()
]
TOPICS = [f"{what} {kind}" for what in ("Budget", "Design", "Sales", "Safety") for kind in ("review", "call")]
FOLDERS = "reports invoices drafts exports photos scans backup shared letters".split()
_NOTES = (
    "please bring the signed forms; ask at the front desk first; the client has seen an early version; "
    "numbers are still open; check with the other team before noon; as agreed on the phone; handle with care; "
    "this replaces what we had last year; no further steps are needed; wait for the second signature"
).split("; ")
_LETTERS = "ABCDEFGHJKLMNPQRSTUVWXYZ23456789"


def note(random: Random) -> str:
    """Return two remarks in plain English."""
    return ", ".join(random.sample(_NOTES, 2))


def code(random: Random, length: int) -> str:
    """Return letters and digits."""
    return "".join(random.choices(_LETTERS, k=length))


def date(random: Random, year: int = 2026) -> str:
    """Return a day of a year."""
    return f"{year}-{random.randint(1, 12):02d}-{random.randint(1, 28):02d}"


def time(random: Random) -> str:
    """Return a time of day."""
    return f"{random.randint(7, 18):02d}:{random.choice((0, 15, 30, 45)):02d}"


def email(person: str) -> str:
    """Return a person's address."""
    return f"{person.lower().replace(' ', '.')}@mail.example"
