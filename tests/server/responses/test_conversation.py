"""Items of a conversation as the messages of a chat, and bodies as those of chats."""

import pytest

from kvq.server.http.ignored import find_ignored
from kvq.server.responses.bodies import ResponsesBody
from kvq.server.responses.conversation import chat_body

USER = {"role": "user", "content": "a"}
CALL = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
RESULT = {"type": "function_call_output", "call_id": "1", "output": "b"}
THOUGHT = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]}
ANSWER = {
    "type": "message",
    "role": "assistant",
    "content": [{"type": "output_text", "text": "c"}, {"type": "output_text", "text": "d"}],
}
TOLD = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def messages(items, **fields):
    body = ResponsesBody.model_validate({"input": items} | fields)
    given = chat_body(body).model_dump(exclude_none=True)
    return [{k: v for k, v in message.items() if k != "type"} for message in given["messages"]]


@pytest.mark.parametrize(
    ("items", "expected"),
    [
        ([USER, {"type": "message", **USER, "role": "developer"}], [USER, USER | {"role": "developer"}]),
        (
            [USER, THOUGHT, CALL, RESULT, ANSWER, USER],
            [
                USER,
                {"role": "assistant", "tool_calls": [TOLD], "reasoning_content": "Hm."},
                {"role": "tool", "tool_call_id": "1", "content": "b"},
                {"role": "assistant", "content": "cd"},
                USER,
            ],
        ),
        (
            [ANSWER, CALL, CALL | {"call_id": "2"}, ANSWER],
            [{"role": "assistant", "content": "cd\n\ncd", "tool_calls": [TOLD, TOLD | {"id": "2"}]}],
        ),
        ([USER, THOUGHT, USER], [USER, USER]),
        (
            [THOUGHT | {"content": None, "summary": [{"type": "summary_text", "text": "s"}]}, ANSWER],
            [{"role": "assistant", "content": "cd", "reasoning_content": "s"}],
        ),
        (
            [RESULT | {"output": [{"type": "input_text", "text": "x"}, {"type": "input_text", "text": "y"}]}],
            [{"role": "tool", "tool_call_id": "1", "content": "xy"}],
        ),
    ],
)
def test_items_become_messages(items, expected):
    assert messages(items) == expected


def test_instructions_come_first():
    assert messages([USER], instructions="Be kind.") == [{"role": "system", "content": "Be kind."}, USER]


def test_parameters_become_those_of_the_chat():
    schema = {"type": "object", "properties": {}}
    chat = chat_body(
        ResponsesBody.model_validate(
            {
                "model": "tiny",
                "input": [USER],
                "max_output_tokens": 7,
                "temperature": 0.5,
                "top_k": 3,
                "seed": 4,
                "stop": ["x"],
                "cache_salt": "s",
                "session_id": "t",
                "kv_retain": 5,
                "kv_format": "int4",
                "priority": "batch",
                "tools": [{"type": "function", "name": "f", "parameters": schema, "strict": True}],
                "tool_choice": {"type": "function", "name": "f"},
                "parallel_tool_calls": False,
                "text": {"format": {"type": "json_schema", "name": "a", "schema": schema, "strict": True}},
                "reasoning": {"effort": "low", "summary": "auto"},
                "metadata": {"a": "b"},
                "user": "someone",
            }
        )
    )
    assert (chat.model, chat.max_completion_tokens, chat.temperature, chat.top_k) == ("tiny", 7, 0.5, 3)
    assert (chat.seed, chat.stop, chat.cache_salt, chat.session_id) == (4, ["x"], "s", "t")
    assert (chat.kv_retain, chat.kv_format, chat.priority) == (5, "int4", "batch")
    [tool] = chat.tools
    assert tool.model_dump(exclude_none=True)["function"] == {"name": "f", "parameters": schema}
    assert chat.tool_choice.function.name == "f"
    assert chat.parallel_tool_calls is False
    assert chat.response_format.json_schema.definition == schema
    assert (chat.reasoning_effort, chat.chat_template_kwargs) == ("low", None)


def test_without_effort_the_template_is_told_not_to_think():
    chat = chat_body(ResponsesBody.model_validate({"input": [USER], "reasoning": {"effort": "none"}}))
    assert (chat.reasoning_effort, chat.chat_template_kwargs) == (None, {"enable_thinking": False})


@pytest.mark.parametrize(
    ("given", "expected", "is_label"),
    [
        ({"input": "a", "max_tool_calls": 1, "background": False}, ["max_tool_calls", "background"], True),
        ({"input": [ANSWER | {"id": "1", "status": "completed"}]}, ["id", "status"], True),
        ({"input": [ANSWER | {"x": 1}]}, ["x"], False),
        ({"input": [CALL | {"parsed_arguments": {}}]}, ["parsed_arguments"], True),
        ({"input": [THOUGHT | {"encrypted_content": "x"}]}, ["encrypted_content"], True),
        ({"input": "a", "max_tokens": 5}, ["max_tokens"], False),
        ({"input": "a", "text": {"verbosity": "low"}}, ["text.verbosity"], False),
        ({"input": "a", "reasoning": {"summary": "auto"}, "store": None}, ["reasoning.summary"], True),
    ],
)
def test_other_fields_are_named(given, expected, is_label):
    names, unknown = find_ignored(given, ResponsesBody.model_validate(given))
    assert [name.removeprefix("input.0.") for name in names] == expected
    assert (unknown is None) == is_label
