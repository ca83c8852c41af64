"""Long texts of a body, decoded a part at a time as they would be at once."""

import json
import random

import msgspec
import pytest

from kvq.server.http import strict_json
from kvq.server.http.json_bounds import MAX_NAME, scan

UNITS = ["a", "é", "€", "😀", "\\n", '\\"', "\\\\", "\\u00e9", "\\ud83d\\ude00", "\\u20ac", " ", "\\/"]


def through(steps):
    """What a generator returns, and how often it gave way."""
    count = 0
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value, count
        count += 1


def spans_of(body):
    found = []
    for _ in scan(body, long=found):
        pass
    return found


@pytest.mark.parametrize("seed", range(60))
def test_whatever_lies_where_it_is_cut(seed, monkeypatch):
    odds = random.Random(seed)
    monkeypatch.setattr(strict_json, "_PART", odds.choice((17, 24, 63, 200)))
    units = odds.sample(UNITS, odds.choice((1, 2, 3, len(UNITS))))
    texts = ["".join(odds.choices(units, k=300)) for _ in range(3)]
    body = f'{{"a": ["{texts[0]}", "x", {{"b": "{texts[1]}"}}, 1, null], "c": "{texts[2]}"}}'.encode()
    spans, at = [], 0
    for text in texts:
        at = body.index(b'"' + text.encode() + b'"', at) + 1
        spans.append((at, at + len(text.encode())))
    value, count = through(strict_json.decode(body, spans))
    assert value == json.loads(body)
    assert count >= 3


def test_a_scan_tells_of_long_values_only():
    long, short = "\\n" * MAX_NAME, "a" * 1000
    body = f'{{"a": "{short}", "b": ["{long}"], "c": "{long}"}}'.encode()
    spans = spans_of(body)
    assert [body[start:end] for start, end in spans] == [long.encode()] * 2
    value, count = through(strict_json.decode(body, spans))
    assert value == json.loads(body)
    assert count >= 2 * len(long) // strict_json._PART


def test_a_text_alone_is_a_body():
    body = b'"' + b"a" * (MAX_NAME + 1) + b'"'
    assert through(strict_json.decode(body, spans_of(body)))[0] == "a" * (MAX_NAME + 1)


def test_a_short_body_is_decoded_at_once():
    assert through(strict_json.decode(b'{"a": 1}', [])) == ({"a": 1}, 0)


@pytest.mark.parametrize("broken", [b"\\x", b"\\ud800", b"\xff", b"\x01", b"\\u1z"])
def test_what_is_no_json_is_refused_as_before(broken):
    for body in (
        b'["' + b"a" * (2 << 20) + broken + b'"]',
        b'["' + broken + b"a" * (2 << 20) + b'"]',
        b'["' + b"a" * (2 << 20) + b'", ' + broken + b"]",
    ):
        for decode in (
            lambda body=body: through(strict_json.decode(body, spans_of(body))),
            lambda body=body: msgspec.json.decode(body),
        ):
            with pytest.raises((msgspec.MsgspecError, UnicodeDecodeError)):
                decode()
