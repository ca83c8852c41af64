"""Answers and streams of Ollama's protocol, over an engine whose words are given."""

import asyncio
import json

import pytest

from kvq.engine.requests.defaults import SamplingDefaults
from kvq.models.templates.forms import Forms
from kvq.server.http.guard import Access
from kvq.server.http.ignored import HEADER
from kvq.server.tools.calling import ToolCalling
from kvq.server.tools.formats.registry import find_format
from tests.server import asgi
from tests.server.openai.test_completions import THINKS, Letters, served

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "a"}]}
WEATHER = {
    "name": "weather",
    "description": "x",
    "parameters": {"type": "object", "properties": {"city": {}}},
}
TOOLS = [{"type": "function", "function": WEATHER}]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
DURATIONS = ("total_duration", "load_duration", "prompt_eval_duration", "eval_duration")


class Lines(asgi.Client):
    """A client that reads every answer as lines of JSON."""

    def post(self, path, body, **headers):
        return asyncio.run(self._lines(path, body, headers))

    async def _lines(self, path, body, headers):
        status, found, text = await self.exchange(path, body, headers)
        return status, found, [json.loads(line) for line in text.splitlines()]


class Recorded(Letters):
    """Remembers conversations and texts."""

    def __init__(self):
        super().__init__()
        self.seen = []

    async def forms(self):
        return Forms()

    async def tokenize(self, text, *, tenant=""):
        self.seen.append(text)
        return await super().tokenize(text)

    async def read_chat(self, conversation, *, tenant=""):
        messages, options = conversation
        self.seen.append(([one.model_dump(exclude_none=True) for one in messages], options))
        return await super().read_chat(conversation)


def client(words, **given):
    service, asked = served(words, **{"prompts": Recorded()} | given)
    service.check_ready = lambda: None
    return Lines(service), asked


def test_streams_are_lines_and_the_default():
    answers, _ = client(["The", " sea", "."])
    status, headers, lines = answers.post("/api/chat", CHAT)
    assert (status, headers["content-type"]) == (200, "application/x-ndjson")
    *parts, last = lines
    assert [part["message"] for part in parts] == [
        {"role": "assistant", "content": word} for word in ("The", " sea", ".")
    ]
    assert {line["model"] for line in lines} == {"tiny"}
    assert [line["done"] for line in lines] == [False, False, False, True]
    assert (last["done_reason"], last["message"]["content"]) == ("stop", "")
    assert all(type(last[name]) is int for name in (*DURATIONS, "prompt_eval_count", "eval_count"))
    assert last["total_duration"] >= last["prompt_eval_duration"] + last["eval_duration"] > 0
    assert all(line["created_at"].endswith("Z") for line in lines)


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
def test_a_whole_answer_is_one_object(path):
    answers, _ = client(["The", " sea"])
    body = CHAT if path == "/api/chat" else {"model": "tiny:latest", "prompt": "a"}
    status, headers, [whole] = answers.post(path, body | {"stream": False})
    assert (status, headers["content-type"], whole["done"]) == (200, "application/json", True)
    assert whole.get("response", whole.get("message", {}).get("content")) == "The sea"
    assert whole["model"] == body["model"]
    assert "context" not in whole


def test_thoughts_are_apart():
    words = ["<think>", "Hm", "</think>", "Yes"]
    for path, body in (
        ("/api/chat", CHAT),
        ("/api/generate", {"model": "tiny", "prompt": "a", "system": "b"}),
    ):
        answers, _ = client(words, tools=THINKS)
        [whole] = answers.post(path, body | {"stream": False, "think": True})[2]
        found = whole.get("message", whole)
        assert (found["thinking"], found.get("content", found.get("response"))) == ("Hm", "Yes")
        lines = client(words, tools=THINKS)[0].post(path, body)[2]
        assert "".join(line.get("message", line).get("thinking", "") for line in lines) == "Hm"


def test_calls_have_arguments_as_objects_and_come_before_the_end():
    tools = ToolCalling(format=find_format("hermes", ""))
    words = ["Look. ", CALL[:30], CALL[30:], CALL.replace("Rome", "Óslo")]
    calls = [{"function": {"name": "weather", "arguments": {"city": city}}} for city in ("Rome", "Óslo")]
    [whole] = client(words, tools=tools)[0].post("/api/chat", CHAT | {"tools": TOOLS, "stream": False})[2]
    assert whole["message"] == {"role": "assistant", "content": "Look.", "tool_calls": calls}
    assert whole["done_reason"] == "stop"
    *_, before, last = client(words, tools=tools)[0].post("/api/chat", CHAT | {"tools": TOOLS})[2]
    assert (before["message"]["tool_calls"], before["done"]) == (calls, False)
    assert (last["message"], last["done"]) == ({"role": "assistant", "content": ""}, True)


def asked_of(options, *, path="/api/generate", defaults=None, **fields):
    answers, asked = client(["a"])
    answers.service.defaults = defaults or SamplingDefaults()
    body = {"model": "tiny", "prompt": "a"} if path == "/api/generate" else CHAT
    status, _, lines = answers.post(path, body | fields | {"options": options})
    assert status == 200, lines
    return asked[0]


@pytest.mark.parametrize("path", ["/api/generate", "/api/chat"])
def test_options_are_the_engines_parameters(path):
    found = asked_of(
        {
            "temperature": 0.5, "top_k": 7, "top_p": 0.5, "min_p": 0.1, "seed": 3, "num_predict": 9,
            "stop": ["x", "y"], "repeat_penalty": 1.5, "presence_penalty": 0.1, "frequency_penalty": 0.2,
        },
        path=path,
    )  # fmt: skip
    assert (found.temperature, found.top_k, found.top_p, found.min_p, found.seed) == (0.5, 7, 0.5, 0.1, 3)
    assert (found.max_tokens, found.most_tokens, list(found.stop)) == (None, 9, ["x", "y"])
    assert (found.repetition_penalty, found.presence_penalty, found.frequency_penalty) == (1.5, 0.1, 0.2)


def test_what_is_left_out_is_the_models_and_else_ollamas():
    found = asked_of({})
    assert (found.temperature, found.top_k, found.top_p) == (0.8, 40, 0.9)
    assert (found.max_tokens, found.most_tokens, found.seed, found.repetition_penalty) == (
        None,
        None,
        None,
        1.0,
    )
    own = SamplingDefaults(fields={"temperature": 0.3, "most_tokens": 50})
    found = asked_of({"top_k": 0, "seed": -1}, defaults=own)
    assert (found.temperature, found.top_k, found.top_p, found.seed) == (0.3, None, 0.9, None)
    assert found.most_tokens == 50
    assert asked_of({"temperature": 1, "num_predict": 90}, defaults=own).most_tokens == 90
    assert asked_of({"temperature": 1, "num_predict": -2}, defaults=own).temperature == 1


def test_formats_are_structured_outputs():
    assert asked_of({}, format="").structured is None
    assert json.loads(asked_of({}, format="json").structured.json_schema) == {"type": "object"}
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    assert json.loads(asked_of({}, path="/api/chat", format=schema).structured.json_schema) == schema


def test_prompts_are_chats_unless_they_are_raw_or_the_model_has_no_template():
    prompts = Recorded()
    answers, _ = client(["a"], prompts=prompts, tools=ToolCalling(template="{{ x }}"))
    for fields in ({"system": "Be kind."}, {}, {"raw": True}):
        answers.post("/api/generate", {"model": "tiny", "prompt": "Hi"} | fields)
    turn = {"role": "user", "content": "Hi"}
    assert prompts.seen[0][0] == [{"role": "system", "content": "Be kind."}, turn]
    assert (prompts.seen[1][0], prompts.seen[2]) == ([turn], "Hi")
    prompts = Recorded()
    client(["a"], prompts=prompts)[0].post("/api/generate", {"model": "tiny", "prompt": "Hi"})
    assert prompts.seen == ["Hi"]


def test_messages_are_given_to_the_template_as_openais_are():
    prompts = Recorded()
    answers, _ = client(["a"], prompts=prompts, tools=THINKS)
    call = {"function": {"name": "weather", "arguments": {"city": "Óslo"}}}
    asked = [
        {"role": "assistant", "content": "", "thinking": "Hm", "tool_calls": [call], "images": None},
        {"role": "tool", "content": "cold", "tool_name": "weather"},
    ]
    body = {"model": "tiny", "messages": asked, "tools": TOOLS, "think": "low"}
    assert answers.post("/api/chat", body)[0] == 200
    [(messages, options)] = prompts.seen
    called = {"type": "function", "function": {"name": "weather", "arguments": '{"city": "Óslo"}'}}
    assert messages == [
        {"role": "assistant", "content": "", "reasoning_content": "Hm", "tool_calls": [called]},
        {"role": "tool", "content": "cold", "name": "weather"},
    ]
    assert options["tools"] == TOOLS
    assert (options["enable_thinking"], options["reasoning_effort"]) == (True, "low")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"images": ["aGk="]}, "images is not supported: this server reads text only"),
        ({"template": "{{ .Prompt }}"}, "template is not supported"),
        ({"suffix": "x"}, "suffix is not supported"),
        ({"context": [1, 2]}, "context is not supported: no conversation is kept"),
        ({"think": True}, "this model does not think"),
        ({"options": {"num_ctx": 1 << 21}}, "num_ctx is 2097152, and the server's context 4096 tokens"),
        ({"options": {"temperature": "0"}}, "options.temperature: Input should be a valid number"),
        ({"format": "xml"}, "format: "),
        ({"model": "other"}, "no model 'other' here"),
        ({"format": {"type": "nothing"}, "options": {"top_p": 0}}, "options.top_p: "),
    ],
)
@pytest.mark.parametrize("stream", [True, False])
def test_refusals_are_ollamas_error_objects(fields, words, stream):
    answers, asked = client(["a"])
    answers.service.remote.info = Info
    status, headers, [body] = answers.post(
        "/api/generate", {"model": "tiny", "prompt": "a", "stream": stream} | fields
    )
    assert (status, headers["content-type"]) == (404 if "model" in fields else 400, "application/json")
    assert set(body) == {"error"}
    assert words in body["error"]
    assert asked == []
    if "options" not in fields and "images" in fields:
        turn = {"role": "user", "content": "a"} | fields
        status, _, [body] = answers.post("/api/chat", {"model": "tiny", "messages": [turn]})
        assert (status, body["error"].partition(":")[0]) == (400, "messages.0")


class Info:
    max_context = 4096
    model_digest = "d"
    vocab_size = 4096


def test_a_failure_within_a_stream_is_its_last_line():
    answers, _ = client(["a", "b"])
    stream = answers.service.stream

    async def fails(*given):
        async for piece in stream(*given):
            yield piece
            raise ZeroDivisionError

    answers.service.stream = fails
    *_, last = answers.post("/api/generate", {"model": "tiny", "prompt": "a"})[2]
    assert last == {"error": "the server failed: ZeroDivisionError"}


def test_fields_without_an_effect_are_reported_and_a_strict_server_takes_labels_alone():
    body = {"model": "tiny", "prompt": "a", "keep_alive": "5m", "options": {"mirostat": 1, "num_thread": 4}}
    status, headers, _ = client(["a"])[0].post("/api/generate", body)
    assert (status, headers[HEADER]) == (200, "options.mirostat, keep_alive, options.num_thread")
    answers, _ = client(["a"])
    answers.service.is_strict = True
    status, _, [refusal] = answers.post("/api/generate", body)
    assert (status, "unknown field 'options.mirostat'" in refusal["error"]) == (400, True)
    del body["options"]["mirostat"]
    assert answers.post("/api/generate", body)[0] == 200


def test_an_empty_prompt_asks_to_load_what_is_loaded():
    answers, asked = client(["a"])
    for path, body in (("/api/generate", {"keep_alive": 0}), ("/api/chat", {"messages": []})):
        status, _, [answer] = answers.post(path, {"model": "tiny"} | body)
        assert (status, answer["done"], answer["done_reason"]) == (200, True, "load")
    assert asked == []
    assert answers.post("/api/chat", {"model": "other"})[0] == 404


def test_keys_and_limits_are_those_of_other_routes():
    service, _ = served(["a"])
    service.check_ready = lambda: None
    answers = Lines(service, Access(api_keys=("k",)))
    for path in ("/api/chat", "/api/show"):
        status, _, [body] = answers.post(path, CHAT)
        assert (status, set(body)) == (401, {"error"})
    assert answers.post("/api/chat", CHAT, authorization="Bearer k")[0] == 200
    assert answers.metrics()["kvq_requests_total", "invalid"] == 1


def test_the_model_is_shown():
    answers, _ = client(["a"])
    answers.service.remote.info = Info
    answers.service.tools = THINKS
    [shown] = answers.post("/api/show", {"model": "tiny:latest", "verbose": True})[2]
    assert shown["capabilities"] == ["completion", "thinking"]
    assert (shown["digest"], shown["model_info"]["kvq.context_length"]) == ("d", 4096)
    status, _, [body] = answers.post("/api/show", {"model": "other"})
    assert (status, set(body)) == (404, {"error"})
