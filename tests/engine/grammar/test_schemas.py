"""Bounded schemas end, and what ends validates."""

import json
import random

import jsonschema
import pytest

from tests.engine.grammar.schemas import random_schema
from tests.engine.grammar.walks import accepts, matcher_of, random_walk

SCHEMAS = 200


def test_random_bounded_schemas_end_and_validate(compiler, tokenizer):
    rng = random.Random(20261)
    ended = 0
    for _ in range(SCHEMAS):
        schema = random_schema(rng)
        text = random_walk(matcher_of(compiler, json_schema=schema), tokenizer, rng, max_tokens=512)
        if text is not None:
            ended += 1
            jsonschema.validate(json.loads(text), schema, format_checker=jsonschema.FormatChecker())
    assert ended >= 0.95 * SCHEMAS


def test_schema_as_text_is_the_same_grammar(compiler, tokenizer):
    schema = {"type": "object", "properties": {"größe": {"type": "integer"}}, "required": ["größe"]}
    for spec in (schema, json.dumps(schema), json.dumps(schema, ensure_ascii=False)):
        assert accepts(compiler, tokenizer, '{"größe":12}', json_schema=spec)
        assert not accepts(compiler, tokenizer, '{"größe":"12"}', json_schema=spec)


@pytest.mark.parametrize("text", ['{"a": 1}', '{ "a":1}', '{"a":1} ', '\n{"a":1}'])
def test_no_free_white_space(compiler, tokenizer, text):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": False}
    assert accepts(compiler, tokenizer, '{"a":1}', json_schema=schema)
    assert not accepts(compiler, tokenizer, text, json_schema=schema)


@pytest.mark.parametrize("options", [{"whitespace_flexible": True}, {"lenient": True}])
def test_a_schema_cannot_loosen_its_own_reading(compiler, tokenizer, options):
    schema = {"type": "array", "items": {"type": "integer"}, "x-guidance": options}
    assert not accepts(compiler, tokenizer, "[1, 2]", json_schema=schema)


def test_recursive_schema(compiler, tokenizer):
    node = {"type": "object", "properties": {"next": {"$ref": "#"}}, "additionalProperties": False}
    assert accepts(compiler, tokenizer, '{"next":{"next":{}}}', json_schema=node)
    assert not accepts(compiler, tokenizer, '{"next":{"next":1}}', json_schema=node)
