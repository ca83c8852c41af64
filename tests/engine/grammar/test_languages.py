"""Grammars in Lark and in GBNF, and refusals that name place and remedy."""

import pytest

from kvq.engine.grammar.compiler import check_structured
from kvq.engine.params import StructuredOutput
from kvq.errors import RequestError

JSON = r"""
# llama.cpp's grammar of JSON, in part
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::=
  "{" ws ( string ":" ws value ("," ws string ":" ws value)* )? "}" ws
array  ::=
  "[" ws ( value ("," ws value)* )? "]" ws
string ::= "\"" ( [^"\\\x7F\x00-\x1F] )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ws
ws ::= | " " | "\n" [ \t]{0,20}
"""


@pytest.mark.parametrize(
    "grammar",
    ['start: "a" | "b"', 'root ::= "a" | "b"', JSON, r'root ::= [a-z\u00e9]+ "\x41"', 'start: "a ::= b"'],
    ids=["Lark", "GBNF", "JSON", "escapes", "Lark with its sign"],
)
def test_both_languages_are_taken(grammar):
    check_structured(StructuredOutput(lark=grammar))


@pytest.mark.parametrize("grammar", ["root = yes", "start: nobody", "hello", 'root ::= "a'])
def test_what_is_neither_is_told_which_are_read(grammar):
    with pytest.raises(RequestError, match=r"Lark|GBNF"):
        check_structured(StructuredOutput(lark=grammar))


def within(schema):
    return {"type": "object", "properties": {"a": {"type": "null"}, "x": {"type": "array", "items": schema}}}


@pytest.mark.parametrize(
    ("schema", "remedy"),
    [
        ({"oneOf": [{"type": "number"}, {"type": "integer"}]}, "anyOf"),
        ({"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}, "leave them out"),
        ({"type": "number", "minimum": -1e30, "maximum": 1e30}, "leave them out"),
        ({"not": {"type": "string"}}, r"\[.not.\] can't be enforced here; leave them out"),
        ({"if": {}, "then": {}}, "leave them out"),
        ({"type": "string", "pattern": "(?=a)b"}, "look around"),
        ({"type": "strin"}, "Invalid type"),
    ],
)
def test_a_refused_schema_names_the_place_and_what_to_do(schema, remedy):
    with pytest.raises(RequestError, match=f"json_schema at #/properties/x/items: .*{remedy}") as refused:
        check_structured(StructuredOutput(json_schema=within(schema)))
    assert "coerce_one_of" not in str(refused.value)
    assert "Some(" not in str(refused.value)
    referring = {"$ref": "#/$defs/T", "$defs": {"T": {"anyOf": [{"type": "null"}, schema]}}}
    with pytest.raises(RequestError, match="json_schema at #/\\$defs/T/anyOf/1"):
        check_structured(StructuredOutput(json_schema=referring))


@pytest.mark.parametrize("name", ["byte", "int32", "regex", "idn-email", "my own"])
def test_formats_that_nobody_knows_are_annotations(name):
    check_structured(StructuredOutput(json_schema=within({"type": "string", "format": name})))
    kept = {"type": "object", "properties": {"format": {"const": {"format": name}}}, "required": ["format"]}
    check_structured(StructuredOutput(json_schema=kept))
