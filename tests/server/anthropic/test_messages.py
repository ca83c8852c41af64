"""The Messages API as the official `anthropic` client sees it."""

import http.client
import json
import os
import signal
import urllib.request

import anthropic
import pytest
from prometheus_client.parser import text_string_to_metric_families

import kvq
from tests.server.kit import Server
from tests.waiting import HANG_S

OPTIONS = ("--kv", "int4", "--num-blocks", "64", "--max-num-seqs", "8", "--tool-call-parser", "hermes")
KEY = "secret"
ASK = [{"role": "user", "content": "Tell me of the sea."}]
PROMPT = "<|user|>\nTell me of the sea.\n<|assistant|>\n"
WEATHER = {
    "name": "get_weather",
    "description": "The weather to come.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"type": "integer", "maximum": 9}},
        "required": ["city", "days"],
    },
}
NOW = {"name": "now", "input_schema": {"type": "object", "properties": {}}}
COLD = {"temperature": 0}
LONG = " ".join(f"Rule {i}: tell the truth, and be kind to whoever asks." for i in range(30))


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text(KEY + "\nother\n")
    keys.chmod(0o600)
    strict = "--strict-requests"  # what the client sends by itself is taken all the same
    with Server(*OPTIONS, strict, "--api-key-file", str(keys), key=KEY) as running:
        yield running


@pytest.fixture(scope="module")
def client(server):
    return anthropic.Anthropic(base_url=server.url, api_key=KEY, max_retries=0, timeout=HANG_S)


@pytest.fixture(scope="module")
def expected():
    with kvq.LLM("tiny", "int4", num_blocks=64) as llm:
        yield lambda prompt, **params: llm.generate([prompt], kvq.SamplingParams(**params))[0]


def create(client, messages=ASK, *, extra_body=None, **fields):
    """The client knows no temperature any more."""
    body = COLD | (extra_body or {})
    given = {"model": "tiny", "max_tokens": 20, "messages": messages} | fields
    return client.messages.create(**given, extra_body=body)


def send(server, raw, path="/v1/messages", method="POST", headers=(), **options):
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=HANG_S)
    try:
        head = {"Content-Type": "application/json", "x-api-key": KEY, **dict(headers)}
        connection.request(method, path, raw, head, **options)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def test_answers_are_the_engines(client, expected):
    answer = create(client)
    wanted = expected(PROMPT, max_tokens=20)
    assert [block.type for block in answer.content] == ["text"]
    assert answer.content[0].text == wanted.outputs[0].text
    assert (answer.type, answer.role, answer.model) == ("message", "assistant", "tiny")
    assert (answer.stop_reason, answer.stop_sequence) == ("max_tokens", None)
    assert answer.usage.output_tokens == 20
    usage = answer.usage
    assert usage.input_tokens + usage.cache_read_input_tokens == len(wanted.prompt_token_ids)


def test_systems_blocks_and_a_begun_answer_are_the_prompt(client, expected):
    answer = create(
        client,
        [
            {"role": "user", "content": [{"type": "text", "text": "A "}, {"type": "text", "text": "story."}]},
            {"role": "assistant", "content": "It was"},
        ],
        system=[{"type": "text", "text": "Be kind."}],
        metadata={"user_id": "someone"},
        service_tier="standard_only",
        thinking={"type": "disabled"},
    )
    prompt = "<|system|>\nBe kind.\n<|user|>\nA story.\n<|assistant|>\nIt was"
    assert answer.content[0].text == expected(prompt, max_tokens=20).outputs[0].text
    text = create(client, system="Be kind.", max_tokens=5).content[0].text
    assert text == expected("<|system|>\nBe kind.\n" + PROMPT, max_tokens=5).outputs[0].text


def test_an_answer_ends_before_a_stop_sequence_and_says_which(client):
    asked = [{"role": "user", "content": "Tell me of the river."}]  # answered in words that differ
    text = create(client, asked).content[0].text
    stop = text.split()[2]
    answer = create(client, asked, stop_sequences=["never", stop])
    assert answer.content[0].text == text[: text.index(stop)]
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", stop)


def test_an_answer_that_holds_to_a_schema_ends_its_turn(client):
    schema = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]}
    format = {"type": "json_schema", "schema": schema | {"additionalProperties": False}}
    answer = create(client, max_tokens=60, output_config={"format": format})
    assert json.loads(answer.content[0].text)["city"] in ("Rome", "Oslo")
    assert (answer.stop_reason, answer.stop_sequence) == ("end_turn", None)


def test_streams_add_up_to_the_whole(client):
    whole = create(client, max_tokens=25)
    with client.messages.stream(model="tiny", max_tokens=25, messages=ASK, extra_body=COLD) as stream:
        assert "".join(stream.text_stream) == whole.content[0].text
        final = stream.get_final_message()
    assert final.content[0].text == whole.content[0].text
    assert final.stop_reason == whole.stop_reason
    assert final.usage.output_tokens == 25


def test_the_events_of_a_stream_come_in_their_order(server):
    body = {"model": "tiny", "max_tokens": 6, "temperature": 0, "messages": ASK, "stream": True}
    status, raw = send(server, json.dumps(body).encode())
    assert status == 200
    names, events = [], []
    for entry in raw.decode().strip().split("\n\n"):
        name, data = entry.split("\n")
        names.append(name.removeprefix("event: "))
        events.append(json.loads(data.removeprefix("data: ")))
    assert names == [event["type"] for event in events]
    kinds = [name for i, name in enumerate(names) if names[i - 1 : i] != [name]]
    assert kinds == [
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    first, last = events[0]["message"], events[-2]
    assert (first["content"], first["stop_reason"], first["usage"]["output_tokens"]) == ([], None, 0)
    assert last["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}
    assert last["usage"]["output_tokens"] == 6
    assert last["usage"]["input_tokens"] == first["usage"]["input_tokens"]


def metrics(server):
    request = urllib.request.Request(server.url + "/metrics", headers={"x-api-key": KEY})
    with urllib.request.urlopen(request, timeout=HANG_S) as answer:
        families = text_string_to_metric_families(answer.read().decode())
    return {(s.name, *s.labels.values()): s.value for family in families for s in family.samples}


def test_a_marked_prefix_is_written_once_and_then_read_through_any_pressure(client, server):
    system = [{"type": "text", "text": LONG, "cache_control": {"type": "ephemeral"}}]
    count = client.messages.count_tokens(model="tiny", messages=ASK, system=LONG).input_tokens
    first = create(client, system=system, max_tokens=2).usage
    assert first.cache_creation_input_tokens > 300
    assert first.input_tokens + first.cache_creation_input_tokens + first.cache_read_input_tokens == count
    pinned = metrics(server)["kvq_blocks_pinned", "0"]
    assert 0 < pinned <= 32
    for i in range(4):  # two of them fill the pool
        create(client, [{"role": "user", "content": f"{i} " + 2 * LONG}], max_tokens=1)
    other = [{"role": "user", "content": "Something else."}]
    second = create(client, other, system=system, max_tokens=2).usage
    assert second.cache_read_input_tokens >= first.cache_creation_input_tokens
    assert second.cache_creation_input_tokens == 0
    with client.messages.stream(
        model="tiny", max_tokens=2, messages=other, system=system, extra_body=COLD
    ) as stream:
        usages = [event.message.usage for event in stream if event.type == "message_start"]
    assert usages[0].cache_read_input_tokens >= first.cache_creation_input_tokens
    assert metrics(server)["kvq_blocks_pinned", "0"] == pinned
    stranger = client.copy(api_key="other")
    assert create(stranger, other, system=LONG, max_tokens=2).usage.cache_read_input_tokens == 0


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"max_tokens": 0}, anthropic.BadRequestError, "max_tokens: Input should be greater"),
        ({"max_tokens": 10**6}, anthropic.BadRequestError, "more than the context"),
        ({"extra_body": {"temperature": 1.5}}, anthropic.BadRequestError, "temperature: "),
        ({"messages": []}, anthropic.BadRequestError, "messages: "),
        ({"model": "other"}, anthropic.NotFoundError, "no model 'other' here"),
        (
            {"thinking": {"type": "adaptive"}},
            anthropic.BadRequestError,
            "does not think",
        ),
        ({"extra_body": {"mcp_servers": [{}]}}, anthropic.BadRequestError, "mcp_servers is not supported"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, anthropic.BadRequestError, "tools of type"),
        ({"tool_choice": {"type": "any"}}, anthropic.BadRequestError, "tool_choice needs tools"),
        (
            {"tool_choice": {"type": "tool", "name": "other"}, "tools": [WEATHER]},
            anthropic.BadRequestError,
            "names no tool of this request",
        ),
        ({"stop_sequences": [""]}, anthropic.BadRequestError, "stop must be strings"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            anthropic.BadRequestError,
            "messages.0.content.0: this server reads text only, got an 'image' block",
        ),
        ({"messages": [{"role": "system", "content": "x"}]}, anthropic.BadRequestError, "messages.0.role"),
        (
            {"system": [{"type": "text", "text": "x", "cache_control": {"type": "lasting"}}]},
            anthropic.BadRequestError,
            "cache_control.type",
        ),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_cannot_be_served_is_refused_with_anthropics_errors(client, stream, change, error, message):
    with pytest.raises(error) as caught:
        create(client, **change, stream=stream)
    assert caught.value.body["type"] == "error"
    wanted = "not_found_error" if error is anthropic.NotFoundError else "invalid_request_error"
    assert caught.value.body["error"]["type"] == wanted
    assert message in caught.value.body["error"]["message"]


@pytest.mark.parametrize(
    ("path", "method", "raw", "status", "type"),
    [
        ("/v1/messages", "POST", b"{", 400, "invalid_request_error"),
        ("/v1/messages", "GET", b"", 405, "invalid_request_error"),
        ("/v1/messages/batches", "POST", b"{}", 404, "not_found_error"),
        ("/v1/messages/count_tokens", "POST", b"{}", 400, "invalid_request_error"),
        ("/v1/messages", "POST", b"x" * ((8 << 20) + 1), 413, "request_too_large"),
    ],
)
def test_every_failure_on_its_paths_is_an_error_of_anthropics(server, path, method, raw, status, type):
    found, answer = send(server, raw, path, method)
    assert found == status
    answer = json.loads(answer)
    assert answer["type"] == "error"
    assert answer["error"]["type"] == type


def test_a_body_that_turns_out_too_large_is_refused(server):
    chunks = [b"x" * (1 << 20)] * 9
    found, answer = send(server, iter(chunks), encode_chunked=True, headers={"Transfer-Encoding": "chunked"})
    assert (found, json.loads(answer)["error"]["type"]) == (413, "request_too_large")


def check_weather(block):
    assert (block.type, block.name) == ("tool_use", "get_weather")
    assert block.input["city"] in ("Rome", "Oslo")
    assert block.input["days"] <= 9


def test_a_tool_that_has_to_be_used_is_used(client):
    options = {"tools": [WEATHER, NOW], "tool_choice": {"type": "tool", "name": "get_weather"}}
    answer = create(client, max_tokens=100, **options)
    assert answer.stop_reason == "tool_use"
    [block] = answer.content
    check_weather(block)
    with client.messages.stream(
        model="tiny", max_tokens=100, messages=ASK, extra_body=COLD, **options
    ) as stream:
        events = list(stream)
        final = stream.get_final_message()
    assert final.stop_reason == "tool_use"
    assert final.content[0].input == block.input
    deltas = [event.delta for event in events if event.type == "content_block_delta"]
    assert {delta.type for delta in deltas} == {"input_json_delta"}
    assert len(deltas) > 3, "arguments grow"

    turns = [
        *ASK,
        {"role": "assistant", "content": answer.content},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": block.id, "content": "Rain."}]},
    ]
    after = create(client, turns, max_tokens=5, tools=[WEATHER, NOW])
    assert after.stop_reason == "max_tokens"
    assert after.usage.input_tokens + after.usage.cache_read_input_tokens > answer.usage.input_tokens


def test_any_tool_and_no_tool(client):
    choice = {"type": "any", "disable_parallel_tool_use": True}
    answer = create(client, max_tokens=100, tools=[WEATHER, NOW], tool_choice=choice)
    assert [block.type for block in answer.content] == ["tool_use"]
    assert answer.content[0].name in ("get_weather", "now")
    answer = create(client, tools=[WEATHER], tool_choice={"type": "none"})
    assert answer.content[0].text == create(client).content[0].text


def test_the_clients_own_loop_over_tools_sends_whole_conversations(client):
    """It asks for a thread at first, of which it would send only what is new."""

    @anthropic.beta_tool
    def now() -> str:
        """What time it is."""
        return "Noon."

    choice = {"type": "tool", "name": "now", "disable_parallel_tool_use": True}
    options = {"model": "tiny", "max_tokens": 100, "messages": ASK, "extra_body": COLD}
    runner = client.beta.messages.tool_runner(**options, tools=[now], tool_choice=choice, max_iterations=2)
    used = [answer.usage for answer in runner]
    first, second = [usage.input_tokens + usage.cache_read_input_tokens for usage in used]
    assert second > first


def test_a_wrong_key_is_refused(client):
    with pytest.raises(anthropic.AuthenticationError, match="x-api-key") as caught:
        create(client.copy(api_key="wrong"))
    assert caught.value.body["error"]["type"] == "authentication_error"


def test_a_stream_whose_engine_ends_ends_with_an_error(client, server):  # the last one: nobody waits
    stream = create(client, max_tokens=1500, stream=True, extra_body={"temperature": 1})
    seen = [next(stream)]
    os.kill(server.engine_pid, signal.SIGKILL)
    with pytest.raises(anthropic.APIStatusError) as caught:
        seen.extend(stream)
    assert caught.value.body["error"]["type"] == "overloaded_error"
    assert seen[0].type == "message_start"
    with pytest.raises(anthropic.InternalServerError) as caught:
        create(client)
    assert caught.value.status_code == 503
    assert caught.value.body["error"]["type"] == "overloaded_error"
