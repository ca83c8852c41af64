"""What a body of JSON may hold, counted before it is built."""

import json
import random
import string

import pytest

from kvq.server.http import json_bounds
from kvq.server.http.json_bounds import MAX_DIGITS, MAX_KEYS, MAX_NESTING, MAX_TOKEN_IDS, MAX_VALUES, scan


def refusal(body, **options):
    """What is said against it, if anything is."""
    try:
        for _ in scan(body, **options):
            pass
    except ValueError as error:
        return str(error)
    return None


def many(unit, count):
    return b"[" + b",".join([unit] * count) + b"]"


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (many(b"1", MAX_VALUES - 1), None),
        (many(b"1", MAX_VALUES), f"{MAX_VALUES} values"),
        (many(b'"a\\n"', MAX_VALUES), f"{MAX_VALUES} values"),
        (many(b'"' + b"a" * 2000 + b'"', MAX_VALUES), f"{MAX_VALUES} values"),
        (many(b"[]", MAX_VALUES), f"{MAX_VALUES} values"),
        (b'{"prompt":' + many(b"7", MAX_TOKEN_IDS) + b"}", None),
        (b'{"prompt":' + many(b"7", MAX_TOKEN_IDS + 2) + b"}", "262144 token ids"),
        (b'{"a": 1, "tokens" : ' + many(b" 7 ", MAX_TOKEN_IDS) + b"}", None),
        (b'{"prompt":' + many(many(b"7", 1 << 14), 16) + b"}", None),
        (b'{"prompts":' + many(b"7", MAX_VALUES) + b"}", f"{MAX_VALUES} values"),
        (b'{"x":{"prompt":' + many(b"7", MAX_VALUES) + b"}}", f"{MAX_VALUES} values"),
        (b'{"x":"prompt","y":' + many(b"7", MAX_VALUES) + b"}", f"{MAX_VALUES} values"),
        (b'{"prompt":1,"y":' + many(b"7", MAX_VALUES) + b"}", f"{MAX_VALUES} values"),
        (b'{"prompt":' + many(b"1.5", MAX_VALUES) + b"}", f"{MAX_VALUES} values"),
        (json.dumps(dict.fromkeys(map(str, range(MAX_KEYS)), 1)).encode(), None),
        (json.dumps(dict.fromkeys(map(str, range(MAX_KEYS + 1)), 1)).encode(), "4096 fields"),
        (b"[" * MAX_NESTING + b"]" * MAX_NESTING, None),
        (b"[" * (MAX_NESTING + 1), "nested 72"),
        (b'{"a":' * (MAX_NESTING + 1), "nested 72"),
        (many(b"9" * MAX_DIGITS, 3), None),
        (many(b"9" * (MAX_DIGITS + 1), 3), "64 digits"),
        (b'{"prompt":' + many(b"9" * (MAX_DIGITS + 1), 3) + b"}", "64 digits"),
        (many(b"-0." + b"9" * MAX_DIGITS, 3), "64 digits"),
        (many(b"1e5", json_bounds.MAX_EXPONENTS), None),
        (many(b"1E5", json_bounds.MAX_EXPONENTS + 1), "exponents"),
        (b'{"max_tokens":1e308,"a":-1e-999}', None),
        (b'{"max_tokens":1e400}', "max_tokens is 1e400; numbers may be -1.79e308 to 1.79e308"),
        (b'{"a":1,"b":{"c":[1,{"d":[2]},-1E999]}}', "b.c is -1E999; numbers"),
        (b'{"prompt":[1,2,3,1e400]}', "prompt is 1e400; numbers"),
        (b"[1e400]", "a value is 1e400; numbers"),
        (many(b"true", 30_000), None),
        (b'{"a":1,"b":[{"a":2},{"a":"a"}],"c":"a"}', None),
        (b'{"a":1,"b":2,"a":3}', "the name a is twice"),
        (b'{"a":{"b":[1,{"c":1,"c":1}]}}', "the name c is twice"),
        (b'{"model":1,"m\\u006fdel":2}', "the name model is twice"),
        (b'{"\\u00e9":1,"\xc3\xa9":2}', "is twice"),
        (b'{"' + b"a" * 3000 + b'":1,"' + b"a" * 3000 + b'":2}', "is twice"),
        (b'{"' + b"a" * json_bounds.MAX_NAME + b'":1}', f"{json_bounds.MAX_NAME} bytes"),
        (b'{"prompt":"' + b"[{,:" * 300_000 + b'"}', None),
        (b'{"prompt":"' + b'\\"[{,:' * 300_000 + b'"}', None),
    ],
)
def test_each_bound(body, said):
    if said is None:
        assert refusal(body) is None
        json.loads(body)
    else:
        assert said in refusal(body)


def test_a_body_in_a_line_has_the_bounds_of_one_that_comes_alone():
    for prompt in (many(b"7", MAX_TOKEN_IDS), b"[" * (MAX_NESTING - 1) + b"]" * (MAX_NESTING - 1)):
        body = b'{"prompt":' + prompt + b"}"
        assert refusal(body) is None
        assert refusal(b'{"custom_id":"a","body":' + body + b"}", inside=1) is None
    assert "nested 72" in refusal(b'{"body":' + b"[" * (MAX_NESTING + 1), inside=1)


def value(rng, depth=0):
    kind = rng.randrange(7 if depth < 6 else 5)
    if kind == 5:
        return [value(rng, depth + 1) for _ in range(rng.randrange(6))]
    if kind == 6:
        return {text(rng): value(rng, depth + 1) for _ in range(rng.randrange(6))}
    return (text(rng), rng.randrange(-99, 99), rng.random(), rng.choice([True, False, None]), 10**20)[kind]


def text(rng):
    letters = string.printable + 'é\u2028😀"\\\\""[]{},:' + "\x00"
    return "".join(rng.choices(letters, k=rng.choice([0, 1, 5, 40, 3000])))


def count(item):
    if isinstance(item, dict):
        return 1 + len(item) + sum(map(count, item.values()))
    return 1 + sum(map(count, item)) if isinstance(item, list) else 1


@pytest.mark.parametrize("seed", range(60))
def test_values_are_counted_as_a_decoder_finds_them(seed, monkeypatch):
    rng = random.Random(seed)
    given = value(rng)
    layout = {"indent": rng.choice([None, 1]), "ensure_ascii": rng.random() < 0.5}
    body = json.dumps(given, **layout).encode()
    most = count(json.loads(body))
    monkeypatch.setattr(json_bounds, "MAX_VALUES", most)
    assert refusal(body) is None
    monkeypatch.setattr(json_bounds, "MAX_VALUES", most - 1)
    assert f"{most - 1} values" in refusal(body)


@pytest.mark.parametrize("seed", range(200))
def test_whatever_comes_it_ends(seed):
    rng = random.Random(seed)
    alphabet = rng.choice([b'"\\', b"[]{}", b'[]{},:"\\ 1e-.a', bytes(range(256))])
    body = bytes(rng.choices(alphabet, k=rng.choice([0, 3, 100, 20_000])))
    for whole in (body, b'{"prompt":' + body):
        assert (told := refusal(whole)) is None or "may" in told or "twice" in told


@pytest.mark.parametrize(
    "body",
    [
        b" " * (1 << 20),
        b":" * (1 << 20),
        b'"' + b"\\n" * (1 << 19) + b'"',
        b'{"prompt":[' + b"1," * (1 << 19),
    ],
    ids=["blanks", "colons", "escapes", "ids"],
)
def test_others_have_their_turn_often(body, monkeypatch):
    """A slice ends after some ten thousand bytes at the latest, however fast the machine is."""
    monkeypatch.setattr(json_bounds, "_SLICE_S", 0.0)
    num_slices = 0
    try:
        for _ in scan(body):
            num_slices += 1
    except ValueError:
        pass
    assert num_slices >= 30
