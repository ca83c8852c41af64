"""Decoding a body with long texts, of these a part at a time: of 8 MiB a decoder keeps the loop for 15 ms."""

import secrets
from collections.abc import Generator, Iterable
from typing import Any

import msgspec

from kvq.server.turns import Again

Span = tuple[int, int]  # where a text begins and ends, within its quotes
_PART = 512 << 10  # bytes
_ESCAPE = 6  # bytes, the longest: \u20ac


def decode(body: bytes | bytearray, spans: Iterable[Span]) -> Generator[Again, None, Any]:
    """Return the value of a body; `spans`: values of it that are long texts, in their order.

    Raises:
        msgspec.MsgspecError: it is no JSON.
    """
    mark, texts, rest, at = secrets.token_hex(), dict[str, str](), bytearray(), 0
    for start, end in spans:
        place = f"{mark}{len(texts)}"
        texts[place] = yield from _decode_text(body, start, end)
        rest += body[at:start] + place.encode()
        at = end
    if not texts:
        return msgspec.json.decode(body)
    return _put_back(_decode_part(rest + body[at:]), texts)


def _decode_text(body: bytes | bytearray, start: int, end: int) -> Generator[Again, None, str]:
    parts = []
    while start < end:
        upto = end if end - start <= _PART else _cut(body, start, start + _PART)
        parts.append(_decode_part(b'"' + body[start:upto] + b'"'))
        start = upto
        yield Again.NEXT
    return "".join(parts)


def _decode_part(part: bytes | bytearray) -> Any:
    try:
        return msgspec.json.decode(part)
    except msgspec.MsgspecError as error:  # which says at which byte of the part
        raise msgspec.DecodeError(str(error).partition(" (byte")[0]) from None


def _cut(body: bytes | bytearray, start: int, at: int) -> int:
    """A place close before `at` that is within no character and no escape, nor between two halves of one."""
    for _ in range(3):
        at -= body[at] & 0xC0 == 0x80
    last = body.rfind(b"\\", at - _ESCAPE, at)
    if last >= 0:
        before = body[start : last + 1]
        if (len(before) - len(before.rstrip(b"\\"))) % 2:  # it begins an escape
            at = last
    is_second_half = body[at : at + 3].lower() == b"\\ud" and body[at + 3 : at + 4].lower() in b"cdef"
    return at - _ESCAPE if is_second_half else at


def _put_back(value: Any, texts: dict[str, str]) -> Any:
    """Put texts where their places are named; in objects and lists as they are."""
    if isinstance(value, str):
        return texts.get(value, value)
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        if isinstance(item, str | dict | list):
            value[key] = _put_back(item, texts)
    return value
