"""Recorded chats: what is written, what is redacted, and that sessions can be read back."""

import asyncio
import json
import logging
import random
import re
import string
import time
from contextlib import aclosing
from pathlib import Path
from types import SimpleNamespace

import anthropic
import openai
import pytest

from kvq.errors import ConfigError
from kvq.server.admission.bodies import ChatBody
from kvq.server.http.problems import Problem
from kvq.server.openai.recorded import recorded as recorded_call
from kvq.server.openai.respond import Call
from kvq.server.recording import Recorder
from kvq.server.redaction import Redactor
from kvq.traces.reading import read_log
from tests.commands.conftest import kvq  # noqa: F401
from tests.server.kit import Server
from tests.waiting import HANG_S, wait_for

OPTIONS = ("--kv", "int4", "--num-blocks", "64", "--max-num-seqs", "8", "--tool-call-parser", "hermes")
SCHEMA = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
ASK = [{"role": "user", "content": "Write to ann@example.org of zyxxy."}]


def lines(path):
    return [json.loads(line) for line in path.read_text("utf-8").splitlines() if line]


def added_up(chunks):
    """The answer that the chunks of a stream add up to."""
    message = {"content": "", "tool_calls": {}}
    for chunk in chunks:
        [choice] = chunk.choices
        message["content"] += choice.delta.content or ""
        for call in choice.delta.tool_calls or ():
            begun = {"id": call.id, "function": {"name": call.function.name, "arguments": ""}}
            function = message["tool_calls"].setdefault(call.index, begun)["function"]
            function["arguments"] += call.function.arguments
    message["tool_calls"] = [*message["tool_calls"].values()]
    return {"id": chunk.id, "choices": [{"message": message, "finish_reason": choice.finish_reason}]}


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """What a server answered, by its own count, and the file that it has recorded."""
    path = tmp_path_factory.mktemp("recorded") / "chats.jsonl"
    path.write_text('{"kvq_recording": 1, "session": "cut off by a full disk')
    path.chmod(0o644)
    answers = []
    with Server(*OPTIONS, "--record", str(path), "--record-redact", "zyxx.") as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=HANG_S)
        given = {"model": "tiny", "messages": ASK, "max_tokens": 90, "temperature": 0}
        given["extra_body"] = {"session_id": "ann@example.org", "cache_salt": "salt"}
        for call in ({}, {"tools": [TOOL], "tool_choice": "required"}):
            answers.append(client.chat.completions.create(**given, **call).model_dump(exclude_unset=True))
            answers.append(added_up(client.chat.completions.create(**given, **call, stream=True)))
        client = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=HANG_S)
        given = {"model": "tiny", "messages": ASK, "max_tokens": 90, "extra_body": {"temperature": 0}}
        given["system"] = "Call 555-123-4567."
        tool = {"name": "weather", "input_schema": SCHEMA}
        for call in ({}, {"tools": [tool], "tool_choice": {"type": "any"}}):
            answers.append(client.messages.create(**given, **call).model_dump(exclude_unset=True))
            with client.messages.stream(**given, **call) as stream:
                answers.append(stream.get_final_message().model_dump(exclude_unset=True))
        with pytest.raises(anthropic.BadRequestError):
            client.messages.create(**given, thinking={"type": "enabled", "budget_tokens": 1024})
        wait_for(lambda: path.read_text("utf-8").count("\n") == 9, "eight lines after the one that was cut")
    return answers, path


def test_every_answer_is_recorded_once_whole_and_streamed(recorded):
    answers, path = recorded
    cut, *found = path.read_text("utf-8").splitlines()

    assert path.stat().st_mode & 0o777 == 0o600
    assert cut.endswith("cut off by a full disk")
    assert len(found) == len(answers) == 8
    for answer, line in zip(answers, map(json.loads, found), strict=True):
        response = line["response"]
        assert response["id"] == answer["id"]
        if "choices" in answer:
            [given], [choice] = answer["choices"], response["choices"]
            assert (choice["message"]["content"] or "") == (given["message"]["content"] or "")
            assert choice["finish_reason"] == given["finish_reason"]
            expected = [
                {
                    "id": call["id"],
                    "type": "function",
                    "function": {k: call["function"][k] for k in ("name", "arguments")},
                }
                for call in given["message"].get("tool_calls") or ()
            ]
            assert choice["message"].get("tool_calls", []) == expected
        else:
            keys = ("type", "text", "id", "name", "input")
            assert [{k: block[k] for k in keys if k in block} for block in response["content"]] == [
                {k: block[k] for k in keys if k in block} for block in answer["content"]
            ]
            assert response["stop_reason"] == answer["stop_reason"]
    assert sum("tool_calls" in json.dumps(line["response"]) for line in map(json.loads, found)) == 2
    assert sum("tool_use" in json.dumps(line["response"]) for line in map(json.loads, found)) == 2


def test_requests_are_recorded_redacted_and_without_what_concerns_the_server(recorded):
    found = lines_after_cut(recorded[1])

    assert "ann@" not in recorded[1].read_text("utf-8")
    for line in found:
        assert "salt" not in line["request"]
        assert "stream" not in line["request"]
        [message] = line["request"]["messages"]
        texts = message["content"] if isinstance(message["content"], str) else message["content"][0]["text"]
        assert texts == "Write to <email> of <redacted>."
    assert len({line["session"] for line in found}) == 2
    assert found[4]["request"]["system"][0]["text"] == "Call <phone>."


def test_recordings_are_read_as_sessions(recorded):
    log = read_log(recorded[1])

    assert [line for line, _ in log.refused] == [1]
    sessions = {json.dumps(session.messages) for session in log.sessions}
    assert len(log.sessions) == len(sessions)
    assert any("tool_calls" in message for session in log.sessions for message in session.messages)
    assert any(session.tools for session in log.sessions)


def lines_after_cut(path):
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()[1:]]


SECRETS = [
    ("ann.o'b-x+tag@mail.example.co.uk", "ann.o'<email>"),
    ("mail (bob@x.io), and", "mail (<email>), and"),
    ("call +49 151 1234-5678 now", "call <phone> now"),
    ("(555) 123-4567.", "<phone>."),
    ("from 192.168.0.17:8080", "from <ip>:8080"),
    ("at 2001:db8::8a2e:370:7334 or fe80::1", "at <ip> or <ip>"),
    ("pay 4111 1111 1111 1111.", "pay <card>."),
    ("pay 5500-0000-0000-0004", "pay <card>"),
    ("sk-proj-abcdefghijklmnop1234", "<key>"),
    ("token=ghp_0123456789abcdefghijABCDEFGHIJ012345", "token=<key>"),
    ("AKIAIOSFODNN7EXAMPLE", "<key>"),
    ("hf_" + "aBcDeFgHiJ" * 3, "<key>"),
    ("eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.SflKxwRJSMeKKF2QT4", "<key>"),
    ("Authorization: Bearer abc123.def-456", "Authorization: <token>"),
    ("id 9f86d081884c7d659a2feaa0c55ad015a3bf4f1b", "id <secret>"),
    ("wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY==", "<secret>"),
]
PLAIN = [
    "the standard bearer responsibility, 10-20 of 2024-11-05 12:30:45",
    "kvq_http_longest_stretch_seconds_of_all_the_servers",
    "kvq/server/openai/test_completions_of_chats_2.py:1234:56",
    "@@ -1234,10 +1234,12 @@ def f(x): return 0.1234567890123456",
    "std::vector<int> a[1234567890123456]; v1.2.3 >= 2.11 @ home",
    "a[1::2] on http://127.0.0.1:8000 or 0.0.0.0, [::1]",
    "1234567890 1731001234567 4111 1111 1111 1112",
    "a\r\nb\u2028c\x0bd",
]


@pytest.mark.parametrize(("text", "redacted"), SECRETS)
def test_personal_data_and_secrets_become_their_kind(text, redacted):
    assert Redactor().text(f"1\n{text}\n") == f"1\n{redacted}\n"


@pytest.mark.parametrize("text", PLAIN)
def test_other_texts_stay(text):
    assert Redactor().text(text) == text


def test_json_stays_valid_and_calls_stay_linked():
    id = "call_9f86d081884c7d659a2feaa0c55ad015"
    arguments = json.dumps({"id": id, "to": 'a"@b.c', "ann@x.org": ["ann@x.org", 4111111111111111, None]})
    given = {
        "messages": [{"tool_calls": [{"id": id, "function": {"name": "f", "arguments": arguments}}]}],
        "content": [{"type": "tool_use", "id": id, "input": {"id": id, "n": 1}}],
        "tool_call_id": id,
        "top_p": 0.5,
    }

    found = Redactor().value(given)

    call = found["messages"][0]["tool_calls"][0]
    assert json.loads(call["function"]["arguments"]) == {
        "id": "<secret>",
        "to": 'a"@b.c',
        "ann@x.org": ["<email>", 4111111111111111, None],
    }
    assert (call["id"], found["tool_call_id"], found["top_p"]) == (id, id, 0.5)
    assert found["content"][0] == {"type": "tool_use", "id": id, "input": {"id": "<secret>", "n": 1}}
    same = '{ "a":1,"b" : "x"}'
    assert Redactor().value({"arguments": same}) == {"arguments": same}
    assert Redactor().value({"arguments": '{"a": "b@c.de'}) == {"arguments": '{"a": "<email>'}


def test_redaction_takes_linear_time():
    rng, pieces = (
        random.Random(6),
        ("a", "1", ".", " ", "@", "+", ":", "-", "/", "=", "(", "sk-", "eyJ", "Bearer ", "F"),
    )
    for _ in range(60):
        kind = "".join(rng.choices(pieces, k=rng.choice((1, 2, 3, 6))))
        begin = time.process_time()
        Redactor().text(kind * (100_000 // len(kind)))
        assert time.process_time() - begin < 5, kind  # 0.05 s; squared, it would be minutes


def test_random_texts_keep_their_lines():
    rng = random.Random(5)
    for _ in range(300):
        text = "".join(rng.choices(string.printable + "äß\u2028", k=200))
        assert Redactor(["x+"]).text(text).count("\n") == text.count("\n")


def put(recorder, *texts):
    for text in texts:
        recorder.put(lambda text=text: {"messages": [{"role": "user", "content": text}]}, {"choices": []})
    recorder.close()


def test_turns_of_a_recorded_session_are_one(tmp_path):
    """Also where redaction has changed texts and arguments."""
    path = tmp_path / "chats"
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"to":"ann@example.org"}'}}
    first = [{"role": "user", "content": "Write to ann@example.org"}]
    second = [
        *first,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "no ann@example.org", "tool_call_id": "c"},
    ]
    answers = {"content": None, "tool_calls": [call]}, {"content": "I found no ann@example.org"}
    recorder = Recorder(path, Redactor())
    for messages, answer in zip((first, second), answers, strict=True):
        given = {"messages": messages, "session_id": "s"}
        recorder.put(given.copy, {"choices": [{"message": {"role": "assistant", **answer}}]})
    recorder.close()

    [session] = read_log(path).sessions

    assert [message["content"] for message in session.messages] == [
        "Write to <email>",
        "",
        "no <email>",
        "I found no <email>",
    ]
    assert session.messages[1]["tool_calls"][0]["function"]["arguments"] == '{"to": "<email>"}'


def test_plain_recordings_leave_nothing_out(tmp_path):
    path = tmp_path / "chats"
    put(Recorder(path, None), "ann@example.org", "é")

    assert [line["request"]["messages"][0]["content"] for line in lines(path)] == ["ann@example.org", "é"]


def test_recording_ends_at_its_limit_with_a_line_in_the_log(tmp_path, caplog):
    path = tmp_path / "chats"
    with caplog.at_level(logging.WARNING, "kvq"):
        put(Recorder(path, Redactor(), max_bytes=2000), *(["word " * 20] * 20))

    assert 1000 < path.stat().st_size <= 2000
    assert [record.message for record in caplog.records] == ["record_full"]
    assert len(lines(path)) == path.read_text().count("\n")


def test_a_failure_ends_recording_and_no_request(tmp_path, caplog):
    recorder = Recorder(tmp_path / "chats", Redactor())
    with caplog.at_level(logging.WARNING, "kvq"):
        recorder.put(dict, {"cause": object()})
        put(recorder, "more")
        recorder.put(dict, {})

    assert [record.message for record in caplog.records] == ["record_failed"]
    assert (tmp_path / "chats").read_bytes() == b""


def test_options_are_checked_before_anything_starts(tmp_path, kvq):  # noqa: F811
    path = tmp_path / "chats"
    with pytest.raises(ConfigError, match=re.escape("--record-redact '(' is no regular expression")):
        Redactor(["("])
    with pytest.raises(ConfigError, match=r"can't write .*: Is a directory"):
        Recorder(tmp_path, Redactor())
    for options, message in (
        (("--record-plain",), "need --record"),
        (
            ("--record", str(path), "--record-plain", "--record-redact", "x"),
            "leave it or --record-redact out",
        ),
        (("--record", str(path), "--record-redact", "("), "is no regular expression"),
        (("--record", str(tmp_path / "no" / "chats")), "there is no folder"),
    ):
        status, _, err = kvq("serve", "--model", "tiny", "--check", *options)
        assert status != 0
        assert message in " ".join(err.split())
    assert not path.exists()


class Streaming(Call):
    """A call with two results, in three chunks."""

    slots = None

    async def answer(self):
        raise Problem(400, "it failed")

    async def chunks(self):
        for index, text, reason in ((1, "b", "stop"), (0, "a", None), (0, "c", "length")):
            yield {
                "id": "x",
                "choices": [{"index": index, "delta": {"content": text}, "finish_reason": reason}],
            }


def test_streams_are_recorded_when_they_are_complete_and_failures_are_not():
    found = []
    recorder = SimpleNamespace(put=lambda request, response: found.append((request(), response)))
    call = recorded_call(Streaming(), ChatBody(messages=ASK, n=2, stream=True), recorder)

    async def read(most):
        async with aclosing(call.chunks()) as chunks:
            async for _ in chunks:
                most -= 1
                if not most:
                    return

    asyncio.run(read(2))
    with pytest.raises(Problem):
        asyncio.run(call.answer())
    assert found == []
    asyncio.run(read(9))
    [(request, response)] = found
    assert request == {"messages": ASK, "n": 2}
    assert [
        (one["index"], one["message"]["content"], one["finish_reason"]) for one in response["choices"]
    ] == [(0, "ac", "length"), (1, "b", "stop")]


def test_what_json_spells_is_redacted_too():
    inner = "10.20.30.40 db\n+491701234567\nsk-abc1234efgh5678jklm90qrst\nann@example.org"
    message = {"role": "tool", "content": json.dumps({"text": inner, "id": 7})}
    found = Redactor().value(message)["content"]
    assert json.loads(found)["id"] == 7
    assert not any(secret in found for secret in ("10.20.30.40", "491701234567", "sk-abc1", "example.org"))
    tool = {"properties": {"id": {"description": "such as ann@example.org"}}}
    assert Redactor().value(tool) == {"properties": {"id": {"description": "such as <email>"}}}


def test_what_is_no_file_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="needs a file"):
        Recorder(Path("/dev/null"), None)
