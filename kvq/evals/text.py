"""Texts for measurements, and their division into windows of tokens.

The default texts are the help topics of `pydoc`, which ship with every CPython.
"""

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from kvq.errors import RequestError
from kvq.models.parts.inputs import check_unicode

_LONG_LINE = 40  # characters; longer lines that occur in another topic are removed
_FOLDS = 5  # one topic in five is held out
_Window = TypeVar("_Window")


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalText:
    """Text with the name used in reports and a digest that identifies the text."""

    name: str
    text: str

    @property
    def digest(self) -> str:
        """SHA-256 of the UTF-8 text, in hexadecimal."""
        return hashlib.sha256(self.text.encode()).hexdigest()


def default_text() -> EvalText:
    """Return the held-out fifth of CPython's help topics, without long lines that also occur in other topics.

    The embedded model was trained on the other four fifths. A topic is held out if the SHA-256 of its name,
    as an integer, is 0 modulo 5. Lines longer than 40 characters that also occur in another topic are
    removed, so no long line was seen in training.
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
    """Return True if a help topic belongs to the held-out fifth."""
    return int.from_bytes(hashlib.sha256(topic.encode()).digest(), "big") % _FOLDS == 0


def decoded(path: Path) -> str:
    """Return the contents of a UTF-8 text file.

    Raises:
        RequestError: the file is missing, unreadable, not UTF-8, or empty.
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
    """Return the share of long lines in `other` that also occur in `text`, or 0 if there are none."""
    known = set(_long_lines(text))
    lines = _long_lines(other)
    return sum(line in known for line in lines) / len(lines) if lines else 0.0


def _topics() -> dict[str, str]:
    from pydoc_data.topics import topics

    return dict(topics)


def _long_lines(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if len(line.strip()) > _LONG_LINE]


def token_windows(
    tokenizer: Any, text: str, *, context: int, max_windows: int | None = None
) -> list[list[int]]:
    """Return consecutive windows of `context` tokens, dropping a shorter remainder.

    If the tokenizer adds a BOS token, every window starts with one.

    Raises:
        RequestError: the text is shorter than one window, or a size is too small.
    """
    ids, prefix = text_ids(tokenizer, text), begin_ids(tokenizer)
    return cut_windows(ids, prefix, context=context, max_windows=max_windows)


def cut_windows(
    ids: list[int], prefix: list[int], *, context: int, max_windows: int | None = None
) -> list[list[int]]:
    """Split a text's tokens into windows as `token_windows` does; every window begins with `prefix`."""
    if context < 2:
        raise RequestError(f"context must be at least 2 tokens, got {context}; nothing could be predicted")
    if max_windows is not None and max_windows < 1:
        raise RequestError(f"the number of windows must be at least 1, got {max_windows}")
    step = context - len(prefix)
    count = len(ids) // step
    if not count:
        raise RequestError(
            f"the text has {len(ids)} tokens, one window needs {step}; "
            f"give a longer text or --context {max(2, len(ids) + len(prefix))} or less"
        )
    return [prefix + ids[i * step : (i + 1) * step] for i in range(min(count, max_windows or count))]


def spread(windows: Sequence[_Window], count: int) -> list[_Window]:
    """Return at most `count` windows, evenly spaced over the text."""
    count = min(count, len(windows))
    return [windows[i * len(windows) // count] for i in range(count)]


def text_ids(tokenizer: Any, text: str) -> list[int]:
    """Return the token ids of a text, without special tokens.

    Raises:
        RequestError: the text contains code points that can't be encoded.
    """
    check_unicode(text, "the text")
    found = tokenizer(text, add_special_tokens=False, return_attention_mask=False, verbose=False)
    return list(found["input_ids"])


def begin_ids(tokenizer: Any) -> list[int]:
    """Return a list with the BOS token if the tokenizer adds one, else an empty list."""
    begin = tokenizer.bos_token_id
    with_special: list[int] = tokenizer("a", return_attention_mask=False)["input_ids"]
    return [begin] if begin is not None and with_special[:1] == [begin] else []
