"""Fields of a quantization_config, read strictly: unsupported fields and values are refused by name."""

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvq.errors import ModelError

MISSING = object()
_SHOWN = 80  # characters of a value
WHERE = "config.json's quantization_config"


@dataclass(frozen=True, slots=True)
class Fields:
    """A JSON object, and its location for error messages."""

    values: Mapping[str, Any]
    where: str = WHERE

    @classmethod
    def of(cls, value: object, where: str) -> "Fields":
        """Wrap a JSON object.

        Raises:
            ModelError: the value is not an object.
        """
        if not isinstance(value, dict):
            raise ModelError(f"{where} must be an object, got {shown(value)}")
        return cls(value, where)

    def refusal(self, name: str, allowed: str) -> ModelError:
        """Return the error for a field whose value is not supported."""
        value = self.values.get(name, MISSING)
        got = "nothing" if value is MISSING else shown(value)
        return ModelError(f"{self.where}: {name} must be {allowed}, got {got}")

    def choice(self, name: str, allowed: Sequence[Any], default: Any = MISSING) -> Any:
        """Return a field's value, which must be in `allowed` and have the same type: 1 is not true."""
        value = self.values.get(name, default)
        if not any(type(value) is type(option) and value == option for option in allowed):
            raise self.refusal(name, " or ".join(shown(option) for option in allowed))
        return value

    def number(self, name: str) -> int:
        """Return a field's integer value."""
        value = self.values.get(name)
        if type(value) is not int:
            raise self.refusal(name, "an integer")
        return value

    def strings(self, name: str) -> list[str]:
        """Return a field's list of strings, empty if the field is missing or null."""
        value = self.values.get(name)
        if value is None:
            return []
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.refusal(name, "a list of strings")
        return value

    def absent(self, *names: str) -> None:
        """Raise ModelError if any of these fields is set, since kvq does not support what they request."""
        for name in names:
            if self.values.get(name) not in (None, False, {}, []):
                raise self.refusal(name, "absent (kvq doesn't read it)")

    def object(self, name: str) -> "Fields":
        """Return the object that a field contains."""
        return Fields.of(self.values.get(name), f"{self.where}.{name}")

    def only(self, known: Sequence[str]) -> None:
        """Raise ModelError if there are any fields other than `known`."""
        for name in self.values:
            if name not in known:
                raise ModelError(
                    f"{self.where}: unknown field {shown(name)}{_meant(name, known, 0.4)}; "
                    f"read: {', '.join(known)}"
                )

    def no_typos(self, known: Sequence[str], harmless: Sequence[str] = ()) -> None:
        """Raise ModelError if a field looks like a misspelling of one in `known`; it would be ignored."""
        for name in self.values:
            if name not in known and name not in harmless and (meant := _meant(name, known, 0.8)):
                raise ModelError(f"{self.where}: unknown field {shown(name)}{meant}")


def shown(value: object) -> str:
    """Return a JSON value as text for an error message, shortened if necessary."""
    if isinstance(value, int) and abs(value) >= 1 << 64:  # Python refuses to print 5,000 digits
        return f"a number of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."


def _meant(name: str, known: Sequence[str], cutoff: float) -> str:
    close = difflib.get_close_matches(name, known, n=1, cutoff=cutoff)
    return f"; did you mean {close[0]!r}?" if close else ""
