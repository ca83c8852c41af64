"""Bodies of up to 8 MiB of the shapes that take longest to read."""

import json

from kvq.server.incoming import MAX_BODY

CHATS = ("parts", "parts that are no text", "numbers in a message", "numbers for a template")


def _filled(before: str, unit: str, after: str, size: int = MAX_BODY - (1 << 10)) -> bytes:
    return (before + ",".join([unit] * (size // (len(unit) + 1))) + after).encode()


def _text(character: str, size: int = MAX_BODY - (1 << 10)) -> bytes:
    encoded = character.encode()
    return b'{"prompt": "' + encoded * (size // len(encoded)) + b'"}'


def _json(body: object) -> bytes:
    return json.dumps(body, separators=(",", ":")).encode()


SHAPES = {
    "wrong token ids": _filled('{"prompt": [', "-1", "]}"),
    "wrong texts": _filled('{"prompt": [', "1.5", "]}"),
    "lists of nothing": _filled('{"prompt": [', "[]", "]}"),
    "a field of nothing": _filled('{"prompt": "a", "x": [', "{}", "]}"),
    "biases": _json({"prompt": "a", "logit_bias": dict.fromkeys(range(400_000), "a")}),
    "parts that are no text": _filled(
        '{"messages": [{"role": "user", "content": [', '{"type": "image_url"}', "]}]}"
    ),
    "unknown fields": _json(
        {"model": "tiny", "prompt": "The sea", "max_tokens": 4} | dict.fromkeys(map(str, range(4000)), 0)
    ),
    "far too many fields": _json({"prompt": "a"} | dict.fromkeys(map(str, range(700_000)), 0)),
    "constraints of far too many fields": _json(
        {"prompt": "a", "structured_outputs": dict.fromkeys(map(str, range(700_000)), 0)}
    ),
    "numbers in a message": _filled('{"messages": [{"role": "user", "content": "a", "x": [', "1", "]}]}"),
    "numbers for a template": _filled(
        '{"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"x": [', "1", "]}}"
    ),
    "numbers in a schema": _filled('{"prompt": "a", "guided_json": {"enum": [', "1", "]}}"),
    "token ids": _filled('{"prompt": [', "12", "]}"),
    "escapes": _text("\\n"),
    "two bytes a character": _text("é"),
    "small exponents": _filled('{"prompt": [', "5e-324", "]}", 1 << 20),
    "digits": _filled('{"prompt": [', "9" * 100, "]}"),
    "blanks": b" " * (7 << 20) + b"{}",
    "parts": _json({"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}] * 1000}] * 13}),
}
