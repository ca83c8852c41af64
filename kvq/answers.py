"""What servers that speak OpenAI's protocol answer, field by field: any of it may be of another type."""

from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from kvq import strict_json
from kvq.errors import ConfigError, EngineError, first_lines

_MOST_TOKENS = 1 << 53  # of any count
_MAX_NAME = 1000  # characters


@dataclass(frozen=True, kw_only=True, slots=True)
class Usage:
    """What an answer took, in tokens."""

    prompt: int = 0
    cached: int = 0
    generated: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """One event of a stream."""

    texts: tuple[str, ...]  # of its choices; none in one that tells the usage alone
    usage: Usage | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Address:
    """Where a server is."""

    host: str
    port: int | None
    path: str


def read_address(url: str, schemes: tuple[str, ...]) -> Address:
    """Of a server, from what was given as --url.

    Raises:
        ConfigError: it is none, or of another scheme.
    """
    with suppress(ValueError):  # a port that is no number, half of an IPv6 address
        parts = urlsplit(url)
        if parts.scheme in schemes and parts.hostname and parts.port != 0:
            return Address(host=parts.hostname, port=parts.port, path=parts.path)
    raise ConfigError(f"--url must be an address such as http://127.0.0.1:8000, got {url!r}")


def read_event(data: bytes) -> Event:
    """An event of `/v1/chat/completions` or `/v1/completions`.

    Raises:
        EngineError: it tells of an error, is no JSON, or a field is of another type.
    """
    event = _loads(data)
    if event.get("error") is not None:
        raise EngineError(error_message(event))
    choices = event.get("choices", [])
    if not isinstance(choices, list):
        raise _misfit("choices", "a list")
    texts = tuple(_text(f"choices[{index}]", choice) for index, choice in enumerate(choices))
    return Event(texts=texts, usage=_usage(_object(event, "usage")))


def read_model(data: bytes) -> dict[str, Any]:
    """The first model of `/v1/models`; its `id` is a text.

    Raises:
        EngineError: there is none.
    """
    models = _loads(data).get("data")
    if not isinstance(models, list) or not models or not isinstance(models[0], dict):
        raise _misfit("data", "a list of models")
    name = models[0].get("id")
    if not isinstance(name, str) or not 0 < len(name) <= _MAX_NAME:
        raise _misfit("data[0].id", f"a text of 1 to {_MAX_NAME} characters")
    return dict(models[0])


def read_refusal(data: bytes, status: int) -> str:
    """Why a server refused, in its words if it has any."""
    try:
        return error_message(_loads(data))
    except EngineError:
        return f"HTTP status {status}"


def error_message(body: dict[str, Any]) -> str:
    """Of an error object, whoever's it is."""
    found = body.get("error", body)
    message = found.get("message") if isinstance(found, dict) else found
    told = message if isinstance(message, str) and message.strip() else "it tells no reason"
    return first_lines(Exception(told))


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
        raise _misfit(where, "an object")
    if "text" in choice:
        holder, name = choice, "text"
    else:
        holder, where, name = _object(choice, "delta", where), f"{where}.delta", "content"
    text = holder.get(name)
    if text is not None and not isinstance(text, str):
        raise _misfit(f"{where}.{name}", "a text or null")
    return text or ""


def _usage(usage: dict[str, Any]) -> Usage | None:
    if not usage:
        return None
    return Usage(
        prompt=_count(usage, "prompt_tokens"),
        cached=_count(_object(usage, "prompt_tokens_details", "usage"), "cached_tokens"),
        generated=_count(usage, "completion_tokens"),
    )


def _object(holder: dict[str, Any], name: str, where: str = "") -> dict[str, Any]:
    """A field that is an object; an empty one for null or none."""
    value = holder.get(name)
    if value is not None and not isinstance(value, dict):
        raise _misfit(f"{where}.{name}".removeprefix("."), "an object or null")
    return value or {}


def _count(usage: dict[str, Any], name: str) -> int:
    value = usage.get(name)
    if value is None:
        return 0
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= _MOST_TOKENS:
        raise _misfit(f"usage: {name}", "a number of tokens")
    return value


def _misfit(field: str, wanted: str) -> EngineError:
    return EngineError(f"the server's answer doesn't keep to OpenAI's protocol: {field} must be {wanted}")
