"""Logs of agents' sessions: every form becomes the same conversation, and no line is lost or raises."""

import copy
import json
import random
import time

import pytest

from kvq import strict_json
from kvq.errors import ConfigError
from kvq.server.admission.bodies import ChatBody
from kvq.server.anthropic.bodies import PromptBody
from kvq.server.anthropic.prompt import conversation
from kvq.traces import reading
from kvq.traces.reading import read_log

MARK = "zq"  # in every text of a session, and in no reason
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
ARGUMENTS = '{"city": "Oslo zq", "zq": [1, null, {"a": 0.5}]}'
CHAT_TOOL = {
    "type": "function",
    "function": {"name": "weather", "description": "zq tells", "parameters": SCHEMA},
}


def chat_messages(n=""):
    """A conversation with two calls at once, as OpenAI's chat protocol has it."""
    calls = [
        {"id": f"call_{i}", "type": "function", "function": {"name": "weather", "arguments": ARGUMENTS}}
        for i in "ab"
    ]
    return [
        {"role": "system", "content": "You are zq"},
        {"role": "user", "content": f"Weather zq {n}"},
        {"role": "assistant", "content": "I look zq", "tool_calls": calls},
        {"role": "tool", "content": "sun zq", "tool_call_id": "call_a"},
        {"role": "tool", "content": "rain zq", "tool_call_id": "call_b"},
        {"role": "assistant", "content": f"Both zq {n}"},
    ]


def openai(n=""):
    *messages, answer = chat_messages(n)
    given = copy.deepcopy(messages)
    given[1]["content"] = [{"type": "text", "text": "Weather zq "}, {"type": "text", "text": f"{n}"}]
    message = answer | {"refusal": None, "annotations": [], "audio": None, "tool_calls": None}
    response = {"object": "chat.completion", "choices": [{"index": 0, "message": message, "logprobs": None}]}
    return {"model": "m", "messages": given, "tools": [CHAT_TOOL], "response": response}


def responses(n=""):
    function = CHAT_TOOL["function"]
    return {
        "instructions": "You are zq",
        "tools": [{"type": "function", "strict": True, **function}, {"type": "web_search"}],
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": f"Weather zq {n}"}]},
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "zq"}]},
            {"type": "web_search_call", "status": "completed"},
            {
                "type": "message",
                "role": "assistant",
                "content": [{"type": "output_text", "text": "I look zq"}],
            },
            *(
                {"type": "function_call", "call_id": f"call_{i}", "name": "weather", "arguments": ARGUMENTS}
                for i in "ab"
            ),
            {"type": "function_call_output", "call_id": "call_a", "output": "sun zq"},
            {
                "type": "function_call_output",
                "call_id": "call_b",
                "output": [{"type": "input_text", "text": "rain zq"}],
            },
        ],
        "output": [
            {"type": "reasoning", "summary": []},
            {
                "type": "message",
                "role": "assistant",
                "content": [{"type": "output_text", "text": f"Both zq {n}"}],
            },
        ],
    }


def anthropic(n=""):
    function = CHAT_TOOL["function"]
    tool = {"name": "weather", "description": function["description"], "input_schema": SCHEMA}
    uses = [
        {"type": "tool_use", "id": f"call_{i}", "name": "weather", "input": json.loads(ARGUMENTS)}
        for i in "ab"
    ]
    results = [
        {"type": "tool_result", "tool_use_id": "call_a", "content": "sun zq"},
        {
            "type": "tool_result",
            "tool_use_id": "call_b",
            "content": [{"type": "text", "text": "rain zq"}],
            "is_error": True,
        },
    ]
    thinking = {"type": "thinking", "thinking": "zq", "signature": "zq"}
    return {
        "system": [{"type": "text", "text": "You are zq", "cache_control": {"type": "ephemeral"}}],
        "tools": [tool, {"type": "web_search_20250305", "name": "web_search"}],
        "messages": [
            {"role": "user", "content": f"Weather zq {n}"},
            {"role": "assistant", "content": [thinking, {"type": "text", "text": "I look zq"}, *uses]},
            {"role": "user", "content": results},
        ],
        "response": {
            "type": "message",
            "role": "assistant",
            "content": [thinking, {"type": "text", "text": f"Both zq {n}"}],
        },
    }


def recording(n=""):
    given = openai(n)
    response = given.pop("response")
    return {"kvq_recording": 1, "session": f"s{n}", "request": given, "response": response}


DIALECTS = {"openai": openai, "responses": responses, "anthropic": anthropic, "recording": recording}


def plain(messages):
    return [{key: value for key, value in one.items() if key != "name"} for one in messages]


@pytest.fixture
def read(tmp_path):
    """Return what a file of these records holds; bytes are lines as they are."""

    def read(*records, between=b"\n"):
        lines = [one if isinstance(one, bytes) else json.dumps(one).encode() for one in records]
        path = tmp_path / "log.jsonl"
        path.write_bytes(between.join(lines))
        return read_log(path)

    return read


@pytest.mark.parametrize("dialect", DIALECTS)
def test_each_protocol_becomes_the_same_chat(read, dialect):
    [session] = read(DIALECTS[dialect]()).sessions

    assert plain(session.messages) == chat_messages()
    assert list(session.tools) == [CHAT_TOOL]
    assert list(session.answers()) == [2, 5]
    assert session.name == ("s" if dialect == "recording" else "line 1")
    assert not session.is_checked
    ChatBody.model_validate({"messages": session.messages, "tools": session.tools})


def test_anthropic_is_read_as_the_server_reads_it(read):
    given = anthropic()
    turn = {
        "role": "user",
        "content": [{"type": "text", "text": "more"}, {"type": "text", "text": " and more"}],
    }
    given["messages"] += [turn, turn]

    [session] = read(given).sessions

    body = PromptBody.model_validate({"model": "m", **given, "tools": []})
    messages = [message.model_dump(exclude_none=True) for message in conversation(body)[0]]
    for message in messages:
        message.pop("reasoning_content", None)
    assert session.messages[:-1] == messages


ANSWER = {"role": "assistant", "content": "Hi"}
HI = [{"role": "user", "content": "Hello"}, ANSWER]


@pytest.mark.parametrize(
    "record",
    [
        {"messages": HI},
        {"messages": HI[:1], "response": {"choices": [{"message": ANSWER}, {"message": {"content": "No"}}]}},
        {"messages": HI[:1], "response": {"status_code": 200, "body": {"choices": [{"message": ANSWER}]}}},
        {"messages": HI[:1], "choices": [{"message": ANSWER}]},
        {"messages": HI[:1], "completion": ANSWER},
        {"messages": HI[:1], "output": "Hi"},
        {"messages": HI[:1], "response": {"message": ANSWER}},
        {"messages": HI[:1], "content": [{"type": "text", "text": "Hi"}]},
        {
            "messages": HI[:1],
            "response": {"content": [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]},
        },
        {"request": {"messages": HI[:1]}, "response": {"choices": [{"message": ANSWER}]}},
        {"request_body": {"messages": HI[:1]}, "response_body": {"choices": [{"message": ANSWER}]}},
        {"body": {"messages": HI[:1]}, "response": {"body": {"choices": [{"message": ANSWER}]}}},
        {"request": {"body": {"messages": HI[:1]}}, "response": {"body": {"choices": [{"message": ANSWER}]}}},
        {"input": {"messages": HI[:1]}, "output": ANSWER},
        {"messages": None, "input": {"messages": HI[:1]}, "output": ANSWER},
        {"input": HI[:1], "output": ANSWER},
        {"input": "Hello", "output": [{"type": "message", **ANSWER}]},
        {"request": {"input": "Hello"}, "response": {"output": [ANSWER]}},
        {
            "request": {"system": "", "messages": HI[:1]},
            "response": {"content": [{"type": "text", "text": "Hi"}]},
        },
        {"messages": [HI[0], {"role": "assistant", "content": None, "refusal": "Hi"}]},
    ],
)
def test_answers_are_found_where_tools_put_them(read, record):
    [session] = read(record).sessions

    assert session.messages == HI


def test_turns_of_one_session_are_one_and_the_longest(read):
    grown = [{"messages": chat_messages()[:length]} for length in (2, 3, 4, 6)]
    fork = [*chat_messages()[:5], {"role": "assistant", "content": "Other"}]

    log = read(grown[0], {"messages": HI}, *grown[1:], {"messages": fork}, grown[2])

    assert [session.name for session in log.sessions] == ["line 2", "line 5", "line 6", "line 7"]
    assert [len(session.messages) for session in log.sessions] == [2, 6, 6, 4]
    assert log.refused == []


def test_the_answer_in_one_record_is_the_message_in_the_next(read):
    first = anthropic()
    second = copy.deepcopy(first)
    second["messages"] += [
        {"role": "assistant", "content": first["response"]["content"]},
        {"role": "user", "content": "And now?"},
    ]

    [session] = read(first, second).sessions

    assert len(session.messages) == 8


def test_sessions_of_different_ids_stay_apart_and_names_are_unique(read):
    one = {"messages": HI}
    more = {"messages": [*HI, *HI]}
    other = {"messages": [{"role": "user", "content": "Other"}, ANSWER]}

    log = read(
        {"session_id": "a", **one},
        {"metadata": {"sessionId": "b"}, **more},
        {"session_id": "a", **other},
        {"request": {**other, "conversation": {"id": "c"}}},
        {"trace_id": 7, **one},
        {"session_id": "x" * 999, **one},
    )

    assert [session.name for session in log.sessions] == ["a", "b", "a (2)", "c", "7", "line 6"]


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        (b"{", "JSON"),
        (b"17", "has to be an object, it is a number"),
        (b'[{"messages": []}]x', "JSON"),
        (b'{"messages": [], "messages": []}', "a name is twice in one object"),
        (b'{"messages": NaN}', "numbers must be finite"),
        (b'{"messages": 1e999}', "numbers must be finite"),
        (b'{"messages": %s}' % (b"9" * 30), "integers may have 64 bits"),
        (b'{"messages": %s}' % (b"9" * 5000), "integers may have 64 bits"),
        (b'{"messages": "\xff"}', "UTF-8"),
        (b'{"messages": "\\ud800"}', "surrogate"),
        (b"[" * 10_000, "64 levels"),
        (b'{"messages":' * 10_000, "64 levels"),
        ({"prompt": "zq"}, "a prompt, as text completions"),
        ({}, "it has neither"),
        ({"messages": []}, "no message"),
        ({"messages": "zq"}, "messages has to be a list"),
        ({"messages": HI[:1]}, "no message of the assistant answers"),
        ({"messages": [ANSWER]}, "no message of the assistant answers"),
        ({"messages": {"zq": 1}}, "messages has to be a list, it is an object"),
        ({"messages": [HI, HI]}, "messages[0] has to be an object, it is a list"),
        (
            {"messages": [{"role": "zq", "content": "zq"}]},
            "messages[0].role has to be one of developer, system",
        ),
        (
            {"messages": [{"role": "user", "content": 5}]},
            "messages[0].content has to be a list, it is a number",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content[0] holds an image",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "holds audio"),
        ({"messages": [{"role": "user", "content": [{"type": "file"}]}]}, "holds a file"),
        (
            {"messages": [{"role": "user", "content": [{"type": "zq"}]}]},
            "a part of a kind that kvq does not read",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": []}]}]},
            "a part of a kind that kvq does not read",
        ),
        ({"messages": [{"role": "assistant", "function_call": {"name": "zq"}}]}, "OpenAI's old form"),
        ({"messages": HI, "functions": [{"name": "zq"}]}, "functions"),
        ({"messages": HI, "tools": [{"type": "function"}]}, "tools[0] has no name"),
        ({"input": "zq", "previous_response_id": "zq"}, "previous_response_id"),
        ({"input": [{"type": "computer_call"}]}, "messages[0] is of a kind that kvq does not read"),
        ({"messages": HI, "response": {"error": {"message": "zq"}}}, "the response is an error"),
        ({"messages": HI, "response": {"choices": []}}, "choices[0].message"),
        ({"messages": HI, "response": {"choices": [{"delta": {}}]}}, "choices[0].message"),
        ({"kvq_recording": 2, "request": {"messages": HI}}, "kvq_recording has to be 1"),
        ({"messages": HI, "response": 'data: {"choices": []}\n\ndata: [DONE]'}, "a raw stream of events"),
    ],
)
def test_refusals_name_the_line_and_what_was_found(read, record, reason):
    log = read(b"", {"messages": HI}, b"  ", record, b"")

    [session], [(line, found)] = log.sessions, log.refused
    assert (session.name, line) == ("line 2", 4)
    assert reason in found
    assert MARK not in found


@pytest.mark.parametrize("arguments", ["zq", "[1]", "{", 5, [], '{"a": 1, "a": 2}'])
def test_arguments_are_json_of_an_object(read, arguments):
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    [(_, reason)] = read(
        {"messages": HI}, {"messages": [HI[0], {"role": "assistant", "tool_calls": [call]}]}
    ).refused

    assert reason == "messages[1].tool_calls[0]: arguments of a call have to be JSON of an object"


@pytest.mark.parametrize(
    ("arguments", "text"), [({"a": "é"}, '{"a": "é"}'), ("", "{}"), (None, "{}"), ("{ }", "{ }")]
)
def test_arguments_become_json_texts(read, arguments, text):
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    [session] = read({"messages": [HI[0], {"role": "assistant", "tool_calls": [call]}]}).sessions

    assert session.messages[1] == {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": text}}],
    }


def test_arrays_marks_and_line_ends_of_other_systems_are_read(tmp_path, read):
    records = [openai(1), anthropic(2), 5, responses(3)]
    path = tmp_path / "array.json"
    path.write_bytes(b"\xef\xbb\xbf\n" + json.dumps(records, indent=1).encode())

    array = read_log(path)
    lines = read(b"\xef\xbb\xbf" + json.dumps(records[0]).encode(), *records[1:], between=b"\r\n")

    for log in (array, lines):
        assert [session.name for session in log.sessions] == ["line 1", "line 2", "line 4"]
        assert [line for line, _ in log.refused] == [3]


def test_long_lines_are_refused_without_being_decoded(read, monkeypatch):
    monkeypatch.setattr(reading, "_MAX_LINE", 1 << 20)
    decoded, loads = [], strict_json.loads

    def counting(raw):
        decoded.append(len(raw))
        return loads(raw)

    monkeypatch.setattr(strict_json, "loads", counting)
    long = {"messages": [{"role": "user", "content": "zq" * (1 << 20)}, ANSWER]}

    log = read(long, {"messages": HI}, long)

    assert log.refused == [
        (1, "a line may have 1 MiB, it has more"),
        (3, "a line may have 1 MiB, it has more"),
    ]
    assert max(decoded) < 1000
    assert log.sessions[0].name == "line 2"


def test_files_without_a_session_say_why(tmp_path, read):
    with pytest.raises(ConfigError, match=r"nowhere\.jsonl can't be read: No such file"):
        read_log(tmp_path / "nowhere.jsonl")
    with pytest.raises(ConfigError, match=r"can't be read: Is a directory"):
        read_log(tmp_path)
    with pytest.raises(ConfigError, match=r"log\.jsonl holds no session: it is empty"):
        read(b"\n\n")
    with pytest.raises(
        ConfigError, match=r"4 lines can't be used: line 1: .*; line 3: .*; line 4: [^;]*;[^;]*$"
    ):
        read({"prompt": "zq"}, b"", {}, {}, {})


def test_hundreds_of_lines_of_long_sessions_take_seconds(read):
    messages = [one for n in range(40) for one in chat_messages(n)[1:]]
    lines = [b", ".join(json.dumps(one).encode() for one in messages[:length]) for length in range(1, 201)]

    begin = time.process_time()
    log = read(*(b'{"session": %d, "messages": [%s]}' % (n, line) for n in range(4) for line in lines))

    assert [len(session.messages) for session in log.sessions] == [200] * 4
    assert time.process_time() - begin < 20  # 2 s; comparing all pairs of lines would take minutes


SWAPS = [None, True, 0, -1.5, 1 << 70, "zq", "", [], {}, ["zq"], {"zq": 1}, [[]], [None], "assistant", "user"]


def places(value, path=()):
    """All containers with one of their keys, at any depth."""
    for key, item in value.items() if isinstance(value, dict) else enumerate(value):
        yield value, key
        if isinstance(item, dict | list):
            yield from places(item)


def damaged(record, rng):
    """A line of a record with one or two damages, or none."""
    record = copy.deepcopy(record)
    for _ in range(rng.choice((0, 1, 1, 2))):
        container, key = rng.choice(list(places(record)))
        match rng.randrange(6):
            case 0 | 1:
                container[key] = copy.deepcopy(rng.choice(SWAPS))
            case 2:
                del container[key]
            case 3 if isinstance(container, list):
                container.insert(key, copy.deepcopy(container[key]))
            case 4:
                for _ in range(rng.choice((1, 2, 70))):
                    container[key] = rng.choice(([container[key]], {"zq": container[key]}))
    raw = bytearray(json.dumps(record, ensure_ascii=rng.random() < 0.5).encode())
    match rng.randrange(8):
        case 0:
            del raw[rng.randrange(1, len(raw)) :]
        case 1:
            for _ in range(rng.choice((1, 1, 3, 30))):
                at = rng.randrange(len(raw))
                raw[at] ^= rng.randrange(1, 256)
        case 2:  # a name twice
            raw = raw.replace(b"{", b'{"messages": [], "zq": 1, "zq": 2, ', rng.choice((1, 3)))
        case 3:
            raw = raw.replace(
                b'"zq', rng.choice((b'"\\ud800', b"NaN, ", b"1e999, ", b'"\\u0000', b"[" * 9999)), 1
            )
    return bytes(raw).replace(b"\n", b" ").replace(b"\r", b" ").strip() or b"0"


def check_well_formed(session):
    assert next(session.answers(), None)
    for message in session.messages:
        assert message["role"] in ("system", "user", "assistant", "tool")
        assert isinstance(message["content"], str)
        assert message.keys() <= {"role", "content", "name", "tool_call_id", "tool_calls"}
        for call in message.get("tool_calls", ()):
            assert isinstance(call.get("id", ""), str)
            assert call["function"]["name"]
            assert isinstance(json.loads(call["function"]["arguments"]), dict)
    for tool in session.tools:
        assert tool["function"]["name"]


@pytest.mark.parametrize("dialect", DIALECTS)
def test_damaged_lines_are_sessions_or_refused_and_never_raise(read, dialect):
    rng = random.Random(f"damage of {dialect}")
    lines = [damaged(DIALECTS[dialect](n), rng) for n in range(2000)]

    log = read(b"{}", *lines)  # the first byte decides whether the file is an array

    assert len(log.sessions) + len(log.refused) == len(lines) + 1
    assert len({session.name for session in log.sessions}) == len(log.sessions) > 500
    assert [line for line, _ in log.refused] == sorted({line for line, _ in log.refused})
    assert len(log.refused) > 500
    assert not any(MARK in reason for _, reason in log.refused)
    for session in log.sessions:
        check_well_formed(session)
    by_line = {session.name for session in log.sessions} | {f"line {line}" for line, _ in log.refused}
    if dialect != "recording":
        assert by_line >= {f"line {line}" for line in range(1, len(lines) + 2)}
