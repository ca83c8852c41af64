"""What a bare value is, by the schema of its parameter."""

import json

import pytest

from kvq.server.tools.format import Tool
from kvq.server.tools.formats.qwen3_coder import value_of
from tests.server.tools.samples import read

TEXT, NOTHING, WHOLE = {"type": "string"}, {"type": "null"}, {"type": "integer"}
OPTIONAL = {"anyOf": [TEXT, NOTHING]}
DEFS = {
    "Text": TEXT,
    "a/b~c": TEXT,
    "Size": {"enum": ["1", "2"]},
    "Again": {"$ref": "#/$defs/Again"},
    "Twice": {"allOf": [{"$ref": "#/$defs/Twice"}, {"$ref": "#/$defs/Twice"}]},
    "Optional": {"oneOf": [{"$ref": "#/$defs/Text"}, NOTHING]},
}
AS_THEY_ARE = [  # texts that stay texts
    ("12345", OPTIONAL),
    ("12345", {"oneOf": [NOTHING, TEXT]}),
    ("12345", {"type": ["string", "null"]}),
    ("12345", {"type": "string", "nullable": True}),
    ("true", OPTIONAL),
    ("True", OPTIONAL),
    ("None", OPTIONAL),
    ("1.0", {"enum": ["1.0", "2.0"]}),
    ("1", {"const": "1"}),
    ("true", {"enum": ["true", "false"]}),
    ("123", {"$ref": "#/$defs/Text"}),
    ("123", {"$ref": "#/$defs/a~1b~0c"}),
    ("1", {"$ref": "#/$defs/Size"}),
    ("123", {"$ref": "#/$defs/Optional"}),
    ('{"a": 1}', {"allOf": [TEXT]}),
    ('"quoted"', TEXT),
    ('"quoted"', OPTIONAL),
    ("[1, 2]", {"anyOf": [TEXT, {"type": "object"}]}),
    ("null", TEXT),
    ("1e400", {"type": "number"}),
    ("NaN", {"type": "number"}),
    ("plain", {"anyOf": [WHOLE, NOTHING]}),
]
READ = [  # and what JSON makes of others
    ("12345", {"anyOf": [WHOLE, TEXT]}, 12345),
    ("null", OPTIONAL, None),
    ("null", {"type": "string", "nullable": True}, None),
    ("5", WHOLE, 5),
    ("5", {"type": ["number", "null"]}, 5),
    ("True", {"type": "boolean"}, True),
    ("FALSE", {"anyOf": [{"type": "boolean"}, NOTHING]}, False),
    ("None", {"anyOf": [WHOLE, NOTHING]}, None),
    ("2", {"enum": [1, 2]}, 2),
    ("1", {"const": 1}, 1),
    ('"a"', {"enum": ["a", "b"]}, "a"),
    ('{"a": 1}', {"anyOf": [TEXT, {"type": "object"}]}, {"a": 1}),
    ("[1]", {"allOf": [{"type": "array"}]}, [1]),
    ("{'a': [1, None]}", {"type": "object"}, {"a": [1, None]}),
    ("['a', True]", {"type": "array"}, ["a", True]),
    ("{1, 2}", {"type": "array"}, "{1, 2}"),
    ("7", {}, 7),
    ("7", {"description": "anything"}, 7),
    ('"a"', {}, "a"),
    ("True", {}, True),
    ("3", {"$ref": "#/$defs/Again"}, 3),
    ("3", {"$ref": "#/$defs/Twice"}, 3),
    ("3", {"$ref": "#/nowhere"}, 3),
    ("3", {"$ref": "https://example.org/schema"}, 3),
]
ALL = [(text, schema, text) for text, schema in AS_THEY_ARE] + READ


@pytest.mark.parametrize(("text", "schema", "value"), ALL, ids=lambda given: json.dumps(given)[:60])
@pytest.mark.parametrize("size", [10_000, 1])
def test_the_schema_decides_in_whole_answers_and_in_streams(text, schema, value, size):
    tool = Tool(name="put", parameters={"type": "object", "properties": {"x": schema}, "$defs": DEFS})
    answer = f"<tool_call>\n<function=put>\n<parameter=x>\n{text}\n</parameter>\n</function>\n</tool_call>"
    pieces = [answer[at : at + size] for at in range(0, len(answer), size)]

    _, [(name, arguments)] = read("qwen3_coder", pieces, [tool])

    assert (name, json.loads(arguments)) == ("put", {"x": value})
    assert type(json.loads(arguments)["x"]) is type(value)


@pytest.mark.parametrize(
    "parameters",
    [
        {"$ref": "#/$defs/Arguments", "$defs": {"Arguments": {"properties": {"x": TEXT}}}},
        {"allOf": [{"properties": {"y": WHOLE}}, {"properties": {"x": TEXT}}]},
        {"anyOf": [{"properties": {"x": OPTIONAL}}]},
        {"properties": {"x": {"description": "a word"}}, "allOf": [{"properties": {"x": TEXT}}]},
        {"oneOf": [{"properties": {"x": {"const": "list"}}}, {"properties": {"x": TEXT}}]},
        {"additionalProperties": TEXT},
        {"properties": {"y": WHOLE}, "additionalProperties": OPTIONAL},
    ],
)
def test_a_parameter_is_found_wherever_the_schema_says_it(parameters):
    assert value_of("12345", "x", parameters) == "12345"


def test_odd_schemas_let_anything_pass():
    for schema in (
        True,
        None,
        3,
        {"type": "float"},
        {"type": 3},
        {"anyOf": []},
        {"enum": "12"},
        {"allOf": {}},
    ):
        assert value_of("12", "x", {"properties": {"x": schema}}) in (12, "12")
    assert value_of("12", "x", {"properties": [1]}) == 12
