"""Tool calls as the official `openai` client sees them."""

import json
from pathlib import Path

import jsonschema
import openai
import pytest

import kvq
from tests.server.kit import Server
from tests.waiting import HANG_S

OPTIONS = ("--kv", "int4", "--num-blocks", "128", "--max-num-seqs", "16")
CITIES = ["Rome", "Óslo"]
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"enum": CITIES},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
}
WEATHER = {
    "type": "function",
    "function": {"name": "get_weather", "description": "x", "parameters": SCHEMA},
}
NOW = {"type": "function", "function": {"name": "now"}}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome", "days": 3}}\n</tool_call>'
ASK = {"model": "tiny", "messages": [{"role": "user", "content": "Weather?"}], "tools": [WEATHER, NOW]}
ASK |= {"max_tokens": 200}


@pytest.fixture(scope="module")
def client(common_server):
    return openai.OpenAI(base_url=common_server.url + "/v1", api_key="none", max_retries=0, timeout=HANG_S)


def literally(text):
    """The model has to write this."""
    return {"extra_body": {"guided_choice": [text]}}


def streamed(client, **options):
    """The final completion as the client puts it together."""
    with client.chat.completions.stream(**options) as stream:
        for _ in stream:
            pass
        return stream.get_final_completion()


def calls_of(choice):
    return [
        (call.function.name, json.loads(call.function.arguments)) for call in choice.message.tool_calls or ()
    ]


def same(one, other):
    """Equal but for the ids of calls."""
    for a, b in zip(one.choices, other.choices, strict=True):
        assert a.message.content == b.message.content
        assert a.finish_reason == b.finish_reason
        assert [(c.type, c.function.name, c.function.arguments) for c in a.message.tool_calls or ()] == [
            (c.type, c.function.name, c.function.arguments) for c in b.message.tool_calls or ()
        ]
    assert one.usage == other.usage or other.usage is None


def test_a_call_comes_as_one(client):
    options = ASK | literally(CALL)
    answer = client.chat.completions.create(**options)
    [choice] = answer.choices
    assert calls_of(choice) == [("get_weather", {"city": "Rome", "days": 3})]
    assert choice.message.content is None
    assert choice.finish_reason == "tool_calls"
    [call] = choice.message.tool_calls
    assert call.id.startswith("call_")
    same(answer, streamed(client, **options))


def test_text_and_two_calls(client):
    other = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
    options = ASK | literally(f"I'll see.\n{CALL}\n{other}")
    answer = client.chat.completions.create(**options)
    [choice] = answer.choices
    assert choice.message.content == "I'll see."
    assert calls_of(choice) == [("get_weather", {"city": "Rome", "days": 3}), ("now", {})]
    same(answer, streamed(client, **options))
    options["parallel_tool_calls"] = False
    answer = client.chat.completions.create(**options)
    assert len(calls_of(answer.choices[0])) == 1
    same(answer, streamed(client, **options))


def test_deltas_name_a_call_once_and_show_no_marker(client):
    deltas = [
        chunk.choices[0].delta
        for chunk in client.chat.completions.create(**ASK, **literally(CALL), stream=True)
    ]
    assert deltas[0].role == "assistant"
    assert not any(delta.content for delta in deltas)
    calls = [call for delta in deltas for call in delta.tool_calls or ()]
    assert [call.function.name for call in calls if call.function.name] == ["get_weather"]
    assert [call.id for call in calls if call.id] == [calls[0].id]
    assert {call.index for call in calls} == {0}
    assert len(calls) > 5, "arguments grow"
    assert json.loads("".join(call.function.arguments or "" for call in calls))["days"] == 3


@pytest.mark.parametrize("text", ["No tools.", "<tool_call>oops</tool_call>", CALL[:30]])
def test_what_is_no_call_is_content(client, text):
    answer = client.chat.completions.create(**ASK, **literally(text))
    assert answer.choices[0].message.content == text
    assert answer.choices[0].message.tool_calls is None
    assert answer.choices[0].finish_reason == "stop"
    same(answer, streamed(client, **ASK, **literally(text)))


def test_a_required_call_fits_a_tool(client):
    options = ASK | {"tool_choice": "required", "parallel_tool_calls": False, "temperature": 1.0, "seed": 3}
    answer = client.chat.completions.create(**options, n=2)
    for choice in answer.choices:
        [(name, arguments)] = calls_of(choice)
        assert choice.message.content is None
        assert choice.finish_reason == "tool_calls"
        jsonschema.validate(arguments, {"get_weather": SCHEMA, "now": {"maxProperties": 0}}[name])
    same(answer, streamed(client, **options, n=2))


def test_several_required_calls(client):
    answer = client.chat.completions.create(**ASK, tool_choice="required")
    [choice] = answer.choices
    assert len(choice.message.tool_calls) > 1, "this model goes on"
    assert choice.message.content is None
    assert choice.finish_reason == "length"
    first = choice.message.tool_calls[0].function
    jsonschema.validate(json.loads(first.arguments), {"get_weather": SCHEMA, "now": {}}[first.name])


def test_a_named_tool_is_called_once(client):
    choice = {"type": "function", "function": {"name": "get_weather"}}
    for seed in range(3):
        options = ASK | {"tool_choice": choice, "temperature": 1.0, "seed": seed}
        answer = client.chat.completions.create(**options)
        [(name, arguments)] = calls_of(answer.choices[0])
        assert name == "get_weather"
        jsonschema.validate(arguments, SCHEMA)
        same(answer, streamed(client, **options))


def test_a_call_that_breaks_off_has_no_other_reason(client):
    options = ASK | {"tool_choice": "required", "max_tokens": 25}
    answer = client.chat.completions.create(**options)
    assert answer.choices[0].finish_reason == "length"


def test_choice_none_reads_no_calls(client):
    answer = client.chat.completions.create(**ASK, **literally(CALL), tool_choice="none")
    assert answer.choices[0].message.content == CALL
    assert answer.choices[0].message.tool_calls is None
    assert answer.choices[0].finish_reason == "stop"
    closed = SCHEMA | {"additionalProperties": False}
    format = {"type": "json_schema", "json_schema": {"name": "x", "schema": closed}}
    answer = client.chat.completions.create(**ASK, tool_choice="none", response_format=format)
    jsonschema.validate(json.loads(answer.choices[0].message.content), SCHEMA)


def test_a_conversation_goes_on_after_a_call(client):
    call = client.chat.completions.create(**ASK, **literally(CALL)).choices[0].message
    result = {"role": "tool", "tool_call_id": call.tool_calls[0].id, "content": "sunny"}
    options = ASK | {"messages": [*ASK["messages"], call, result], "max_tokens": 5}
    assert client.chat.completions.create(**options).choices[0].message.content


WRONG = {
    "tool_choice needs tools": {"tools": None, "tool_choice": "required"},
    "names no tool": {"tool_choice": {"type": "function", "function": {"name": "other"}}},
    "same name": {"tools": [NOW, NOW]},
    "tools.0.function.name": {"tools": [{"type": "function", "function": {"name": "a b"}}]},
    "tools.0.type": {"tools": [{"type": "retrieval"}]},
    'has to be "object"': {
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "string"}}}]
    },
    "tools: List should have at most": {"tools": [NOW] * 129},
    "exclude each other": {"response_format": {"type": "json_object"}},
    "structured output of another kind": {"tool_choice": "required", **literally("x")},
    "tool_choice": {"tool_choice": "sometimes"},
}


@pytest.mark.parametrize("message", WRONG)
def test_what_cannot_be_honoured_is_refused(client, message):
    options = {name: value for name, value in (ASK | WRONG[message]).items() if value is not None}
    with pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(**options)
    assert message in error.value.body["message"]


TEMPLATE = """{%- for m in messages %}<|{{ m.role }}|>
{%- if m.tool_calls is defined %}
{%- for call in m.tool_calls %}[TOOL_CALLS]{{ call.function.name }}[ARGS]
{%- for key, value in call.function.arguments | items %}{{ key }}={{ value }};{% endfor %}
{%- endfor %}{% else %}{{ m.content }}{% endif %}
{%- endfor %}
{%- if tools %}[{{ tools | map(attribute='function.name') | join(',') }}]{% endif %}<|assistant|>"""


@pytest.fixture(scope="module")
def mistral(tmp_path_factory):
    """The tiny model, with special tokens for calls and a template that says so."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = tmp_path_factory.mktemp("mistral")
    source = Path(kvq.__file__).parent / "models" / "tiny"
    tokenizer = AutoTokenizer.from_pretrained(source)
    tokenizer.add_special_tokens({"extra_special_tokens": ["[TOOL_CALLS]", "[ARGS]", "<pad>"]})
    tokenizer.chat_template = TEMPLATE
    model = AutoModelForCausalLM.from_pretrained(source)
    model.resize_token_embeddings(len(tokenizer))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.long  # a server of its own
def test_markers_that_are_special_tokens(mistral):
    marks = kvq.load(str(mistral)).tokenizer.convert_tokens_to_ids(["[TOOL_CALLS]", "[ARGS]", "<pad>"])
    with Server(*OPTIONS, model=str(mistral)) as server:
        client = openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=HANG_S)
        calls, arguments, pad = (f"<[{mark}]>" for mark in marks)
        grammar = f"""start: "So: " {pad} {calls} "now" {arguments} "{{}}" """
        options = ASK | {"model": mistral.name, "extra_body": {"guided_grammar": grammar}}
        answer = client.chat.completions.create(**options)
        assert answer.choices[0].message.content == "So:"
        assert calls_of(answer.choices[0]) == [("now", {})]
        same(answer, streamed(client, **options))
        answer = client.chat.completions.create(**options, tool_choice="none")
        assert answer.choices[0].message.content == "So: now{}", "without tools they are left out as ever"

        options = ASK | {"model": mistral.name, "tool_choice": "required", "parallel_tool_calls": False}
        call = client.chat.completions.create(**options).choices[0].message
        assert len(call.tool_calls) == 1
        result = {"role": "tool", "tool_call_id": call.tool_calls[0].id, "content": "sunny"}
        for arguments in ('{"city": "Rome"}', ""):
            call.tool_calls[0].function.arguments = arguments
            options = ASK | {
                "model": mistral.name,
                "messages": [*ASK["messages"], call, result],
                "max_tokens": 5,
            }
            client.chat.completions.create(**options)  # the template takes objects only
        assert "tool calls: mistral, by the model's chat template" in server.log
