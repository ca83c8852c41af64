"""Words that worlds are made of, and values made of them."""

from random import Random


def _pairs(firsts: str, seconds: str) -> list[str]:
    return [f"{first} {second}" for first in firsts.split() for second in seconds.split()]


PEOPLE = _pairs("Dana Diana Jonas Johan Mira Maria Tomas Ines", "Moss Marsh Keller Okafor Lindt Santos Novak")
ITEMS = _pairs("copper walnut glass folding garden reading wall", "lamp kettle chair desk mirror clock shelf")
PLACES = _pairs(
    "Alder Birch Cedar Elm Hazel Juniper Larch Maple Rowan Willow",
    "depot mill harbour office station archive",
)
TOPICS = _pairs("Budget Design Sales Safety Quality", "review call")
FOLDERS = ("reports", "invoices", "drafts", "exports", "photos", "scans", "backup", "shared", "letters")
_NOTES = (
    "please bring the signed forms",
    "ask at the front desk first",
    "the client has seen an early version",
    "check with the other team before noon",
    "this replaces what we had last year",
    "no further steps are needed",
    "wait for the second signature",
)
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
