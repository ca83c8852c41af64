"""Typed access to responses of OpenAI-compatible servers, where any field may be missing or mistyped."""

from contextlib import suppress
from typing import Any, TypeVar
from urllib.parse import SplitResult, urlsplit

from kvq import strict_json
from kvq.errors import ConfigError, EngineError, first_lines

_MOST_TOKENS = 1 << 53  # largest valid count
_MAX_NAME = 1000  # characters
T = TypeVar("T")


def read_address(url: str, schemes: tuple[str, ...]) -> SplitResult:
    """Return the parsed address of a server (the value of --url), which includes a host.

    Raises:
        ConfigError: `url` is not an address, or its scheme is not in `schemes`.
    """
    with suppress(ValueError):  # an invalid port, or an incomplete IPv6 address
        parts = urlsplit(url)
        if parts.scheme in schemes and parts.hostname and parts.port != 0:
            return parts
    raise ConfigError(f"a server's URL must be an address such as http://127.0.0.1:8000, got {url!r}")


def read_event(data: bytes) -> tuple[tuple[str, ...], dict[str, int] | None]:
    """Parse an event of `/v1/chat/completions` or `/v1/completions`.

    Return the texts of the choices (none if the event contains only usage), and the usage, if present, as
    `prompt_tokens`, `cached_tokens` and `generated_tokens`.

    Raises:
        EngineError: the event reports an error, is not JSON, or has a field of the wrong type.
    """
    event = _loads(data)
    if event.get("error") is not None:
        raise EngineError(error_message(event))
    choices = event.get("choices", [])
    if not isinstance(choices, list):
        raise _wrong_type("choices", "a list")
    texts = tuple(_text(f"choices[{index}]", choice) for index, choice in enumerate(choices))
    usage = _field(event, "usage", dict)
    return texts, _usage(usage) if usage else None


def read_model(data: bytes) -> dict[str, Any]:
    """Return the first model in a `/v1/models` response; its `id` is a string.

    Raises:
        EngineError: the response contains no model.
    """
    models = _loads(data).get("data")
    if not isinstance(models, list) or not models or not isinstance(models[0], dict):
        raise _wrong_type("data", "a list of models")
    name = models[0].get("id")
    if not isinstance(name, str) or not 0 < len(name) <= _MAX_NAME:
        raise _wrong_type("data[0].id", f"a text of 1 to {_MAX_NAME} characters")
    return dict(models[0])


def read_refusal(data: bytes, status: int) -> str:
    """Return the error message of a refused request, or the HTTP status if there is none."""
    try:
        return error_message(_loads(data))
    except EngineError:
        return f"HTTP status {status}"


def error_message(body: dict[str, Any]) -> str:
    """Return the message in an error object from any kind of server."""
    found = body.get("error", body)
    message = found.get("message") if isinstance(found, dict) else found
    if not isinstance(message, str) or not message.strip():
        return "it gives no reason"
    return first_lines(Exception(message))


def _loads(data: bytes) -> dict[str, Any]:
    try:
        value = strict_json.loads(data)
    except ValueError as error:
        raise EngineError(f"the server's answer is no JSON: {first_lines(error)}") from error
    if not isinstance(value, dict):
        raise EngineError("the server's answer is no JSON object")
    return value


def _text(where: str, choice: Any) -> str:
    if not isinstance(choice, dict):
        raise _wrong_type(where, "an object")
    if "text" in choice:
        return _field(choice, "text", str, where) or ""
    return _field(_field(choice, "delta", dict, where) or {}, "content", str, f"{where}.delta") or ""


def _usage(usage: dict[str, Any]) -> dict[str, int]:
    details = _field(usage, "prompt_tokens_details", dict, "usage") or {}
    return {
        "prompt_tokens": _count(usage, "prompt_tokens"),
        "cached_tokens": _count(details, "cached_tokens"),
        "generated_tokens": _count(usage, "completion_tokens"),
    }


def _field(holder: dict[str, Any], name: str, kind: type[T], where: str = "") -> T | None:
    """Return the field `name`, which must be of type `kind`, or None if the field is null or missing."""
    value = holder.get(name)
    if value is not None and not isinstance(value, kind):
        wanted = "a text or null" if kind is str else "an object or null"
        raise _wrong_type(f"{where}.{name}".removeprefix("."), wanted)
    return value


def _count(usage: dict[str, Any], name: str) -> int:
    value = usage.get(name)
    value = 0 if value is None else value
    if type(value) is not int or not 0 <= value <= _MOST_TOKENS:
        raise _wrong_type(f"usage: {name}", "a number of tokens")
    return value


def _wrong_type(field: str, wanted: str) -> EngineError:
    return EngineError(f"the server's answer doesn't keep to OpenAI's protocol: {field} must be {wanted}")
