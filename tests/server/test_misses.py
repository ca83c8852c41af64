"""The server says where a prompt left what is cached: in usage, in metrics, and on its page."""

import json
import urllib.request

import pytest

from tests.server.kit import Server
from tests.waiting import HANG_S

SYSTEM = "You are a helpful person. Today is {day}, and we talk about the sea. " + "Be brief, please. " * 8


@pytest.fixture(scope="module")
def server():
    with Server("--num-blocks", "64", "--block-size", "8", "--max-num-seqs", "2") as running:
        yield running


def post(server, path, body, **headers):
    request = urllib.request.Request(
        server.url + path,
        json.dumps(body).encode(),
        {"Content-Type": "application/json", "Authorization": f"Bearer {server.key}", **headers},
    )
    with urllib.request.urlopen(request, timeout=HANG_S) as answer:
        return json.loads(answer.read())


def chat(day, *turns, **more):
    roles = ("user", "assistant")
    said = [{"role": roles[i % 2], "content": turn} for i, turn in enumerate(turns)]
    system = {"role": "system", "content": SYSTEM.format(day=day)}
    return {"model": "tiny", "messages": [system, *said], "max_tokens": 1, **more}


def details(server, body, path="/v1/chat/completions"):
    return post(server, path, body)["usage"]["prompt_tokens_details"]


def counts(server):
    request = urllib.request.Request(server.url + "/metrics")
    with urllib.request.urlopen(request, timeout=HANG_S) as answer:
        lines = answer.read().decode().splitlines()
    name = "kvq_prefix_misses_total{cause="
    found = dict(line.removeprefix(name).split("} ") for line in lines if line.startswith(name))
    return {cause.strip('"'): float(count) for cause, count in found.items()}


def test_usage_and_metrics_name_place_and_cause(server):
    assert set(counts(server).values()) == {0.0}
    first = details(server, chat("Monday", "Where is the ship?"))
    assert first["misses"] == [{"cause": "new_text", "token": 0, "message": 1, "part": "template"}]
    [changed] = details(server, chat("Sunday", "Where is the ship?"))["misses"]
    assert (changed["cause"], changed["message"], changed["part"]) == ("changed_text", 1, "text")
    tool = {"type": "function", "function": {"name": "go", "description": "goes", "parameters": {}}}
    [tools] = details(server, chat("Monday", "Where is the ship?", tools=[tool], tool_choice="auto"))[
        "misses"
    ]
    assert (tools["cause"], tools["message"], tools["part"]) == ("template", 1, "template")
    [added] = details(server, chat("Monday", "Where is the ship?", "At sea.", "And now?"))["misses"]
    assert added["cause"] == "new_text"
    assert added["message"] in (2, 3)
    [salted] = details(server, chat("Monday", "Where is the ship?", cache_salt="x"))["misses"]
    assert salted["cause"] == "salt"
    found = counts(server)
    assert {cause: count for cause, count in found.items() if count} == {
        "new_text": 2,
        "changed_text": 1,
        "template": 1,
        "salt": 1,
    }


def test_an_evicted_prompt_of_completions(server):
    prompt = "The old ship sailed to the north. " * 8
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 1}
    details(server, body, "/v1/completions")
    for word in ("one", "two", "three"):
        details(server, {**body, "prompt": f"{word} " * 400}, "/v1/completions")
    [found] = details(server, body, "/v1/completions")["misses"]
    assert found["cause"] == "evicted"
    assert found["evicted_for"].isdigit(), "the number on the page"
    assert 0 <= found["seconds_ago"] < HANG_S
    assert "message" not in found


def test_a_message_of_anthropics_protocol_is_counted(server):
    before = counts(server)
    body = {"model": "tiny", "max_tokens": 1, "messages": [{"role": "user", "content": "Hello you. " * 20}]}
    post(server, "/v1/messages", body, **{"x-api-key": server.key})
    after = counts(server)
    assert sum(after.values()) == sum(before.values()) + 1
