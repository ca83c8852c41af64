"""The server as the official `openai` client sees it."""

import http.client
import json
import os
import re
import select
import signal
import socket
import urllib.request
from contextlib import ExitStack

import openai
import pytest
from click.testing import CliRunner
from prometheus_client.parser import text_string_to_metric_families

import kvq
from kvq.commands.chat import chat
from kvq.server.http.ignored import HEADER
from tests.server.kit import Server
from tests.waiting import HANG_S, wait_for

PROMPT = "The history of the city"
SEATS, QUEUE = 4, 2
OPTIONS = ("--kv", "int4", "--num-blocks", "1000", "--max-num-seqs", str(SEATS), "--max-queue", str(QUEUE))


@pytest.fixture(scope="module")
def server(common_server):
    return common_server


@pytest.fixture(scope="module")
def client(server):
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=HANG_S)


@pytest.fixture(scope="module")
def expected():
    with kvq.LLM("tiny", "int4", num_blocks=128) as llm:
        yield lambda prompt, **params: llm.generate([prompt], kvq.SamplingParams(**params))[0]


def test_completions_are_the_engines(client, expected):
    answer = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=20, temperature=0)
    wanted = expected(PROMPT, max_tokens=20)
    assert answer.choices[0].text == wanted.outputs[0].text
    assert answer.choices[0].finish_reason == wanted.outputs[0].finish_reason
    assert answer.usage.completion_tokens == 20
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 20


def test_prompts_in_all_forms_with_several_results_each(client, expected):
    tokens = expected(PROMPT, max_tokens=1).prompt_token_ids
    wanted = expected(PROMPT, max_tokens=9).outputs[0].text
    for prompt in (tokens, [PROMPT, PROMPT], [tokens, tokens]):
        answer = client.completions.create(model="tiny", prompt=prompt, max_tokens=9, temperature=0, n=2)
        count = 2 if isinstance(prompt[0], int) else 4
        assert [choice.index for choice in answer.choices] == list(range(count))
        assert [choice.text for choice in answer.choices] == [wanted] * count
    assert answer.usage.prompt_tokens_details.cached_tokens >= 0


@pytest.mark.parametrize("n", [1, 3])
def test_streamed_pieces_add_up_to_the_whole(client, n):
    options = {"model": "tiny", "prompt": PROMPT, "max_tokens": 25, "temperature": 1.0, "seed": 5, "n": n}
    whole = client.completions.create(**options)
    texts, usage = [""] * n, None
    for chunk in client.completions.create(**options, stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == [choice.text for choice in whole.choices]
    assert usage.completion_tokens == whole.usage.completion_tokens


def test_chats_follow_the_models_template(client, expected):
    messages = [{"role": "user", "content": "Tell me of the sea."}]
    prompt = "<|user|>\nTell me of the sea.\n<|assistant|>\n"
    wanted = expected(prompt, max_tokens=15, logprobs=2)
    answer = client.chat.completions.create(
        model="tiny",
        messages=messages,
        max_completion_tokens=15,
        temperature=0,
        logprobs=True,
        top_logprobs=2,
    )
    choice = answer.choices[0]
    assert choice.message.content == wanted.outputs[0].text
    assert len(choice.logprobs.content) == len(wanted.outputs[0].logprobs)
    assert choice.logprobs.content[0].logprob == pytest.approx(
        wanted.outputs[0].logprobs[0].logprob, abs=1e-4
    )
    parts = [
        {
            "role": "user",
            "content": [{"type": "text", "text": "Tell me "}, {"type": "text", "text": "of the sea."}],
        }
    ]
    text = ""
    for chunk in client.chat.completions.create(
        model="tiny", messages=parts, max_tokens=15, temperature=0, stream=True
    ):
        text += chunk.choices[0].delta.content or ""
    assert text == choice.message.content


def test_logprobs_and_echo_score_a_prompt(client, expected):
    answer = client.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=1, logprobs=1, echo=True, temperature=0
    )
    found = answer.choices[0]
    assert found.text.startswith(PROMPT)
    assert found.logprobs.token_logprobs[0] is None
    wanted = expected(PROMPT, max_tokens=1, prompt_logprobs=1)
    scores = [entry.logprob for entry in wanted.prompt_logprobs[1:]]
    assert found.logprobs.token_logprobs[1:-1] == pytest.approx(scores, abs=1e-4)
    assert "".join(found.logprobs.tokens) == found.text


def test_no_tokens_at_all_score_a_prompt(client):
    options = {"model": "tiny", "echo": True, "logprobs": 1, "temperature": 0}
    tokens = client.completions.create(prompt=PROMPT, max_tokens=1, **options)
    for prompt in (PROMPT, client.post("/../tokenize", body={"prompt": PROMPT}, cast_to=object)["tokens"]):
        scored = client.completions.create(prompt=prompt, max_tokens=0, **options)
        assert scored.choices[0].text == PROMPT
        assert scored.choices[0].finish_reason == "length"
        assert scored.choices[0].logprobs.token_logprobs == tokens.choices[0].logprobs.token_logprobs[:-1]
        assert scored.usage.completion_tokens == 0
    for wrong in ({"echo": False}, {"stream": True, "logprobs": None}):
        with pytest.raises(openai.BadRequestError, match="max_tokens 0 only scores"):
            client.completions.create(prompt=PROMPT, max_tokens=0, **(options | wrong))


def test_text_ends_before_stop_strings(client):
    options = {"model": "tiny", "prompt": PROMPT, "max_tokens": 40, "temperature": 0}
    text = client.completions.create(**options).choices[0].text
    stop = text.split()[3]
    answer = client.completions.create(**options, stop=[stop])
    assert answer.choices[0].text == text[: text.index(stop)]
    assert answer.choices[0].finish_reason == "stop"


def test_json_schemas_hold(client):
    schema = {
        "type": "object",
        "properties": {
            "city": {"enum": ["Rome", "Oslo"]},
            "count": {"type": "integer", "minimum": 0, "maximum": 99},
        },
        "required": ["city", "count"],
        "additionalProperties": False,
    }
    answer = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "Where?"}],
        max_tokens=60,
        response_format={"type": "json_schema", "json_schema": {"name": "place", "schema": schema}},
    )
    found = json.loads(answer.choices[0].message.content)
    assert found["city"] in ("Rome", "Oslo")
    assert 0 <= found["count"] <= 99


@pytest.mark.parametrize(
    "constraint",
    [
        {"guided_json": {"enum": ["dawn"]}},
        {"guided_json": '{"enum": ["dawn"]}'},
        {"structured_outputs": {"json": {"enum": ["dawn"]}}},
        {"structured_outputs": {"choice": ['"dawn"']}},
        {"structured_outputs": {"regex": '"dawn"'}, "top_k": -1},
        {"structured_outputs": {"grammar": 'start: "\\"dawn\\""'}, "top_k": 0},
    ],
)
def test_constraints_as_vllm_has_them(client, constraint):
    answer = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=20, extra_body=constraint)
    assert answer.choices[0].text == '"dawn"'


@pytest.mark.parametrize(
    "wrong",
    [
        {"structured_outputs": {"xml": "a"}},
        {"guided_json": "{"},
        {"guided_regex": "a", "structured_outputs": {"regex": "b"}},
        {"functions": [{"name": "f"}], "messages": [{"role": "user", "content": "a"}]},
    ],
)
def test_constraints_that_cannot_hold_are_not_passed_over(server, wrong):
    path = "/v1/chat/completions" if "messages" in wrong else "/v1/completions"
    body = wrong if "messages" in wrong else {"prompt": "a"} | wrong
    status, answer = send(server, json.dumps(body).encode(), path)
    assert status == 400
    assert "error" in answer


@pytest.mark.parametrize("stream", [False, True])
def test_fields_that_are_ignored_are_named_in_the_head_of_every_answer(client, stream):
    """The client of OpenAI as it is, with fields of its own."""
    options = {"model": "tiny", "max_tokens": 2, "user": "me", "stream": stream}
    extra = {"extra_body": {"max_token": 3, "top_k": 5}}
    messages = [{"role": "user", "content": "x", "name": "y"}]
    for create, what in (
        (client.completions.with_raw_response.create, {"prompt": PROMPT}),
        (client.chat.completions.with_raw_response.create, {"messages": messages}),
    ):
        assert create(**options, **extra, **what).headers[HEADER] == "max_token, user"
        assert HEADER not in create(model="tiny", max_tokens=2, stream=stream, **what).headers


def test_a_message_may_be_gone_on_with(client, expected):
    messages = [{"role": "user", "content": "Tell me."}, {"role": "assistant", "content": "The sea"}]
    options = {"continue_final_message": True}
    answer = client.chat.completions.create(
        model="tiny", messages=messages, max_tokens=8, temperature=0, extra_body=options
    )
    wanted = expected("<|user|>\nTell me.\n<|assistant|>\nThe sea", max_tokens=8)
    assert answer.choices[0].message.content == wanted.outputs[0].text


def test_bytes_of_tokens_add_up_to_the_text(client):
    answer = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "a"}],
        logprobs=True,
        max_tokens=8,
        extra_body={"guided_choice": ["😀"]},
    )
    [choice] = answer.choices
    assert choice.message.content == "😀"
    told = bytes(byte for entry in choice.logprobs.content for byte in entry.bytes or ())
    assert told.startswith("😀".encode())


def test_context_overflow_has_its_code_and_no_stream_begins_with_a_wrong_prompt(client):
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model="tiny", prompt=[5] * 5000, max_tokens=1)
    assert refused.value.code == "context_length_exceeded"
    for prompts in (["a", ""], [[5], [10**6]], [[5], [5] * 5000]):
        with pytest.raises(openai.BadRequestError):
            client.completions.create(model="tiny", prompt=prompts, max_tokens=1, stream=True)


def test_models_and_tokens(client, server):
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"
    tokens = post(server, "/tokenize", {"prompt": PROMPT})["tokens"]
    assert post(server, "/detokenize", {"tokens": tokens})["prompt"].endswith(PROMPT)
    chat = post(server, "/tokenize", {"messages": [{"role": "user", "content": "x"}]})
    assert chat["count"] == len(chat["tokens"]) > 3


def post(server, path, body):
    request = urllib.request.Request(
        server.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=HANG_S) as answer:
        return json.loads(answer.read())


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ({"prompt": "x", "n": 10**9}, 400, "n: Input should be less than or equal to 128, got 1000000000"),
        ({"prompt": "x", "temperature": -1}, 400, "temperature"),
        ({"prompt": "x", "model": "other"}, 404, "no model 'other' here; this server has 'tiny'"),
        ({"prompt": "x", "max_tokens": 10**6}, 400, "context"),
        ({"prompt": [10**6]}, 400, "outside the vocabulary"),
        ({"prompt": ""}, 400, "prompt"),
        ({"prompt": []}, 400, "prompt"),
        ({"prompt": {"a": 1}}, 400, "prompt"),
        ({}, 400, "prompt: Field required"),
        ({"prompt": "x", "suffix": "y"}, 400, "suffix"),
        ({"prompt": "x", "guided_regex": "("}, 400, ""),
        ({"prompt": "x", "stream": True, "max_tokens": 10**6}, 400, "context"),
        ({"prompt": "x", "stream": True, "echo": True, "logprobs": 1}, 400, "don't stream"),
        ({"prompt": "\ud800"}, 400, ""),
    ],
)
def test_what_cannot_be_served_is_refused_with_an_error_object(server, body, status, message):
    found, answer = send(server, json.dumps(body).encode())
    assert found == status
    assert message in answer["error"]["message"]
    assert set(answer["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    "raw", [b"", b"{", b"[" * 10_000, b'{"prompt": NaN}', b'{"prompt": "x", "temperature": NaN}', b"\xff"]
)
def test_bodies_that_are_no_json_are_refused(server, raw):
    status, answer = send(server, raw)
    assert status == 400
    assert answer["error"]["type"] == "invalid_request_error"


def test_large_bodies_and_unknown_paths_are_refused(server):
    status, answer = send(server, b"x" * ((8 << 20) + 1))
    assert status == 413
    assert answer["error"]["code"] == "request_too_large"
    for path, meant in (
        ("/v1/nothing", ""),
        ("/v1/assistants", ""),
        ("/v1/sessions", ""),
        ("/chat/completions", "; did you mean '/v1/chat/completions'?"),
    ):
        status, answer = send(server, b"{}", path=path)
        assert status == 404
        assert answer["error"]["message"].startswith(f"there is no {path}{meant or '; /openapi.json'}")


def send(server, raw, path="/v1/completions", headers=()):
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=HANG_S)
    try:
        connection.request("POST", path, raw, {"Content-Type": "application/json", **dict(headers)})
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())
    finally:
        connection.close()


def test_kvq_chat_chats_with_a_running_server(server, client):
    options = ["--url", server.url + "/v1", "--temperature", "0", "-n", "12"]
    done = CliRunner().invoke(chat.command, options, input="Tell me of the sea.\nAnd the land?\n/stats\n")
    assert done.exit_code == 0, done.output
    messages = [{"role": "user", "content": "Tell me of the sea."}]
    answer = client.chat.completions.create(model="tiny", messages=messages, max_tokens=12, temperature=0)
    assert done.stdout.startswith(answer.choices[0].message.content + "\n")
    assert "12 generated; first token" in done.stdout
    done = CliRunner().invoke(chat.command, [*options, "-n", "99999"], input="x\n")
    assert "the context is full" in done.stderr


def values(server):
    """Samples of /metrics by name and labels."""
    with urllib.request.urlopen(server.url + "/metrics", timeout=HANG_S) as answer:
        families = text_string_to_metric_families(answer.read().decode())
    return {(s.name, *s.labels.values()): s.value for family in families for s in family.samples}


def test_metrics_count_what_happened(server, client):
    before = values(server)
    client.completions.create(model="tiny", prompt=PROMPT, max_tokens=30, extra_body={"ignore_eos": True})
    send(server, json.dumps({"prompt": "x", "max_tokens": 10**6}).encode())
    after = values(server)
    grown = {name: after[name] - before.get(name, 0) for name in after}
    assert grown["kvq_requests_total", "success"] == 1
    assert grown["kvq_requests_total", "invalid"] == 1
    assert grown["kvq_tokens_generated_total",] == 30
    assert grown["kvq_ttft_seconds_count",] == 1
    assert after["kvq_engine_ready",] == 1
    assert sum(after["kvq_blocks", "0", state] for state in ("free", "cached", "live")) == 128
    assert after["kvq_engine_requests", "running"] == 0


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_is_not_served_on(server, stream):
    def now(*name):
        return values(server)[name]

    before = values(server)
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=HANG_S)
    body = {"prompt": PROMPT, "max_tokens": 1900, "ignore_eos": True, "stream": stream, "n": 2}
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    if stream:
        assert connection.getresponse().read(50).startswith(b"data: ")
    wait_for(lambda: now("kvq_engine_requests", "running"), "the request to run")
    connection.close()
    wait_for(lambda: not now("kvq_engine_requests", "running"), "the request to end")
    after = values(server)
    grown = {name: after[name] - before.get(name, 0) for name in after}
    assert grown["kvq_requests_total", "cancelled"] == 1
    assert grown["kvq_tokens_generated_total",] < 2 * 1900
    body = {"prompt": PROMPT, "max_tokens": 5, "ignore_eos": True, "n": 16}
    assert send(server, json.dumps(body).encode())[0] == 200, "all rows are free again"


@pytest.fixture(scope="module")
def own_server():
    """With blocks for everybody, few seats and a short queue; the last test that uses it ends it."""
    with Server(*OPTIONS, "--grace", str(HANG_S)) as running:
        yield running


@pytest.mark.parametrize(
    ("fields", "served"),
    [({}, 4), ({"n": 2}, 2), ({"n": 3}, 1), ({"prompt": [PROMPT] * 3}, 2), ({"stream": False}, 0)],
)
def test_a_burst_fills_the_seats_and_the_queue_and_no_more(own_server, fields, served):
    """Of requests, whatever each is of; `served`: how many begin to be answered before others end."""
    body = {"prompt": PROMPT, "max_tokens": 3900, "ignore_eos": True, "stream": True} | fields
    taken = (served or SEATS) + QUEUE
    raw = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(raw)}\r\n"
    with ExitStack() as stack:
        socks = [socket.create_connection(("127.0.0.1", own_server.port)) for _ in range(taken + 3)]
        for sock in socks:
            stack.enter_context(sock)
        for sock in socks:
            sock.sendall(f"{head}Content-Type: application/json\r\n\r\n".encode() + raw)
        answers = []
        while len(answers) < served + 3:
            for sock in select.select(socks, [], [], HANG_S)[0]:
                answers.append(sock.recv(1 << 16))
                socks.remove(sock)
        assert sorted(int(answer.split()[1]) for answer in answers) == [200] * served + [503] * 3, answers
        assert value_of(own_server, "kvq_requests_waiting") == QUEUE
    wait_for(lambda: not value_of(own_server, "kvq_active_requests"), "all of them to leave")
    assert value_of(own_server, "kvq_requests_waiting") == 0


def value_of(server, name):
    with urllib.request.urlopen(server.url + "/metrics", timeout=HANG_S) as answer:
        return float(re.search(rf"(?m)^{name} (\S+)", answer.read().decode())[1])


def test_kill_drain_and_end(own_server):
    with own_server as running:
        client = openai.OpenAI(base_url=running.url + "/v1", api_key="none", max_retries=0, timeout=HANG_S)
        options = {"model": "tiny", "prompt": PROMPT, "max_tokens": 1500, "extra_body": {"ignore_eos": True}}
        stream = client.completions.create(**options, stream=True)
        next(stream)
        os.kill(running.engine_pid, signal.SIGKILL)
        with pytest.raises(openai.APIError, match="send the request again"):
            list(stream)
        assert running.status("/health/ready") == 503
        assert running.status("/health/live") == 200
        with pytest.raises(openai.InternalServerError, match="restarting"):
            client.completions.create(**options)
        running.wait_ready()

        stream = client.completions.create(**options | {"max_tokens": 300}, stream=True)
        first = next(stream)
        endless = client.completions.create(**options | {"max_tokens": 4000}, stream=True)
        next(endless)
        pid = running.engine_pid
        running.process.send_signal(signal.SIGTERM)
        wait_for(lambda: running.status("/health/ready") != 200, "the end to begin")
        with pytest.raises(openai.InternalServerError, match="shutting down"):
            client.completions.create(**options)
        text = first.choices[0].text + "".join(chunk.choices[0].text for chunk in stream)
        assert len(text) > 300, "what ran was served to its end"
        running.process.send_signal(signal.SIGTERM)  # asked twice, it ends at once
        with pytest.raises(openai.APIError, match="shutting down"):
            list(endless)
        assert running.process.wait(HANG_S) == 0
        assert running.is_gone(pid)


def test_an_address_that_is_taken_is_said_so_at_once(server):
    second = Server("--port", str(server.port))
    assert second.process.wait(HANG_S) == 2
    where = f"can't listen on 127.0.0.1:{server.port}"
    why = "another program has that port; end it, or give another --port"
    assert second.log == f"kvq: error: {where}: {why}\n"
    second.__exit__()


def test_addresses_beyond_loopback_need_a_key():
    server = Server("--host", "0.0.0.0")
    assert server.process.wait(HANG_S) == 2
    assert "--api-key-file" in server.log
    server.__exit__()


def test_a_cache_salt_keeps_prefixes_apart(client):
    """Of one key's requests, those with equal salts share."""

    def cached(**extra):
        answer = client.completions.create(
            model="tiny",
            prompt="Salted prefixes lie apart from others. " * 20,
            max_tokens=1,
            extra_body=extra,
        )
        return answer.usage.prompt_tokens_details.cached_tokens

    assert [cached(cache_salt=salt) for salt in ("one", "two")] == [0, 0]
    assert cached(cache_salt="one") > 0
    assert cached() == 0
    for wrong in ("", "a" * 1025, 5):
        with pytest.raises(openai.BadRequestError, match="cache_salt"):
            cached(cache_salt=wrong)


def test_a_chat_may_have_a_cache_salt(client):
    def cached(**extra):
        message = {"role": "user", "content": "Chats may be salted, too. " * 20}
        answer = client.chat.completions.create(
            model="tiny", messages=[message], max_tokens=1, extra_body=extra
        )
        return answer.usage.prompt_tokens_details.cached_tokens

    alone = cached(cache_salt="chat")
    assert cached(cache_salt="chat") > alone
    assert cached(cache_salt="other") == alone
