"""Texts to measure on. The defaults ship with every CPython: the help topics of `pydoc`."""

import hashlib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from kvq.errors import RequestError

_LONG_LINE = 40  # characters; longer lines that occur in another topic are removed
_FOLDS = 5  # one topic in five is held out


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalText:
    """A text, what it is called in reports, and the digest that says which one it was."""

    name: str
    text: str

    @property
    def digest(self) -> str:
        """SHA-256 of the UTF-8 text, in hex."""
        return hashlib.sha256(self.text.encode()).hexdigest()


def default_text() -> EvalText:
    """Return the held-out fifth of CPython's help topics, without lines that other topics share.

    The embedded model was trained on the other four fifths. A topic is held out if the SHA-256 of
    its name, as an integer, is 0 modulo 5; its lines of over 40 characters that also occur in
    any other topic are removed, so that nothing long was seen in training.
    """
    topics = _topics()
    seen_in = Counter(line for text in topics.values() for line in set(_long_lines(text)))
    kept = []
    for name in sorted(topics):
        if is_held_out(name):
            lines = topics[name].splitlines(keepends=True)
            kept.append("".join(x for x in lines if len(x.strip()) <= _LONG_LINE or seen_in[x.strip()] == 1))
    return EvalText(name="held-out fifth of pydoc_data.topics", text="\n\n".join(kept))


def calibration_text() -> EvalText:
    """Return the four fifths of CPython's help topics that are not held out for evaluation."""
    topics = _topics()
    kept = [topics[name] for name in sorted(topics) if not is_held_out(name)]
    return EvalText(name="four fifths of pydoc_data.topics", text="\n\n".join(kept))


def is_held_out(topic: str) -> bool:
    """True if a help topic belongs to the evaluation fifth."""
    return int.from_bytes(hashlib.sha256(topic.encode()).digest(), "big") % _FOLDS == 0


def decoded(path: Path) -> str:
    """Return the text of a UTF-8 file.

    Raises:
        RequestError: missing, unreadable, not UTF-8, or empty.
    """
    try:
        text = path.read_bytes().decode("utf-8")
    except OSError as error:
        raise RequestError(f"can't read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise RequestError(
            f"{path} is not UTF-8 text (byte {error.start}); convert it, for example with iconv -t UTF-8"
        ) from error
    if not text.strip():
        raise RequestError(f"{path} is empty; give a text of at least one window (--context) of tokens")
    return text


def shared_lines(text: str, other: str) -> float:
    """Return the share of `other`'s long lines that are lines of `text` too; 0 if it has none."""
    known = set(_long_lines(text))
    lines = _long_lines(other)
    return sum(line in known for line in lines) / len(lines) if lines else 0.0


def _topics() -> dict[str, str]:
    from pydoc_data.topics import topics

    return dict(topics)


def _long_lines(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if len(line.strip()) > _LONG_LINE]
