"""Redaction of recordings: personal data and secrets are replaced by their kind, such as <email>.

It finds what has a recognizable form, which is not all that is personal: names and addresses stay.
"""

import json
import re
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any

from kvq.errors import ConfigError

_BYTE = r"(?:25[0-5]|2[0-4]\d|1?\d?\d)"
# Bounded, and begun only where a word begins, so that time is linear in the length of any text
_KINDS = {
    "key": r"\b(?:[spr]k[-_][\w-]{16,255}|gh[opsru]_\w{20,255}|github_pat_\w{20,255}|glpat-[\w-]{16,64}"
    r"|(?:AKIA|ASIA)[0-9A-Z]{16}\b|xox[abeprs]-[\w-]{10,255}|AIza[\w-]{30,64}|hf_[A-Za-z0-9]{30,64}"
    r"|(?<![\w-])eyJ[\w-]{8,4096}\.[\w-]{8,4096}\.[\w-]{0,4096})",
    "token": r"\b[Bb]earer[ :]{1,3}(?=[\w.~+/-]{0,64}\d)[\w.~+/-]{8,4096}=*",
    "email": r"(?<![\w.%+-])[\w.%+-]{1,64}@[\w-]{1,63}(?:\.[\w-]{1,63}){1,8}",
    "ip": rf"(?<![\w.])(?!127\.|0\.0\.0\.0)(?:{_BYTE}\.){{3}}{_BYTE}(?!\w|\.\d)"
    r"|(?<![\w:])(?=[a-fA-F:]{0,40}\d)(?=[\da-fA-F:]{0,40}[\da-fA-F]{3})(?:[\da-fA-F]{1,4}:){1,7}(?::[\da-fA-F]{1,4}){1,7}(?![\w:])"
    r"|(?<![\w:])(?:[\da-fA-F]{1,4}:){7}[\da-fA-F]{1,4}(?![\w:])",
    "card": r"(?<![\w.+-])\d(?:[ -]?\d){12,18}(?!\w|[.-]\d)",
    "phone": r"(?<![\w.])(?:\+|00)[1-9](?:[ ().-]{0,2}\d){7,14}(?!\w)"
    r"|(?<![\w.-])\(?[2-9]\d{2}\)?[ .-]{1,2}\d{3}[.-]\d{4}(?!\w|-\d)",
    "secret": r"(?<![\w+/=-])[\w+/-]{32,}={0,2}",
}
_PATTERN = re.compile("|".join(f"(?P<{kind}>{pattern})" for kind, pattern in _KINDS.items()))
_SUSPECT = re.compile(r"[\d@]|hf_")  # in every line that holds one of them
_RUNS = re.compile("[a-z]+|[A-Z]+|[0-9]+")
_MIXED = 0.3  # runs per character: random letters and digits have 0.6, names and paths 0.2
_MAX_CACHED = 16 << 10  # characters
_IDS = ("id", "tool_call_id", "tool_use_id", "call_id")  # that link calls with their results


class Redactor:
    """Redaction by the usual kinds and by regular expressions of the user, which apply to single lines."""

    def __init__(self, patterns: Sequence[str] = ()) -> None:
        """Raise ConfigError if one of the patterns is no regular expression."""
        try:
            self._patterns = [re.compile(pattern) for pattern in patterns]
        except re.error as error:
            message = f"--record-redact {error.pattern!r} is no regular expression: {error}"
            raise ConfigError(message) from error
        self._cached = lru_cache(1024)(self.text)  # agents send the same messages again each turn

    def value(self, value: Any, skipped: Sequence[str] = _IDS) -> Any:
        """Return a JSON value with redacted texts; names, and ids of calls, stay as they are."""
        if isinstance(value, str):
            return self._cached(value) if len(value) <= _MAX_CACHED else self.text(value)
        if isinstance(value, list):
            return [self.value(item, skipped) for item in value]
        if isinstance(value, dict):
            return {key: self._field(key, item, skipped) for key, item in value.items()}
        return value

    def text(self, text: str) -> str:
        """Return a text with placeholders, which stays JSON if it is JSON."""
        try:
            given = json.loads(text) if text[:1] in ("{", "[") else None
        except (ValueError, RecursionError):
            given = None
        if given is None:
            return self._plain(text)
        found = self.value(given, ())  # escapes hide what is behind them
        whole = text if found == given else json.dumps(found, ensure_ascii=False)
        with suppress(ValueError, RecursionError):
            json.loads(plain := self._plain(whole))
            return plain
        return whole

    def _plain(self, text: str) -> str:
        """Return a text with placeholders, found line by line so that other threads run between lines."""
        return "".join(map(self._line, text.splitlines(keepends=True)))

    def _line(self, line: str) -> str:
        for pattern in self._patterns:
            line = pattern.sub("<redacted>", line)
        return _PATTERN.sub(_placeholder, line) if _SUSPECT.search(line) else line

    def _field(self, key: str, value: Any, skipped: Sequence[str]) -> Any:
        """Return a redacted field of an object; ids of calls stay, those in their arguments do not."""
        if key in skipped and isinstance(value, str):
            return value
        return self.value(value, () if key in ("input", "arguments") else skipped)


def _placeholder(match: re.Match[str]) -> str:
    kind, text = str(match.lastgroup), match[0]
    is_word = kind == "secret" and len(_RUNS.findall(text)) < _MIXED * len(text)
    return text if is_word or (kind == "card" and not _has_check_digit(text)) else f"<{kind}>"


def _has_check_digit(text: str) -> bool:
    """Return whether digits end in Luhn's check digit, as those of cards do."""
    digits = [int(digit) for digit in reversed(text) if digit.isdecimal()]
    doubled = [digit * 2 - 9 * (digit > 4) for digit in digits[1::2]]
    return (sum(digits[::2]) + sum(doubled)) % 10 == 0
