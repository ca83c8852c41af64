"""Ollama's API of a real server, as its own client and as plain HTTP see it."""

import http.client
import json

import pytest

from tests.waiting import HANG_S

ASK = {"model": "tiny", "messages": [{"role": "user", "content": "Tell me of the river."}]}
COLD = {"temperature": 0, "num_predict": 12}
CITY = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]}


def send(server, path, body=None, method="POST"):
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=HANG_S)
    try:
        given = None if body is None else json.dumps(body)
        connection.request(method, path, given, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        return answer.status, answer.headers["Content-Type"], answer.read()
    finally:
        connection.close()


def whole(server, path, body):
    return json.loads(send(server, path, body | {"stream": False})[2])


def test_answers_are_those_of_openais_routes(common_server):
    openais = {"temperature": 0, "max_tokens": 12, "stream": False}
    wanted = whole(common_server, "/v1/chat/completions", ASK | openais)
    found = whole(common_server, "/api/chat", ASK | {"options": COLD})
    assert found["message"]["content"] == wanted["choices"][0]["message"]["content"]
    usage = wanted["usage"]
    assert (found["prompt_eval_count"], found["eval_count"]) == (usage["prompt_tokens"], 12)
    assert found["done_reason"] == "length"
    prompt = ASK["messages"][0]["content"]
    generated = whole(common_server, "/api/generate", {"model": "tiny", "prompt": prompt, "options": COLD})
    assert generated["response"] == found["message"]["content"]
    wanted = whole(common_server, "/v1/completions", {"prompt": "The sea"} | openais)
    raw = {"model": "tiny", "prompt": "The sea", "raw": True, "options": COLD}
    assert whole(common_server, "/api/generate", raw)["response"] == wanted["choices"][0]["text"]
    status, kind, text = send(common_server, "/api/generate", raw)
    lines = [json.loads(line) for line in text.splitlines()]
    assert (status, kind) == (200, "application/x-ndjson")
    assert "".join(line["response"] for line in lines) == wanted["choices"][0]["text"]
    assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]


def test_more_tokens_than_fit_may_be_asked_for(common_server):
    body = {"model": "tiny", "prompt": "x", "raw": True, "options": {"num_predict": 1 << 20, "stop": ["e"]}}
    found = whole(common_server, "/api/generate", body)
    assert (found["done_reason"], "e" in found["response"]) == ("stop", False)


def test_the_routes_that_clients_ask_before(common_server):
    for path in ("/api/tags", "/api/ps"):
        status, _, text = send(common_server, path, method="GET")
        [model] = json.loads(text)["models"]
        assert (status, model["name"], model["model"]) == (200, "tiny", "tiny")
    shown = whole(common_server, "/api/show", {"model": "tiny"})
    assert shown["capabilities"] == ["completion", "tools"]
    assert shown["digest"] == model["digest"]
    assert "version" in json.loads(send(common_server, "/api/version", method="GET")[2])


def test_ollamas_client_talks_to_it(common_server):
    ollama = pytest.importorskip("ollama")
    client = ollama.Client(host=common_server.url, timeout=HANG_S)
    assert [model.model for model in client.list().models] == ["tiny"]
    answer = client.chat(**ASK, options=COLD)
    assert (answer.done, answer.done_reason, answer.eval_count) == (True, "length", 12)
    parts = list(client.chat(**ASK, options=COLD, stream=True))
    assert "".join(part.message.content for part in parts) == answer.message.content
    formatted = client.generate("tiny", "Where?", format=CITY | {"additionalProperties": False})
    assert json.loads(formatted.response)["city"] in ("Rome", "Oslo")

    def weather(city: str) -> str:
        """Tell the weather of a city."""

    call = {"function": {"name": "weather", "arguments": {"city": "Rome"}}}
    turns = [
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_name": "weather", "content": "x"},
    ]
    with_tools = client.chat("tiny", ASK["messages"] + turns, tools=[weather], options=COLD)
    assert with_tools.prompt_eval_count > answer.prompt_eval_count + 50
    for wrong in ({"model": "other"}, {"options": {"top_p": 2}}, {"think": True}):
        with pytest.raises(ollama.ResponseError) as refused:
            list(client.chat(**ASK | wrong, stream=True))
        assert refused.value.status_code == (404 if "model" in wrong else 400)
        assert refused.value.error
