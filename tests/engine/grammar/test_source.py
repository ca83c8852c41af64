"""Bad grammars are refused with a reason, on one line, and nothing else happens."""

import json

import pytest

from kvq.engine.grammar.source import GrammarLimits
from kvq.engine.params import StructuredOutput
from kvq.errors import ConfigError, RequestError
from tests.engine.grammar.walks import accepts, matcher_of
from tests.waiting import HANG_S


def nested(levels: int) -> dict:
    schema: dict = {"type": "integer"}
    for _ in range(levels):
        schema = {"allOf": [schema]}
    return schema


def holding_itself() -> dict:
    schema: dict = {"type": "object"}
    schema["properties"] = {"a": schema, "b": schema}
    return schema


BAD = [
    ({"regex": "(a"}, "unclosed group"),
    ({"regex": r"(a)\1"}, "backreferences"),
    ({"regex": "(?=a)b"}, "look-around"),
    ({"regex": r"[^\s\S]"}, "no text can match"),
    ({"regex": "(" * 5000 + "a" + ")" * 5000}, "64 levels"),
    ({"regex": "a" * 600_000}, "bytes at most"),
    ({"regex": "a\ud800"}, "Unicode"),
    ({"choice": ["ok", "\udfff"]}, "Unicode"),
    ({"lark": "start: foo"}, "unknown name"),
    ({"lark": "start: start"}, "no text can match"),
    ({"lark": 'foo: "a"'}, "no start rule"),
    ({"lark": "%import x"}, "Unknown common regex"),
    ({"lark": "start: " + "(" * 9999 + '"a"' + ")" * 9999}, "64 levels"),
    ({"json_schema": "{"}, "isn't JSON"),
    ({"json_schema": '{"enum": [1], "enum": [2]}'}, "the name enum is twice"),
    ({"json_schema": "[1]"}, "JSON object"),
    ({"json_schema": "9" * 5000}, "isn't JSON"),
    ({"json_schema": '{"maximum": NaN}'}, "isn't JSON"),
    ({"json_schema": {"const": {1, 2}}}, "set can't be written"),
    ({"json_schema": {"const": "\ud800"}}, "Unicode"),
    ({"json_schema": {"type": "strng"}}, "strng"),
    ({"json_schema": {"type": "array", "uniqueItems": True}}, "uniqueItems"),
    ({"json_schema": {"type": "array", "uniqueItems": True, "x-guidance": {"lenient": True}}}, "uniqueItems"),
    ({"json_schema": {"not": {"type": "null"}}}, "not"),
    ({"json_schema": {"type": "object", "propertyNames": {"maxLength": 3}}}, "propertyNames"),
    ({"json_schema": {"$ref": "https://example.com/s.json"}}, "example.com"),
    ({"json_schema": {"$ref": "file:///etc/passwd"}}, "etc/passwd"),
    ({"json_schema": {"$ref": "#/$defs/missing"}}, "missing"),
    ({"json_schema": {"$ref": "#"}}, "no text can match"),
    ({"json_schema": nested(5000)}, "64 levels"),
    ({"json_schema": '{"a":' * 5000}, "64 levels"),
    ({"json_schema": holding_itself()}, "64 levels"),
    ({"json_schema": {"enum": list(range(300_000))}}, "bytes at most"),
    ({"json_schema": {"type": "integer", "minimum": 5, "maximum": 4}}, "minimum"),
]


@pytest.mark.parametrize(("spec", "reason"), BAD, ids=range(len(BAD)))
def test_bad_grammar_is_refused_with_a_reason(compiler, spec, reason):
    with pytest.raises(RequestError, match=reason.replace("(", r"\(")) as refusal:
        compiler.submit(StructuredOutput(**spec)).result(HANG_S)
    assert "\n" not in str(refusal.value)
    assert len(str(refusal.value)) < 600


def test_compiler_works_after_bad_grammars(compiler, tokenizer):
    assert accepts(compiler, tokenizer, "ab", regex="[ab]+")


def test_depth_within_the_limit_compiles(compiler):
    assert matcher_of(compiler, json_schema=nested(31)).mask().any()  # two brackets a level
    assert matcher_of(compiler, json_schema=json.dumps(nested(31))).mask().any()


@pytest.mark.parametrize("name", ["max_bytes", "max_depth", "compile_timeout_s", "max_cached"])
def test_limits_are_above_zero(name):
    with pytest.raises(ConfigError, match=name):
        GrammarLimits(**{name: 0})
