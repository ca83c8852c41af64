"""Responses over an engine whose words are given: items, events, what is kept, and refusals."""

import asyncio
import json
import random
from copy import deepcopy

import pytest
from openai import omit
from openai.lib.streaming.responses._responses import ResponseStreamState
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from kvq.engine import Piece
from kvq.engine.requests.defaults import SamplingDefaults
from kvq.models.templates.forms import Forms
from kvq.server.http.guard import Access
from kvq.server.http.ignored import HEADER
from kvq.server.http.problems import failed
from kvq.server.recording import Recorder
from kvq.server.responses.kept import Entry, Kept
from kvq.server.tools.calling import ToolCalling
from kvq.server.tools.formats.registry import find_format
from kvq.traces.reading import read_log
from tests.server import asgi
from tests.server.ollama.test_answer import Recorded
from tests.server.openai.test_completions import THINKS, served
from tests.server.responses.test_conversation import ANSWER, CALL, RESULT, THOUGHT, USER

ASK = {"model": "tiny", "input": "Tell me of the sea."}
TOOL = {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {}}}
OTHER = {"type": "function", "name": "g"}
ALLOWED = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]}
HERMES = find_format("hermes", "")
THINKS_AND_CALLS = ToolCalling(format=HERMES, thinking=THINKS.thinking)
CALLED = ["<tool_call>", '{"name": "f", ', '"arguments": {"a"', ": 1}}", "</tool_call>"]
WORDS = ["<think>", "Hm", "m", "</think>", "I ", "call.\n", *CALLED, "\n", *CALLED, "So."]
EVENT = TypeAdapter(ResponseStreamEvent)
KEYS = ("one", "other")


class Responses(asgi.Client):
    """A client of the routes for responses, with the first of two keys unless told otherwise."""

    def __init__(self, service):
        service.check_ready = lambda: None
        super().__init__(service, Access(api_keys=KEYS))

    def ask(self, path="", body=None, *, method="POST", key=KEYS[0], query=""):
        head = {"authorization": f"Bearer {key}"}
        status, headers, text = asyncio.run(self.exchange(f"/v1/responses{path}", body, head, method, query))
        return status, headers, text

    def create(self, key=KEYS[0], **fields):
        status, _, text = self.ask(body=ASK | fields, key=key)
        return status, json.loads(text)

    def stream(self, **fields):
        status, headers, text = self.ask(body=ASK | {"stream": True} | fields)
        assert (status, headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
        events = []
        for entry in text.decode().strip().split("\n\n"):
            name, data = entry.split("\n")
            events.append(json.loads(data.removeprefix("data: ")))
            assert name == f"event: {events[-1]['type']}"
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        return events


def over(words, **given):
    """A client, and the conversations that the template got."""
    prompts = Recorded()
    service, asked = served(words, prompts=prompts, **given)
    service.asked = asked
    return Responses(service), prompts.seen


def without_ids(response):
    """Items, ending and usage of a response, which two of the same request share."""
    items = deepcopy(response["output"])
    for item in items:
        del item["id"]
        item.pop("call_id", None)
    return items, response["status"], response["incomplete_details"], response["usage"]


def test_text_is_a_message():
    client, seen = over(["The", " sea", "."])
    status, response = client.create(instructions="Be kind.", metadata={"a": "b"}, user="x")
    assert status == 200
    assert Response.model_validate(response).output_text == "The sea."
    [message] = response["output"]
    assert (message["type"], message["role"], message["status"]) == ("message", "assistant", "completed")
    assert (response["status"], response["incomplete_details"], response["error"]) == (
        "completed",
        None,
        None,
    )
    assert (response["instructions"], response["metadata"], response["user"]) == ("Be kind.", {"a": "b"}, "x")
    assert response["usage"]["total_tokens"] == 0
    [(messages, options)] = seen
    assert [(message["role"], message["content"]) for message in messages] == [
        ("system", "Be kind."),
        ("user", ASK["input"]),
    ]
    assert options["add_generation_prompt"]


@pytest.mark.parametrize("ending", ["stop", "length"])
def test_streams_add_up_to_the_whole(ending):
    """By the official client's own rules, with thinking, text and calls."""
    given = {"tools": [TOOL]}
    client, _ = over(WORDS, tools=THINKS_AND_CALLS, ending=ending)
    whole = client.create(**given)[1]
    events = client.stream(**given)
    assert without_ids(events[-1]["response"]) == without_ids(whole)
    assert [item["type"] for item in whole["output"]] == [
        *("reasoning", "message", "function_call", "function_call", "message")
    ]
    assert whole["output"][0]["content"] == [{"type": "reasoning_text", "text": "Hmm"}]
    assert [item["content"][0]["text"] for item in whole["output"][1::3]] == ["I call.", "So."]
    assert [json.loads(item["arguments"]) for item in whole["output"][2:4]] == [{"a": 1}] * 2
    last = "incomplete" if ending == "length" else "completed"
    assert (events[-1]["type"], whole["output"][-1]["status"]) == (f"response.{last}", last)
    assert whole["incomplete_details"] == ({"reason": "max_output_tokens"} if ending == "length" else None)
    state = ResponseStreamState(input_tools=[TOOL], text_format=omit)
    for event in events:
        state.handle_event(EVENT.validate_python(event))
    if ending == "stop":
        output = state._completed_response.output
        assert [item.id for item in output] == [item["id"] for item in events[-1]["response"]["output"]]
    grown = state.accumulate_event(EVENT.validate_python(events[-1])).output
    for snapshot, item in zip(grown[1:], events[-1]["response"]["output"][1:], strict=True):
        if item["type"] == "function_call":
            assert snapshot.arguments == item["arguments"]
        else:
            assert snapshot.content[0].text == item["content"][0]["text"]


def test_events_come_in_their_order():
    client, _ = over(["a", "b", *CALLED], tools=ToolCalling(format=HERMES))
    kinds = [event["type"].removeprefix("response.") for event in client.stream(tools=[TOOL])]
    kinds = [kind for i, kind in enumerate(kinds) if kinds[i - 1 : i] != [kind]]
    assert kinds == [
        *("created", "in_progress", "output_item.added", "content_part.added", "output_text.delta"),
        *("output_text.done", "content_part.done", "output_item.done", "output_item.added"),
        *("function_call_arguments.delta", "function_call_arguments.done", "output_item.done", "completed"),
    ]


def test_nothing_but_an_end_is_no_item():
    client, _ = over([""])
    assert client.create()[1]["output"] == []
    assert [event["type"] for event in client.stream()] == [
        *("response.created", "response.in_progress", "response.completed")
    ]


def test_defaults_of_the_model_are_told():
    client, _ = over(["a"])
    client.service.defaults = SamplingDefaults(fields={"temperature": 0.3, "top_p": 0.5})
    response = client.create(top_p=0.25)[1]
    assert (response["temperature"], response["top_p"]) == (0.3, 0.25)
    params = client.service.asked[-1]
    assert (params.temperature, params.top_p) == (0.3, 0.25)


def test_a_stream_that_fails_ends_with_the_response():
    client, _ = over(["a"])
    path = client.service.stream

    async def broken(tokens, options, slots):
        yield Piece(request_id="", index=0, text="The", token_ids=[1])
        raise failed("the engine ended")

    client.service.stream = broken
    events = client.stream()
    assert events[-1]["type"] == "response.failed"
    response = Response.model_validate(events[-1]["response"])
    assert (response.status, response.error.code, response.error.message) == (
        *("failed", "server_error", "the engine ended"),
    )
    status, _, text = client.ask(body=ASK)
    assert (status, json.loads(text)["error"]["message"]) == (500, "the engine ended")
    assert client.ask(f"/{response.id}", method="GET")[0] == 404
    client.service.stream = path


def test_a_response_is_continued():
    client, seen = over([*CALLED], tools=ToolCalling(format=HERMES))
    first = client.create(tools=[TOOL], instructions="Only here.")[1]
    second = client.create(input=[RESULT], previous_response_id=first["id"], instructions="Now.")[1]
    assert second["previous_response_id"] == first["id"]
    third = client.create(input="And now?", previous_response_id=second["id"], store=False)[1]
    assert [message["role"] for message in seen[-2][0]] == ["system", "user", "assistant", "tool"]
    assert seen[-2][0][0]["content"] == "Now."
    messages = seen[-1][0]
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "assistant", "user"]
    [call] = messages[1]["tool_calls"]
    assert call["function"]["name"] == "f"
    assert (call["id"], messages[-1]["content"]) == (first["output"][0]["call_id"], "And now?")
    assert client.ask(f"/{third['id']}", method="GET")[0] == 404, "store: false keeps nothing"
    status, _, text = client.ask(f"/{second['id']}", method="GET")
    assert (status, json.loads(text)) == (200, second)


def test_a_streamed_response_is_kept_too():
    client, seen = over(["The", " sea"])
    response = client.stream()[-1]["response"]
    assert json.loads(client.ask(f"/{response['id']}", method="GET")[2]) == response
    client.create(previous_response_id=response["id"], input="Go on.")
    assert [message["content"] for message in seen[-1][0]] == [ASK["input"], "The sea", "Go on."]


def test_items_are_referred_to_by_their_ids():
    client, seen = over(["The", " sea"])
    first = client.create()[1]
    reference = {"type": "item_reference", "id": first["output"][0]["id"]}
    status, second = client.create(input=[USER, reference, USER])
    assert status == 200
    assert [message["role"] for message in seen[-1][0]] == ["user", "assistant", "user"]
    assert seen[-1][0][1]["content"] == "The sea"
    client.create(previous_response_id=second["id"], input="Go on.")
    assert [message["role"] for message in seen[-1][0]] == ["user", "assistant", "user", "assistant", "user"]
    for other in ({"key": KEYS[1]}, {"input": [reference | {"id": "msg_1"}]}):
        status, body = client.create(**{"input": [USER, reference]} | other)
        assert (status, body["error"]["code"]) == (404, "item_not_found")
    client.ask(f"/{first['id']}", method="DELETE")
    assert client.create(input=[USER, reference])[0] == 404


def test_input_items_are_listed_in_pages():
    client, _ = over(["a"])
    first = client.create(input=[USER, ANSWER, USER])[1]
    second = client.create(previous_response_id=first["id"], input="Go on.")[1]
    path = f"/{second['id']}/input_items"

    def listed(query=""):
        status, _, text = client.ask(path, method="GET", query=query)
        assert status == 200, text
        return json.loads(text)

    whole = listed("order=asc")
    assert [item.get("role") for item in whole["data"]] == ["user", "assistant", "user", "assistant", "user"]
    assert whole["data"][-1]["content"] == [{"type": "input_text", "text": "Go on."}]
    assert (whole["first_id"], whole["last_id"]) == (whole["data"][0]["id"], whole["data"][-1]["id"])
    assert whole["has_more"] is False
    ids = [item["id"] for item in whole["data"]]
    assert len(set(ids)) == 5
    assert [item["id"] for item in listed()["data"]] == ids[::-1]
    found, after = [], ""
    while True:
        page = listed(f"order=asc&limit=2{after}")
        found += [item["id"] for item in page["data"]]
        if not page["has_more"]:
            break
        after = f"&after={page['last_id']}"
    assert found == ids
    for query, status in (("after=msg_1", 400), ("limit=0", 400), ("limit=101", 400), ("order=up", 400)):
        assert client.ask(path, method="GET", query=query)[0] == status
    assert client.ask(path, method="GET", key=KEYS[1])[0] == 404


def test_a_stored_response_is_not_streamed_again():
    client, _ = over(["a"])
    id = client.create()[1]["id"]
    status, _, text = client.ask(f"/{id}", method="GET", query="stream=true")
    assert (status, json.loads(text)["error"]["param"]) == (400, "stream")
    assert client.ask(f"/{id}", method="GET", query="stream=false")[0] == 200


def test_only_allowed_tools_are_offered():
    client, seen = over([*CALLED], tools=ToolCalling(format=HERMES))
    tools = [TOOL, TOOL | {"name": "g"}]
    response = client.create(tools=tools, tool_choice=ALLOWED)[1]
    assert [tool["function"]["name"] for tool in seen[-1][1]["tools"]] == ["f"]
    assert response["tool_choice"] == ALLOWED
    assert [tool["name"] for tool in response["tools"]] == ["f", "g"]
    assert client.create(tools=tools, tool_choice=ALLOWED | {"mode": "required"})[0] == 200


def test_responses_of_another_key_do_not_exist():
    client, _ = over(["a"])
    id = client.create()[1]["id"]
    unknown = client.create(previous_response_id="resp_1")
    for status, body in (client.create(previous_response_id=id, key=KEYS[1]), unknown):
        assert (status, body["error"]["code"]) == (404, "response_not_found")
        assert body["error"]["param"] == "previous_response_id"
    for method in ("GET", "DELETE"):
        assert client.ask(f"/{id}", method=method, key=KEYS[1])[0] == 404
    assert client.ask(f"/{id}", method="GET")[0] == 200
    status, _, text = client.ask(f"/{id}", method="DELETE")
    assert (status, json.loads(text)) == (200, {"id": id, "object": "response", "deleted": True})
    assert client.ask(f"/{id}", method="DELETE")[0] == 404
    assert client.create(previous_response_id=id)[0] == 404


def entry(num_bytes):
    """Of this size."""
    return Entry([], b"a" * num_bytes, {})


def is_kept(kept, tenant, id):
    return id in kept._of.get(tenant, {})


def test_the_least_recently_used_response_makes_room():
    kept = Kept(3, 1000)
    for id in "abc":
        kept.put("", id, entry(1))
    kept.find("", "a")
    kept.put("", "d", entry(1))
    assert [id for id in "abcd" if is_kept(kept, "", id)] == ["a", "c", "d"]
    kept.put("", "e", entry(998))
    assert [id for id in "abcde" if is_kept(kept, "", id)] == ["a", "d", "e"]
    kept.put("", "f", entry(1001))
    assert not is_kept(kept, "", "f")
    assert kept._num_bytes.total() == 1000
    none = Kept(0, 1000)
    none.put("", "a", entry(1))
    assert not is_kept(none, "", "a")


def test_a_key_makes_room_for_its_own_responses():
    kept = Kept(1000, 1000)
    kept.put("quiet", "q", entry(100))
    for i in range(50):
        kept.put("loud", str(i), entry(100))
    assert is_kept(kept, "quiet", "q")
    assert is_kept(kept, "loud", "49")


def test_random_uses_keep_the_limits():
    rng = random.Random(3)
    kept = Kept(20, 2000)
    for i in range(3000):
        tenant, id = rng.choice("abc"), str(rng.randrange(40))
        if is_kept(kept, tenant, id):
            kept.drop(tenant, id) if rng.random() < 0.3 else kept.find(tenant, id)
        else:
            kept.put(tenant, id, entry(rng.randrange(1, 500)))
            assert is_kept(kept, tenant, id) or i == 0 or sum(map(len, kept._of.values())) > 0
        sizes = {t: sum(e.num_bytes for e in of.values()) for t, of in kept._of.items()}
        assert sizes == {t: kept._num_bytes[t] for t in sizes}
        assert sum(sizes.values()) <= 2000
        assert sum(map(len, kept._of.values())) <= 20


def test_conversations_are_recorded_whole(tmp_path):
    path = tmp_path / "chats.jsonl"
    client, _ = over(["<think>", "Hm", "</think>", *CALLED], tools=THINKS_AND_CALLS)
    client.service.recorder = Recorder(path, None)
    first = client.create(tools=[TOOL], session_id="s")[1]
    client.stream(tools=[TOOL], input=[RESULT], previous_response_id=first["id"], session_id="s")
    client.service.recorder.close()
    log = read_log(path)
    assert not log.refused
    roles = [[message["role"] for message in session.messages] for session in log.sessions]
    assert max(roles, key=len) == ["user", "assistant", "tool", "assistant"]
    assert log.sessions[0].name == "s"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [item["type"] for item in lines[1]["request"]["input"][1:]] == [
        *("reasoning", "function_call", "function_call_output")
    ]
    assert "previous_response_id" not in lines[1]["request"]


REFUSED = [
    ({"model": "other"}, 404, "no model 'other' here"),
    ({"input": 7}, 400, "input: this server reads text only"),
    ({"input": []}, 400, "input: List should have at least 1 item"),
    ({"input": [7]}, 400, "input.0: an item is an object whose type is 'message' or"),
    ({"input": [{"role": "other", "content": "a"}]}, 400, "input.0.role"),
    (
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
        400,
        "input.0.content.0: this server reads text only, got an 'input_image' part; leave it out",
    ),
    ({"input": [USER, {"role": "user", "content": [{"type": "input_file"}]}]}, 400, "input.1.content.0"),
    ({"input": [RESULT | {"output": [{"type": "input_image"}]}]}, 400, "input.0.output.0: this server"),
    ({"input": [USER, {"type": "web_search_call", "id": "1"}]}, 400, "input.1: this server reads text only"),
    (
        {"input": [USER, {"type": "item_reference", "id": "1"}]},
        404,
        "no stored response has an output item '1'",
    ),
    ({"include": ["message.output_text.logprobs"], "top_logprobs": -1}, 400, "top_logprobs"),
    ({"tools": [TOOL], "tool_choice": ALLOWED | {"tools": []}}, 400, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": ALLOWED | {"mode": "none"}}, 400, "tool_choice"),
    (
        {"tools": [TOOL], "tool_choice": ALLOWED | {"tools": [OTHER]}},
        400,
        "allows no tool of this request: g",
    ),
    ({"tools": [{"type": "web_search"}]}, 400, "tools.0: tools of type 'web_search' are not supported"),
    ({"tools": [TOOL, {"type": "mcp", "server_label": "x"}]}, 400, "tools.1: tools of type 'mcp'"),
    ({"tools": [{"type": "code_interpreter"}]}, 400, "leave it out, or run it yourself"),
    ({"tool_choice": "required"}, 400, "tool_choice needs tools"),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "g"}}, 400, "names no tool"),
    ({"tools": [TOOL], "tool_choice": {"type": "file_search"}}, 400, "tool_choice"),
    ({"truncation": "auto"}, 400, "truncation: Input should be 'disabled', got 'auto'"),
    ({"background": True}, 400, "background is not supported; wait for the response"),
    ({"conversation": "conv_1"}, 400, "conversation is not supported; send the whole conversation"),
    ({"prompt": {"id": "1"}}, 400, "prompt is not supported"),
    ({"response_format": {"type": "text"}}, 400, "use text.format"),
    ({"n": 2}, 400, "n: Input should be less than or equal to 1"),
    ({"max_output_tokens": 0}, 400, "max_output_tokens"),
    ({"text": {"format": {"type": "json_schema", "name": "a"}}}, 400, "text.format: schema belongs to"),
    ({"metadata": {"a": "b" * 513}}, 400, "metadata.a"),
    ({"kv_retain": 5}, 400, "kv_retain: needs session_id"),
    ({"kv_format": "int2"}, 400, "kv_format"),
    ({"previous_response_id": "x" * 257}, 400, "previous_response_id"),
]


@pytest.mark.parametrize(("change", "status", "message"), REFUSED)
@pytest.mark.parametrize("stream", [False, True])
def test_what_cannot_be_served_is_refused(change, status, message, stream):
    client, _ = over(["a"])
    found, body = client.create(**change, stream=stream)
    assert found == status
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert message in body["error"]["message"]


def test_unknown_fields_are_named_and_refused_by_a_strict_server():
    client, _ = over(["a"])
    names = client.ask(body=ASK | {"max_tokens": 5, "max_tool_calls": 1, "store": True})[1][HEADER]
    assert names == "max_tokens, max_tool_calls"
    client.service.is_strict = True
    status, body = client.create(max_tokens=5)
    assert (status, body["error"]["code"]) == (400, "unknown_field")
    assert "did you mean 'max_output_tokens'?" in body["error"]["message"]
    assert client.create(include=["x"])[0] == 200


def test_an_effort_that_no_template_reads_is_named():
    client, _ = over(["a"])
    given = ASK | {"reasoning": {"effort": "low"}}

    async def forms():
        return Forms(variables=frozenset())

    client.service.prompts.forms = forms
    assert client.ask(body=given)[1][HEADER] == "reasoning.effort"


DAMAGE = [None, True, -1, 1.5, "", "x" * 300, [], {}, [[]], [None], {"type": "x"}, {"type": None}, 1 << 70]


def damaged(value, rng):
    """A copy with something replaced, left out or doubled."""
    value = deepcopy(value)
    places = []

    def look(part):
        for key in part if isinstance(part, dict) else range(len(part)):
            places.append((part, key))
            if isinstance(part[key], dict | list):
                look(part[key])

    look(value)
    part, key = rng.choice(places)
    kind = rng.randrange(4)
    if kind == 0:
        del part[key]
    elif kind == 1 and isinstance(part, list):
        part.append(deepcopy(part[key]))
    else:
        part[key] = deepcopy(rng.choice(DAMAGE))
    return value


def test_damaged_bodies_are_no_fault_of_the_server():
    client, _ = over(WORDS, tools=THINKS_AND_CALLS)
    whole = ASK | {
        "input": [USER, THOUGHT, CALL, RESULT, ANSWER, USER],
        "instructions": "a",
        "tools": [TOOL],
        "tool_choice": {"type": "function", "name": "f"},
        "parallel_tool_calls": True,
        "text": {"format": {"type": "text"}, "verbosity": "medium"},
        "reasoning": {"effort": "low", "summary": "auto"},
        "previous_response_id": client.create()[1]["id"],
        "metadata": {"a": "b"},
        "stream": False,
        "store": True,
        "max_output_tokens": 5,
        "truncation": "disabled",
        "include": ["x"],
    }
    assert client.create(**whole)[0] == 200
    rng, statuses = random.Random(5), []
    for _ in range(600):
        body = whole
        for _ in range(rng.choice((1, 1, 2, 4))):
            body = damaged(body, rng)
        status, _, text = client.ask(body=body)
        statuses.append(status)
        assert status in (200, 400, 404), (body, text)
        if status != 200:
            assert set(json.loads(text)["error"]) == {"message", "type", "param", "code"}
    assert min(statuses.count(200), statuses.count(400)) > 50
