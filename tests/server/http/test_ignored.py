"""Fields that nobody knows are named, counted, and refused by a strict server."""

import asyncio
import json
import re

import pytest

import kvq.server.batch.run
import kvq.server.run
from kvq.cli import main
from kvq.models.describe.resolve import EMBEDDED, resolve_model
from kvq.models.loading.tokenizer import load_tokenizer
from kvq.models.templates.forms import Forms
from kvq.server.admission.bodies import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from kvq.server.anthropic.bodies import MessagesBody, PromptBody
from kvq.server.assembly import make_service
from kvq.server.batch.lines import parse_line
from kvq.server.batch.run import Summary, _Calls
from kvq.server.http.guard import Access
from kvq.server.http.ignored import HEADER, find_ignored
from kvq.server.http.problems import Problem
from tests.server.asgi import Client, service

COUNTER = "kvq_requests_with_ignored_fields"
TEXT = {"type": "text", "text": "a"}
TURN = {"role": "user", "content": "a"}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def chat(*messages, **fields):
    return {"messages": [*messages] or [TURN]} | fields


def message(*blocks, **fields):
    turn = {"role": "user", "content": [*blocks] or "a"}
    return {"model": "tiny", "max_tokens": 1, "messages": [turn]} | fields


def part(*parts):
    return {"role": "user", "content": [*parts]}


def names(model, given):
    return find_ignored(given, model.model_validate(given))[0]


FUNCTION = {"name": "f", "parameters": {"x": {}}}
SCHEMA = {"schema": {"x": 1}, "strict": True}
RESULT = {"type": "tool_result", "tool_use_id": "a"}
BODIES = [
    (CompletionBody, {"prompt": "a", "n": 1, "logit_bias": {"5": 1}, "stop": None}, []),
    (CompletionBody, {"prompt": "a", "max_token": 5}, ["max_token"]),
    (CompletionBody, {"prompt": "a", "max_token": None}, []),
    (CompletionBody, {"prompt": [1] * 1000, "max_token": 0}, ["max_token"]),
    (CompletionBody, {"prompt": "a", "stream_options": {"x": 1}}, ["stream_options.x"]),
    (CompletionBody, {"prompt": "a", "guided_json": {"x": 1}}, []),
    (ChatBody, chat(TURN | {"name": "x", "refusal": {"a": 1}}), []),  # the template's own
    (ChatBody, chat(TURN, part(TEXT, TEXT | {"x": 1})), ["messages.1.content.1.x"]),
    (ChatBody, chat(TURN | {"tool_calls": [CALL, CALL | {"index": 1}]}), ["messages.0.tool_calls.1.index"]),
    (
        ChatBody,
        chat(TURN | {"tool_calls": [CALL | {"function": {"name": "f", "args": "{}"}}]}),
        ["messages.0.tool_calls.0.function.args"],
    ),
    (
        ChatBody,
        chat(tools=[{"type": "function", "function": FUNCTION | {"y": 1}, "z": 1}]),
        ["tools.0.z", "tools.0.function.y"],
    ),
    (
        ChatBody,
        chat(tool_choice={"type": "function", "function": FUNCTION}),
        ["tool_choice.function.parameters"],
    ),
    (ChatBody, chat(chat_template_kwargs={"x": 1}), []),
    (ChatBody, chat(user="me", store=True, verbosity="low"), ["verbosity", "user", "store"]),
    (ChatBody, chat(response_format={"type": "json_schema", "json_schema": SCHEMA}), []),
    (ChatBody, chat(response_format={"type": "json_object", "schema": {}}), ["response_format.schema"]),
    (TokenizeBody, {"prompt": "a", "return_token_strs": True}, ["return_token_strs"]),
    (TokenizeBody, chat(part(TEXT | {"x": 1})), ["messages.0.content.0.x"]),
    (DetokenizeBody, {"tokens": [1], "prompt": "a"}, ["prompt"]),
    (MessagesBody, message(system="a", metadata={"user_id": "a"}, tools=[]), []),
    (MessagesBody, message(TEXT | {"citations": None, "x": 1}), ["messages.0.content.0.x"]),
    (MessagesBody, message(system=[TEXT | {"x": 1}]), ["system.0.x"]),
    (MessagesBody, message(cache_control={"type": "ephemeral", "x": 1}), ["cache_control.x"]),
    (
        MessagesBody,
        message(RESULT | {"content": [TEXT | {"x": 1}], "is_error": True}),
        ["messages.0.content.0.content.0.x", "messages.0.content.0.is_error"],
    ),
    (MessagesBody, message(tools=[{"name": "f", "input_schema": {"x": 1}, "y": 1}]), ["tools.0.y"]),
    (MessagesBody, message(output_config={"effort": "high"}), ["output_config.effort"]),
    (PromptBody, message(), ["max_tokens"]),
    (PromptBody, message(max_tokens=None, output_config={"format": None}), []),
]


ONLY_CALLS = Forms(shown=frozenset(("user", "calls")), variables=frozenset(("messages", "x")))
TOOL = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize(
    ("model", "given", "found"),
    [
        (ChatBody, chat(chat_template_kwargs={"x": 1, "y": 2, "z": None}), ["chat_template_kwargs.y"]),
        (ChatBody, chat(reasoning_effort="low"), ["reasoning_effort"]),
        (ChatBody, chat(tools=[TOOL]), ["tools"]),
        (ChatBody, chat(tools=[TOOL], tool_choice="none"), []),
        (ChatBody, chat(tools=[]), []),
        (MessagesBody, message(tools=[{"name": "f", "input_schema": {}}]), ["tools"]),
        (
            MessagesBody,
            message(tools=[{"name": "f", "input_schema": {}}], tool_choice={"type": "none"}),
            [],
        ),
        (CompletionBody, {"prompt": "a", "tools": [TOOL]}, ["tools"]),
    ],
)
def test_what_the_chat_template_reads_nowhere_is_named(model, given, found):
    body = model.model_validate(given)
    assert find_ignored(given, body, ONLY_CALLS)[0] == found
    assert find_ignored(given, body, Forms())[0] == [name for name in found if "prompt" in given]


def test_what_a_template_may_have_meant_is_told():
    given = chat(chat_template_kwargs={"enable_thinkin": False})
    forms = Forms(variables=frozenset(("messages", "enable_thinking")))
    _, found = find_ignored(given, ChatBody.model_validate(given), forms)
    assert "did you mean 'enable_thinking'?" in found.refusal().message


@pytest.mark.parametrize(("model", "given", "found"), BODIES)
def test_fields_that_a_body_has_no_place_for_are_named(model, given, found):
    before = json.dumps(given)
    assert names(model, given) == found
    assert json.dumps(given) == before


@pytest.mark.parametrize(
    "name",
    [
        "a\r\nset-cookie: b=c",
        "a, b",
        "ünïcödé",
        "\ud83d\ude00",
        "\x00\x7f\x1b[31m",
        "a" * 1_000_000,
        "",
        '"',
        " ",
    ],
)
def test_a_name_is_safe_in_a_header_whatever_it_is(name):
    for given in ({"prompt": "a", name: 1}, {"prompt": "a", "stream_options": {name: 1}}):
        header = ", ".join(find_ignored(given, CompletionBody.model_validate(given))[0])
        assert re.fullmatch(r"[!-+\--~]{1,100}", header)
    given = {"prompt": "a", "x": 1, name: 1}
    header = ", ".join(find_ignored(given, CompletionBody.model_validate(given))[0])
    assert re.fullmatch(r"x, [!-+\--~]{1,100}", header), "it would be no header with a space at its end"


class Counting(dict):
    """Counts how many of its items were looked at."""

    looked = 0

    def items(self):
        for item in super().items():
            self.looked += 1
            yield item


def test_a_few_are_named_and_no_more_looked_at():
    many = {f"k{i:05}": 0 for i in range(100_000)}
    given = Counting({"prompt": "a", "user": "b"} | many)
    body = CompletionBody.model_validate(dict(given))
    assert find_ignored(given, body)[0] == [*(f"k{i:05}" for i in range(8)), "..."]
    assert given.looked < 20
    long = {("k" * 200) + str(i): 0 for i in range(50)}
    assert len(", ".join(find_ignored({"prompt": "a"} | long, body)[0])) < 1000
    inner = Counting(many)
    given = {"prompt": "a", "stream_options": inner}
    find_ignored(given, CompletionBody.model_validate({"prompt": "a", "stream_options": many}))
    assert inner.looked < 20


def test_what_may_be_missed_is_named_before_labels():
    calls = [CALL | {"index": i} for i in range(20)]
    given = chat(TURN | {"tool_calls": calls}, {"role": "user", "content": [TEXT | {"x": 1}]})
    found, unknown = find_ignored(given, ChatBody.model_validate(given))
    assert found[:2] == ["messages.1.content.0.x", "messages.0.tool_calls.0.index"]
    assert len(found) == 9
    assert unknown.path == "messages.1.content.0.x"


PARSED = CALL | {"function": CALL["function"] | {"parsed_arguments": {}}}
OFFER = {"name": "f", "input_schema": {}}
CALLED = {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {}}]}
CALLED["content"][0]["caller"] = {"type": "direct"}
USUAL = [  # each with one field that asks for nothing as it is here
    ("/v1/chat/completions", chat(modalities=["text"])),
    ("/v1/chat/completions", chat(verbosity="medium")),
    ("/v1/completions", {"prompt": "a", "stream": None, "stream_options": {"include_obfuscation": False}}),
    ("/v1/messages", message(speed="standard")),
    ("/v1/messages", message(tools=[OFFER | {"allowed_callers": ["direct"]}])),
    ("/v1/messages", message(tools=[OFFER | {"defer_loading": False}])),
    ("/v1/messages", message(messages=[TURN, CALLED])),
]


@pytest.fixture(scope="module")
def client():
    return Client(service())


@pytest.fixture(scope="module")
def strict():
    return Client(service(is_strict=True))


def counted(client):
    """Requests with ignored fields, by kind."""
    found = {name: value for name, value in client.metrics().items() if name[0].startswith(COUNTER)}
    return {kind: value for (_, kind), value in found.items()}


def test_an_answer_names_them_in_its_head_and_they_are_counted(client):
    before = counted(client)
    assert set(before) == {"refused", "unknown", "label"}
    status, headers, _ = client.post("/tokenize", {"prompt": "a", "max_token": 1, "foo\n": {}})
    assert (status, headers[HEADER]) == (200, "max_token, foo?")
    status, headers, _ = client.post("/detokenize", {"tokens": [5], "x": 1})
    assert (status, headers[HEADER]) == (200, "x")
    status, headers, _ = client.post("/v1/messages/count_tokens", message())
    assert (status, headers[HEADER]) == (200, "max_tokens")
    status, headers, _ = client.post("/tokenize", {"prompt": "a", "x": None})
    assert (status, HEADER in headers) == (200, False)
    for path, body, name in (  # which get a 503, as there is no engine
        ("/v1/completions", {"prompt": "a", "user": "b"}, "user"),
        ("/v1/chat/completions", chat(stream=True, max_token=1), "max_token"),
        ("/v1/messages", message(stream=True, temprature=1), "temprature"),
    ):
        status, headers, _ = client.post(path, body)
        assert (status, headers[HEADER]) == (503, name)
    grown = {label: value - before[label] for label, value in counted(client).items()}
    assert grown == {"refused": 0, "unknown": 5, "label": 1}


def test_pages_of_other_origins_may_read_the_header():
    asking = Client(service(), Access(origins=frozenset({"https://a.org"})))
    _, headers, _ = asking.post("/tokenize", {"prompt": "a", "x": 1}, origin="https://a.org")
    assert headers[HEADER] == "x"
    assert HEADER in headers["access-control-expose-headers"].lower()


@pytest.mark.parametrize(
    ("path", "body", "param", "hint"),
    [
        ("/v1/completions", {"prompt": "a", "max_token": 5}, "max_token", "max_tokens"),
        ("/v1/chat/completions", chat(stream=True, strem_options={}), "strem_options", "stream_options"),
        ("/v1/chat/completions", chat(stream_options={"usage": 1}), "stream_options.usage",
         "; known are include_usage"),
        ("/v1/completions", {"prompt": "a", "stream_options": {"includ_usage": 1}},
         "stream_options.includ_usage", "include_usage"),
        ("/tokenize", {"prompt": "a", "xyz": 1}, "xyz", None),
        ("/detokenize", {"tokens": [1], "token": 1}, "token", "tokens"),
        ("/tokenize", {"prompt": "a", "x" * 10**6: 1}, "x" * 100, None),
        ("/v1/completions", {"prompt": "a", "max_new_tokens": 1}, "max_new_tokens", "max_tokens"),
        ("/v1/completions", {"prompt": "a", "stop_sequences": ["b"]}, "stop_sequences", "stop"),
    ],
)  # fmt: skip
def test_a_strict_server_refuses_them_and_says_what_was_meant(strict, path, body, param, hint):
    before = counted(strict)["refused"]
    status, headers, answer = strict.post(path, body)
    assert (status, HEADER in headers) == (400, False)
    meant = hint if not hint or hint.startswith(";") else f"; did you mean {hint!r}?"
    said = f"unknown field {param!r}" + (meant or "")
    error = {"message": said, "type": "invalid_request_error", "param": param, "code": "unknown_field"}
    assert answer == {"error": error}
    assert counted(strict)["refused"] == before + 1


@pytest.mark.parametrize(("name", "meant"), [("temprature", "temperature"), ("stop", "stop_sequences")])
def test_a_strict_server_refuses_in_the_words_of_the_protocol(strict, name, meant):
    status, _, answer = strict.post("/v1/messages", message(**{name: 1}))
    assert status == 400
    error = {
        "type": "invalid_request_error",
        "message": f"unknown field {name!r}; did you mean {meant!r}?",
        "details": {"error_code": "unknown_field"},
    }
    assert answer == {"type": "error", "error": error}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "a", "user": "b", "store": True, "metadata": {"a": "b"}, "x": None}),
        ("/v1/chat/completions", chat(TURN | {"name": "x", "tool_calls": [CALL | {"index": 0}]}, user="a")),
        # What official clients add by themselves: to a call that they have parsed, for one
        ("/v1/chat/completions", chat(TURN | {"tool_calls": [PARSED]})),
        ("/v1/messages", message(RESULT | {"is_error": False})),
        # What asks for nothing
        ("/v1/chat/completions", chat(prediction={"type": "content", "content": "a"})),
        ("/v1/chat/completions", chat(part(TEXT | {"prompt_cache_breakpoint": {}}), prompt_cache_options={})),
        ("/v1/messages", message(tools=[OFFER | {"eager_input_streaming": True}], user_profile_id="a")),
        *USUAL,
    ],
)
def test_a_strict_server_lets_labels_pass_and_names_them(strict, path, body):
    status, headers, _ = strict.post(path, body)
    assert status == 503  # there is no engine
    assert HEADER in headers


@pytest.mark.parametrize(("path", "body"), USUAL)
def test_what_is_usual_is_a_label_only_while_it_says_so(strict, path, body):
    text = json.dumps(body)
    for usual, other in (("false", "true"), ('"medium"', '"low"'), ('"direct"', '"a"'), ("standard", "fast")):
        text = text.replace(usual, other)
    text = text.replace('"modalities": ["text"]', '"modalities": ["text", "audio"]')
    status, _, answer = strict.post(path, text.encode())
    assert status == 400
    assert answer["error"]["message"].startswith("unknown field")


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        (
            "/v1/chat/completions",
            chat(stream_options={"include_obfuscation": [1]}),
            "stream_options.include_obfuscation: Input should be a truth value, got a list",
        ),
        (
            "/v1/completions",
            {"prompt": "a", "stream_options": {"include_obfuscation": 0}},
            "stream_options.include_obfuscation: Input should be a truth value, got a number",
        ),
        ("/v1/chat/completions", chat(modalities="text"), "modalities: Input should be a list, got a text"),
        ("/v1/chat/completions", chat(verbosity=3), "verbosity: Input should be a text, got a number"),
        ("/v1/messages", message(speed=[]), "speed: Input should be a text, got a list"),
        (
            "/v1/messages",
            message(tools=[OFFER | {"defer_loading": "no"}]),
            "tools.0.defer_loading: Input should be a truth value, got a text",
        ),
        (
            "/v1/messages",
            message(messages=[TURN, CALLED | {"content": [CALLED["content"][0] | {"caller": "direct"}]}]),
            "messages.1.content.0.caller: Input should be an object, got a text",
        ),
    ],
)
def test_what_may_only_be_usual_is_refused_if_it_is_of_another_type(client, path, body, said):
    status, _, answer = client.post(path, body)
    assert (status, answer["error"]["message"]) == (400, said)


def test_the_document_of_a_strict_server_says_so(client, strict):
    sent = ("ChatBody", "CompletionBody", "TextPart", "StreamOptions", "MessagesBody", "TokenizeBody")
    for one, closed in ((client, None), (strict, False)):
        document = one.app.openapi()
        schemas = document["components"]["schemas"]
        assert {schemas[name].get("additionalProperties") for name in sent} == {closed}
        assert schemas["ChatMessage"]["additionalProperties"] is True
        assert "additionalProperties" not in schemas["ChatCompletion"]
        assert {"user", "metadata", "store"} <= schemas["ChatBody"]["properties"].keys()
        usual = schemas["StreamOptions"]["properties"]["include_obfuscation"]
        assert usual["default"] is False
        assert usual.get("enum") == (None if one is client else [False, None])
        assert HEADER in document["paths"]["/v1/messages"]["post"]["responses"]["200"]["headers"]
        assert "headers" not in document["paths"]["/v1/models"]["get"]["responses"]["200"]


@pytest.mark.parametrize(
    ("options", "config", "is_strict"),
    [((), "", False), (("--strict-requests",), "", True), ((), "strict-requests: true", True)],
)
def test_the_option_reaches_the_server(tmp_path, monkeypatch, options, config, is_strict):
    taken = []
    monkeypatch.setattr(kvq.server.run, "serve", taken.append)
    path = tmp_path / "kvq.yaml"
    path.write_text(config)
    with pytest.raises(SystemExit):
        main(["serve", "--config", str(path), *options])
    made = service()
    folder, tokenizer = EMBEDDED["tiny"], load_tokenizer(EMBEDDED["tiny"])
    assert make_service(taken[0], "tiny", folder, made.remote, tokenizer).is_strict is is_strict


LINE = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "a"}}


@pytest.mark.parametrize(
    ("change", "body", "names", "said"),
    [
        ({}, {}, None, None),
        ({"custom_ids": None}, {"max_token": None}, None, None),
        ({}, {"user": "a"}, ["user"], None),
        (
            {"priority": 1},
            {"max_token": 5},
            ["max_token", "priority"],
            "'max_token'; did you mean 'max_tokens'?",
        ),
        ({"custom_ids": 1}, {}, ["custom_ids"], "'custom_ids'; did you mean 'custom_id'?"),
        ({"\x1b[31m": 1}, {}, ["??31m"], "'\\x1b[31m'"),
    ],
)
def test_lines_of_batches_are_looked_at_too(change, body, names, said):
    found = []
    line = parse_line(1, json.dumps(LINE | change | {"body": LINE["body"] | body}).encode())
    asyncio.run(_Calls(service(), found.append)._body(line))
    assert found == ([] if names is None else [names])
    strict = _Calls(service(is_strict=True))
    if said is None:
        asyncio.run(strict._body(line))
        return
    with pytest.raises(Problem) as refused:
        asyncio.run(strict._body(line))
    assert (refused.value.status, refused.value.message) == (400, f"unknown field {said}")


def test_the_option_reaches_a_batch(tmp_path, monkeypatch):
    taken = []
    monkeypatch.setattr(
        kvq.server.batch.run, "run_batch", lambda config, *_: taken.append(config) or Summary()
    )
    source = tmp_path / "in.jsonl"
    source.write_text(json.dumps(LINE))
    for options in ((), ("--strict-requests",)):
        with pytest.raises(SystemExit):
            main(["run-batch", *options, str(source), str(tmp_path / "out.jsonl")])
    source = resolve_model("tiny")
    given = (source.name, source.folder, service().remote, load_tokenizer(source.folder))
    made = [make_service(config.serving, *given) for config in taken]
    assert [one.is_strict for one in made] == [False, True]
