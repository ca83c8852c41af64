"""Bodies of up to 8 MiB of the shapes that take longest to read."""

import json
from collections.abc import Callable
from functools import cache, partial

from kvq.server.http.incoming import MAX_BODY

CHATS = ("parts", "parts that are no text", "numbers in a message", "numbers for a template")


def _filled(before: str, unit: str, after: str, size: int = MAX_BODY - (1 << 10)) -> bytes:
    return (before + ",".join([unit] * (size // (len(unit) + 1))) + after).encode()


def _text(character: str, size: int = MAX_BODY - (1 << 10)) -> bytes:
    encoded = character.encode()
    return b'{"prompt": "' + encoded * (size // len(encoded)) + b'"}'


def _json(body: object) -> bytes:
    return json.dumps(body, separators=(",", ":")).encode()


_MAKERS: dict[str, Callable[[], bytes]] = {
    "wrong token ids": partial(_filled, '{"prompt": [', "-1", "]}"),
    "wrong texts": partial(_filled, '{"prompt": [', "1.5", "]}"),
    "lists of nothing": partial(_filled, '{"prompt": [', "[]", "]}"),
    "a field of nothing": partial(_filled, '{"prompt": "a", "x": [', "{}", "]}"),
    "biases": lambda: _json({"prompt": "a", "logit_bias": dict.fromkeys(range(400_000), "a")}),
    "parts that are no text": partial(
        _filled, '{"messages": [{"role": "user", "content": [', '{"type": "image_url"}', "]}]}"
    ),
    "unknown fields": lambda: _json(
        {"model": "tiny", "prompt": "The sea", "max_tokens": 4} | dict.fromkeys(map(str, range(4000)), 0)
    ),
    "far too many fields": lambda: _json({"prompt": "a"} | dict.fromkeys(map(str, range(700_000)), 0)),
    "constraints of far too many fields": lambda: _json(
        {"prompt": "a", "structured_outputs": dict.fromkeys(map(str, range(700_000)), 0)}
    ),
    "numbers in a message": partial(
        _filled, '{"messages": [{"role": "user", "content": "a", "x": [', "1", "]}]}"
    ),
    "numbers for a template": partial(
        _filled,
        '{"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"x": [',
        "1",
        "]}}",
    ),
    "numbers in a schema": partial(_filled, '{"prompt": "a", "guided_json": {"enum": [', "1", "]}}"),
    "token ids": partial(_filled, '{"prompt": [', "12", "]}"),
    "escapes": partial(_text, "\\n"),
    "two bytes a character": partial(_text, "é"),
    "small exponents": partial(_filled, '{"prompt": [', "5e-324", "]}", 1 << 20),
    "digits": partial(_filled, '{"prompt": [', "9" * 100, "]}"),
    "blanks": lambda: b" " * (7 << 20) + b"{}",
    "parts": lambda: _json(
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}] * 1000}] * 13}
    ),
}
SHAPES = tuple(_MAKERS)


@cache
def body_of(shape: str) -> bytes:
    """Made when it is asked for: all of them take seconds and 140 MB."""
    return _MAKERS[shape]()
