"""The Responses API as the official `openai` client sees it."""

import json

import openai
import pytest

import kvq
from tests.server.kit import Server
from tests.waiting import HANG_S

KEYS = ("secret", "other")
OPTIONS = ("--kv", "int4", "--num-blocks", "64", "--max-num-seqs", "8", "--tool-call-parser", "hermes")
ASK = {"model": "tiny", "input": "Tell me of the sea.", "max_output_tokens": 20, "temperature": 0}
PROMPT = "<|user|>\nTell me of the sea.\n<|assistant|>\n"
WEATHER = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather to come.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"type": "integer", "maximum": 9}},
        "required": ["city", "days"],
        "additionalProperties": False,
    },
    "strict": True,
}
SCHEMA = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]}
FORMAT = {"type": "json_schema", "name": "a", "schema": SCHEMA | {"additionalProperties": False}}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text("\n".join(KEYS))
    keys.chmod(0o600)
    strict = "--strict-requests"  # what the client sends by itself is taken all the same
    limits = ("--stored-responses", "3", "--stored-responses-memory", "1MiB")
    with Server(*OPTIONS, *limits, strict, "--api-key-file", str(keys), key=KEYS[0]) as running:
        yield running


@pytest.fixture(scope="module")
def client(server):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEYS[0], max_retries=0, timeout=HANG_S)


def stream(client, **given):
    """The events, and the response that the client puts together or, if it is incomplete, the last one."""
    with client.responses.stream(**ASK | given) as events:
        seen = list(events)
        if seen[-1].type == "response.completed":
            return seen, events.get_final_response()
        return seen, seen[-1].response


def test_responses_are_the_engines(client):
    response = client.responses.create(**ASK)
    with kvq.LLM("tiny", "int4", num_blocks=64) as llm:
        [expected] = llm.generate([PROMPT], kvq.SamplingParams(temperature=0, max_tokens=20))
    assert response.output_text == expected.outputs[0].text
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    usage = response.usage
    assert (usage.input_tokens, usage.output_tokens) == (len(expected.prompt_token_ids), 20)
    assert usage.total_tokens == usage.input_tokens + 20
    again = client.responses.create(**ASK).usage
    assert again.input_tokens_details.cached_tokens > 0
    assert again.output_tokens_details.reasoning_tokens == 0
    seen, streamed = stream(client)
    assert seen[-1].type == "response.incomplete"
    assert streamed.output_text == response.output_text
    assert "".join(event.delta for event in seen if event.type.endswith("text.delta")) == response.output_text


def test_a_schema_is_held_whole_and_streamed(client):
    given = {"text": {"format": FORMAT}, "max_output_tokens": 60}
    whole = client.responses.create(**ASK | given)
    assert json.loads(whole.output_text)["city"] in ("Rome", "Oslo")
    assert (whole.status, whole.incomplete_details) == ("completed", None)
    assert whole.text.format.type == "json_schema"
    assert stream(client, **given)[1].output_text == whole.output_text


def test_a_forced_call_and_its_result(client):
    given = {"tools": [WEATHER], "tool_choice": {"type": "function", "name": "get_weather"}}
    given["max_output_tokens"] = 100
    whole = client.responses.create(**ASK | given)
    seen, streamed = stream(client, **given)
    for response in (whole, streamed):
        [call] = response.output
        assert (call.type, call.name, call.status) == ("function_call", "get_weather", "completed")
        assert json.loads(call.arguments)["city"] in ("Rome", "Oslo")
        assert response.status == "completed"
    assert whole.output[0].arguments == streamed.output[0].arguments
    assert len([event for event in seen if event.type == "response.function_call_arguments.delta"]) > 3
    [call] = whole.output
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "Rain."}
    later = {**ASK, "tools": [WEATHER], "max_output_tokens": 5}
    by_id = client.responses.create(**later | {"input": [result], "previous_response_id": whole.id})
    sent = [{"role": "user", "content": ASK["input"]}, *whole.output, result]
    by_items = client.responses.create(**later | {"input": sent})
    assert by_id.output_text == by_items.output_text
    assert by_id.usage.input_tokens == by_items.usage.input_tokens > whole.usage.input_tokens


def test_responses_are_kept_for_their_key_alone_and_least_recently_used_ones_go(client):
    ids = [client.responses.create(**ASK | {"max_output_tokens": 1}).id for _ in range(3)]
    assert client.responses.retrieve(ids[0]).id == ids[0]
    newest = client.responses.create(**ASK | {"max_output_tokens": 1, "previous_response_id": ids[0]})
    with pytest.raises(openai.NotFoundError):  # it was used least recently
        client.responses.retrieve(ids[1])
    stranger = client.copy(api_key=KEYS[1])
    for found in (client.responses.retrieve(ids[0]), client.responses.retrieve(newest.id)):
        with pytest.raises(openai.NotFoundError):
            stranger.responses.retrieve(found.id)
        with pytest.raises(openai.NotFoundError):
            stranger.responses.delete(found.id)
        with pytest.raises(openai.NotFoundError) as caught:
            stranger.responses.create(**ASK | {"previous_response_id": found.id})
        assert caught.value.body["param"] == "previous_response_id"
    assert client.responses.retrieve(newest.id) == newest
    client.responses.delete(newest.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.create(**ASK | {"previous_response_id": newest.id})
    unkept = client.responses.create(**ASK | {"store": False, "max_output_tokens": 1})
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(unkept.id)


def test_refusals_are_the_clients_exceptions(client):
    image = [{"role": "user", "content": [{"type": "input_image", "image_url": "x", "detail": "auto"}]}]
    with pytest.raises(openai.BadRequestError, match=r"input\.0\.content\.0: this server reads text only"):
        client.responses.create(**ASK | {"input": image})
    with pytest.raises(openai.BadRequestError, match="max_tokens=1000000 are more than the context"):
        client.responses.create(**ASK | {"max_output_tokens": 10**6}, stream=True)


def test_no_text_is_logged(client, server):
    client.responses.create(**ASK | {"input": "Zyxxy sails.", "instructions": "Quuxly.", "user": "frobnik"})
    assert not {"Zyxxy", "Quuxly", "frobnik"} & set(server.log.replace(".", " ").split())


def test_log_probabilities_are_the_engines(client):
    given = {"include": ["message.output_text.logprobs"], "top_logprobs": 3}
    whole = client.responses.create(**ASK | given)
    with kvq.LLM("tiny", "int4", num_blocks=64) as llm:
        [expected] = llm.generate([PROMPT], kvq.SamplingParams(temperature=0, max_tokens=20, logprobs=3))
    wanted = expected.outputs[0].logprobs
    found = whole.output[0].content[0].logprobs
    assert [one.logprob for one in found] == pytest.approx([one.logprob for one in wanted], abs=1e-3)
    assert [len(one.top_logprobs) for one in found] == [3] * 20
    assert "".join(one.token for one in found) == whole.output_text
    seen, streamed = stream(client, **given)
    deltas = [one for event in seen if event.type == "response.output_text.delta" for one in event.logprobs]
    assert [one.logprob for one in deltas] == [one.logprob for one in streamed.output[0].content[0].logprobs]
    assert [one.logprob for one in deltas] == pytest.approx([one.logprob for one in found], abs=1e-3)
    assert client.responses.create(**ASK).output[0].content[0].logprobs == []


def test_input_items_as_the_client_lists_them(client):
    response = client.responses.create(**ASK)
    [item] = client.responses.input_items.list(response.id).data
    assert (item.role, item.content[0].text) == ("user", ASK["input"])


def test_recordings_have_no_log_probabilities(tmp_path):
    """Whose tokens would spell what is left out of the texts."""
    path = tmp_path / "chats.jsonl"
    given = ASK | {"include": ["message.output_text.logprobs"]}
    with Server(*OPTIONS, "--record", str(path)) as running:
        own = openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0, timeout=HANG_S)
        assert own.responses.create(**given).output[0].content[0].logprobs
        *_, last = own.responses.create(**given, stream=True)
        assert last.type == "response.incomplete"
    lines = [json.loads(line)["response"] for line in path.read_text().splitlines()]
    assert [line["output"][0]["content"][0]["logprobs"] for line in lines] == [[], []]
