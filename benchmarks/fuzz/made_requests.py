"""Requests for the door `http`: made by schemathesis of the server's own description, and broken by hand."""

import json
import random
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st
from schemathesis import Case, GenerationMode
from schemathesis.schemas import BaseSchema

_MARK = "\ue000mark\ue000"  # where a broken value goes
_MOST = {"max_tokens": 8, "max_completion_tokens": 8, "max_output_tokens": 8, "n": 4, "best_of": 4}
_BROKEN = [
    "NaN", "1e999", "-Infinity", "-1", "0", "1.5", "true", "null", "{}", "[]", '""', '"\\u0000"', "1e308",
    '"\\ud800"', '["\\ud800"]', '{"\\ud800": 1}', '"\\udfff\\ud800"', '"' + "x" * 70_000 + '"',
    str(2**31), str(2**63), str(2**64), str(-(2**63) - 1), "9" * 4000, "9" * 5000, "-0.0",
    *("[" * depth + "]" * depth for depth in (40, 63, 64, 65, 130, 260, 500, 990, 20_000)),
    *('{"a":' * depth + "1" + "}" * depth for depth in (40, 63, 64, 65, 130, 260, 500, 990, 20_000)),
    '{"type": "object", "properties": {"a": {"const": 99999999999999999999}}}',
    '{"$ref": "#"}', '{"tokenize": true}', '{"chat_template": "{{ 1 }}"}', '{"messages": []}',
    '{"1": 100, "99999999999999999999": 1}', '{"type": "json_schema"}', "[" + "0," * 5000 + "0]",
    '"' + "\\ud83d\\ude00" * 50 + '"', '"<|endoftext|><|im_start|>"', '"(a*)*b"', '"start: start"',
]  # fmt: skip


@dataclass(frozen=True)
class Request:
    """One to be sent: a case of schemathesis, and its text if that is not what schemathesis would send."""

    case: Case
    kind: str  # right, wrong, broken: by the document; by hand
    text: bytes | None = None


def requests_for(schema: BaseSchema, model: str) -> st.SearchStrategy[Request]:
    """Random requests of every route, most of them of those that take a body."""
    bodies, others = [], []
    for operation in (result.ok() for result in schema.get_all_operations()):
        right = operation.as_strategy(generation_mode=GenerationMode.POSITIVE)
        if not operation.body:
            others.append(right.map(lambda case: Request(case, "right")))
            continue
        wrong = operation.as_strategy(generation_mode=GenerationMode.NEGATIVE)
        fits = _tamed(right, model).map(lambda case: Request(case, "right"))
        bodies += [fits, fits, wrong.map(lambda case: Request(case, "wrong"))]
    kinds = [*bodies, st.sampled_from(others).flatmap(lambda one: one)]
    return st.sampled_from(range(len(kinds))).flatmap(kinds.__getitem__)


def _tamed(cases: st.SearchStrategy[Case], model: str) -> st.SearchStrategy[Case]:
    """Most of them are for the model that is there, none for long answers."""
    return st.builds(
        lambda case, odds: _tame(case, model, random.Random(odds)), cases, st.integers(0, 1 << 32)
    )


def _tame(case: Case, model: str, odds: random.Random) -> Case:
    body = case.body
    if not isinstance(body, dict):
        return case
    if isinstance(body.get("model"), str) and odds.random() < 0.9:
        body["model"] = model
    generates = case.path in ("/v1/completions", "/v1/chat/completions", "/v1/messages")
    if generates and body.get("max_tokens", 0) in (0, None) and case.path != "/v1/messages":
        body["max_tokens"] = odds.randrange(1, 6)
    if case.path == "/v1/responses" and body.get("max_output_tokens") is None:
        body["max_output_tokens"] = odds.randrange(1, 6)
    if case.path in ("/api/chat", "/api/generate"):
        options = body.get("options") or {}
        body["options"] = {"num_predict": 4} | options if isinstance(options, dict) else options
    for name, most in _MOST.items():
        if _is_above(body.get(name), most) and odds.random() < 0.95:
            body[name] = odds.randrange(1, most + 1)
    if body.get("suffix", 0) != 0 and odds.random() < 0.8:
        del body["suffix"]
    for name in ("prompt", "input", "tokens", "stop_token_ids"):
        if name in body:
            body[name] = _known_tokens(body[name], odds)
    return case


def _is_above(value: Any, most: int) -> bool:
    return isinstance(value, int | float) and value > most


def _known_tokens(value: Any, odds: random.Random) -> Any:
    if isinstance(value, list):
        return [_known_tokens(one, odds) for one in value]
    if _is_above(value, 4095) and odds.random() < 0.99:
        return int(value) % 4096
    return value


def broken(case: Case, odds: random.Random) -> Request:
    """A copy of a request with one value in another's place, or beside it; the text is sent as it is."""
    body = json.loads(json.dumps(case.body))
    holder, key = odds.choice([*_places(body), (body, "extra")])
    holder[key] = _MARK
    text = json.dumps(body).replace(json.dumps(_MARK), odds.choice(_BROKEN)).encode()
    if odds.random() < 0.1:
        at = odds.randrange(len(text))
        text = text[:at] if odds.random() < 0.5 else text[:at] + odds.randbytes(1) + text[at + 1 :]
    return Request(case, "broken", text)


def _places(value: Any) -> Any:
    """Every place in a value, as its holder and key."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in list(items):
        yield value, key
        yield from _places(item)
