"""Questions about a long document: of facts alone, or of a text's passages with facts in between."""

from random import Random

from kvq.errors import ConfigError
from kvq.traces.tasks import words
from kvq.traces.tasks.talk import Request, Talk, kind, tool, world_chars

_VALUE = kind("string", "The value alone, as it stands in the document.")
_TOOLS = [
    tool("answer", "Answer a question from the document.", value=_VALUE),
    tool("search_web", "Search the web, if the user says so.", "query"),
    tool("keep_note", "Keep a text, if the user says so.", "text"),
]
_FIELDS = ("access code", "serial number", "meter number", "key number", "contract number", "parcel number")
_NUM_FACTS = 24  # in a text
_FACT = 53  # characters


def talk_of_recall(random: Random, tokens: int, text: str | None = None) -> Talk:
    """Return a session of 2 to 6 questions, the first of which follows the document in one message.

    Raises:
        ConfigError: the text is shorter than the document has to be.
    """
    talk, chars = Talk(_TOOLS), world_chars(_TOOLS, tokens)
    facts = _facts(random, _NUM_FACTS if text is not None else max(_NUM_FACTS, chars // _FACT))
    lines = [f"{subject[0].upper()}{subject[1:]} is {value}." for subject, value in facts.items()]
    if text is not None:
        between = _passages(random, text, chars - _FACT * _NUM_FACTS)
        lines = [line for pair in zip(between, lines, strict=True) for line in pair]
    start = "This is a document:\n\n" + "\n".join(lines) + "\n\n"
    for subject in random.sample(list(facts), random.randint(2, 6)):
        value, question = facts[subject], f"{start}Answer from the document: what is {subject}?"
        talk.add(Request(question, "answer", {"value": value}, "passed on"))
        start = ""
    return talk


def _facts(random: Random, count: int) -> dict[str, str]:
    names = [f"the {field} of the {place}" for place in words.PLACES for field in _FIELDS]
    numbered = [
        name + f" {number}" * (number > 1) for number in range(1, count // len(names) + 2) for name in names
    ]
    return {
        name: f"{words.code(random, 4)}-{words.code(random, 5)}" for name in random.sample(numbered, count)
    }


def _passages(random: Random, text: str, chars: int) -> list[str]:
    """Return neighbouring passages of a text, one for each fact."""
    if len(text) < chars:
        raise ConfigError(f"text must have at least {chars} characters for this many tokens, got {len(text)}")
    start, each = random.randint(0, len(text) - max(0, chars)), max(1, chars // _NUM_FACTS)
    return [text[start + each * at : start + each * (at + 1)] for at in range(_NUM_FACTS)]
