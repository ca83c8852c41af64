"""Questions about a long document: of facts alone, or of a text's passages with facts in between."""

from random import Random
from typing import Any

from kvq.errors import ConfigError
from kvq.traces.tasks.worlds import WORDS, code, request

_FIELDS = ("access code", "serial number", "meter number", "key number", "contract number", "parcel number")
_NUM_FACTS = 24  # in a text
_FACT = 53  # characters


def recall_messages(random: Random, chars: int, text: str | None) -> list[dict[str, Any]]:
    """Return 2 to 6 questions with their calls and results; the first follows the document in one message.

    Raises:
        ConfigError: the text is shorter than the document has to be.
    """
    facts = _facts(random, _NUM_FACTS if text is not None else max(_NUM_FACTS, chars // _FACT))
    lines = [f"{subject[0].upper()}{subject[1:]} is {value}." for subject, value in facts.items()]
    if text is not None:
        between = _passages(random, text, chars - _FACT * _NUM_FACTS)
        lines = [line for pair in zip(between, lines, strict=True) for line in pair]
    start = "This is a document:\n\n" + "\n".join(lines) + "\n\n"
    messages: list[dict[str, Any]] = []
    for subject in random.sample(list(facts), random.randint(2, 6)):
        question, value = f"{start}Answer from the document: what is {subject}?", {"value": facts[subject]}
        messages += request(len(messages) + 1, question, "answer", value, "passed on")
        start = ""
    return messages


def _facts(random: Random, count: int) -> dict[str, str]:
    names = [f"the {field} of the {place}" for place in WORDS["places"] for field in _FIELDS]
    copies = range(1, count // len(names) + 2)
    numbered = [name + f" {number}" * (number > 1) for number in copies for name in names]
    return {name: f"{code(random, 4)}-{code(random, 5)}" for name in random.sample(numbered, count)}


def _passages(random: Random, text: str, chars: int) -> list[str]:
    """Return neighbouring passages of a text, one for each fact."""
    if len(text) < chars:
        raise ConfigError(f"text must have at least {chars} characters for this many tokens, got {len(text)}")
    start, each = random.randint(0, len(text) - max(0, chars)), max(1, chars // _NUM_FACTS)
    return [text[start + each * at : start + each * (at + 1)] for at in range(_NUM_FACTS)]
