"""Forced calls: whatever a grammar lets through is read back as calls that fit their tools."""

import json
import random

import jsonschema
import pytest
from llguidance import LLMatcher, LLTokenizer

from kvq.server.tools.format import Tool
from tests.server.tools.samples import ALL, BAR, LOW, read

TOOLS = [
    Tool(
        name="get_weather",
        parameters={
            "$defs": {"unit": {"enum": ["°C", "°F"]}},
            "type": "object",
            "properties": {"unit": {"$ref": "#/$defs/unit"}, "days": {"type": "integer", "maximum": 99}},
            "required": ["unit"],
        },
    ),
    Tool(
        name="now",
        parameters={"properties": {"zone": {"enum": [None, True, 'a"}]', "x"]}}, "required": ["zone"]},
    ),
    Tool(name="ping"),
]
TEMPLATES = [
    ("hermes", ""),
    ("llama3_json", ""),
    ("mistral", "[TOOL_CALLS] ["),
    ("mistral", "[TOOL_CALLS]["),
    ("mistral", "[TOOL_CALLS] + name + [ARGS]"),
    ("mistral", "[TOOL_CALLS] + name + [CALL_ID] + id + [ARGS]"),
    ("deepseek_v3", "```json"),
    ("deepseek_v3", ""),
    ("plain", ""),
]


@pytest.fixture(scope="module", params=[False, True], ids=["plain markers", "special markers"])
def vocabulary(request, tiny):
    """(tokenizer for grammars, decode, special tokens by their text)"""
    import copy

    tokenizer = copy.deepcopy(tiny.tokenizer)
    markers = (
        sorted({marker for format in ALL.values() for marker in format.markers}) if request.param else []
    )
    tokenizer.add_special_tokens({"extra_special_tokens": markers})
    special = {marker: tokenizer.convert_tokens_to_ids(marker) for marker in markers}
    backend = LLTokenizer(tokenizer.backend_tokenizer.to_str(), n_vocab=len(tokenizer))
    return backend, tokenizer.decode, special


def written(vocabulary, grammar, rng):
    """A text that the grammar lets through, drawn at random."""
    backend, decode, _ = vocabulary
    matcher = LLMatcher(backend, LLMatcher.grammar_from_lark(grammar))
    tokens = []
    while not matcher.is_stopped():
        assert not matcher.get_error()
        mask = matcher.compute_bitmask()
        allowed = [i for i in range(backend.vocab_size) if mask[i >> 3] >> (i & 7) & 1]
        token = rng.choice(allowed)
        if token == backend.eos_token:
            break
        matcher.consume_token(token)
        tokens.append(token)
    return decode(tokens)


@pytest.mark.parametrize(("name", "template"), TEMPLATES)
def test_what_a_grammar_lets_through_are_calls_that_fit(vocabulary, name, template):
    tools = {tool.name: tool for tool in TOOLS}
    for seed in range(6):
        most = 1 if seed % 2 else 3
        grammar = ALL[name].grammar(TOOLS, most, template=template, special=vocabulary[2])
        text = written(vocabulary, grammar, random.Random(seed))
        shown, calls = read(name, text, TOOLS)
        assert shown == ""
        assert 1 <= len(calls) <= most
        for called, arguments in calls:
            jsonschema.validate(json.loads(arguments), dict(tools[called].parameters))


def test_forced_calls_are_spelled_as_the_model_spells_them(vocabulary):
    def text(name, template):
        grammar = ALL[name].grammar([Tool(name="f")], 1, template=template, special=vocabulary[2])
        return written(vocabulary, grammar, random.Random(0))

    assert text("hermes", "") == '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    assert text("llama3_json", "") == '{"name": "f", "parameters": {}}'
    assert text("mistral", "[TOOL_CALLS] [") == '[TOOL_CALLS] [{"name": "f", "arguments": {}}]'
    assert text("mistral", "[ARGS]") == "[TOOL_CALLS]f[ARGS]{}"
    begin, sep, end = (f"<{BAR}tool{LOW}{word}{BAR}>" for word in (f"call{LOW}begin", "sep", f"call{LOW}end"))
    assert begin + "function" + sep + "f\n```json\n{}\n```" + end in text("deepseek_v3", "```json")
    assert begin + "f" + sep + "{}" + end in text("deepseek_v3", "")


def test_a_schema_may_not_switch_checks_off(vocabulary):
    tool = Tool(name="f", parameters={"x-guidance": {"lenient": True}, "properties": {"a": {"not": {}}}})
    grammar = ALL["plain"].grammar([tool], 1, special={})
    assert LLMatcher(vocabulary[0], LLMatcher.grammar_from_lark(grammar)).get_error()
