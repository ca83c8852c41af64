"""Requests refused for load are answered by the upstream that the operator named, and by nobody else."""

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor

import httpx2
import pytest
from prometheus_client import CollectorRegistry

from kvq.errors import ConfigError
from kvq.server.admission.config import ServerConfig
from kvq.server.http.problems import OVERFLOWN, Overload, unavailable
from kvq.server.overflow import Overflow, OverflowConfig
from tests.server import asgi
from tests.server.kit import Server
from tests.server.openai.test_completions import served
from tests.server.pooling.test_server import post

WHOLE = {"id": "x", "choices": [{"text": "upstream"}], "usage": {"prompt_tokens": 5, "completion_tokens": 3}}
CHUNKS = [
    {"choices": [{"text": "up"}]},
    {"choices": [{"text": "stream"}], "usage": None},
    {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 2}},
]
STREAM = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in CHUNKS)
ASK = {"prompt": "The sea", "priority": "batch", "max_tokens": 3}


class Upstream:
    """An upstream whose answers are given, and what it was sent."""

    def __init__(self, *answers, **options):
        self.sent, self.answers = [], list(answers)
        self.now = 86400.0 * 100
        self.overflow = None

        def handle(request):
            self.sent.append((str(request.url), dict(request.headers), json.loads(request.content)))
            found = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
            if isinstance(found, Exception):
                raise found
            return found if isinstance(found, httpx2.Response) else httpx2.Response(200, content=found)

        def make(registry):
            config = OverflowConfig(url="https://up.example/v1/", key="secret", **options)
            self.overflow = Overflow(config, registry, clock=lambda: self.now)
            self.overflow._client._transport = httpx2.MockTransport(handle)
            return self.overflow

        service, _ = served(["here"])
        service.overflow = make(service.metrics.registry)

        def overloaded():
            raise Overload(503, "the server is overloaded", code="unavailable", retry_after_s=7)

        service.admission._check_bounds = overloaded
        service.check_ready = lambda: None
        self.client = asgi.Client(service)
        self.metrics = self.client.metrics

    def ask(self, path="/v1/completions", headers=(), **fields):
        status, head, text = asyncio.run(self.client.exchange(path, ASK | fields, dict(headers)))
        return status, head, text.decode()


def test_a_refused_request_goes_to_the_upstream():
    upstream = Upstream(json.dumps(WHOLE))
    status, head, text = upstream.ask(session_id="s", kv_retain=5, cache_salt="mine", user="u")
    assert (status, json.loads(text), head[OVERFLOWN]) == (200, WHOLE, "1")
    [(url, headers, body)] = upstream.sent
    assert url == "https://up.example/v1/completions"
    assert (headers["authorization"], headers[OVERFLOWN]) == ("Bearer secret", "1")
    assert body == {"prompt": "The sea", "max_tokens": 3, "user": "u"}
    found = upstream.metrics()
    assert found["kvq_overflow_requests_total", "taken"] == 1
    assert found["kvq_overflow_tokens_total", "prompt"] == 5
    assert found["kvq_overflow_tokens_total", "completion"] == 3
    assert found["kvq_overflow_tokens_left",] == 1_000_000 - 8
    assert found["kvq_overflow_running",] == 0


@pytest.mark.parametrize("wants_usage", [False, True])
def test_streams_pass_through(wants_usage):
    upstream = Upstream(STREAM + "data: [DONE]\n\n", model="big", takes="all")
    options = {"stream_options": {"include_usage": True}} if wants_usage else {}
    status, _, text = upstream.ask(stream=True, priority="interactive", **options)
    events = [entry.removeprefix("data: ") for entry in text.strip().split("\n\n")]
    assert (status, events.pop()) == (200, "[DONE]")
    assert [json.loads(event) for event in events] == (CHUNKS if wants_usage else CHUNKS[:2])
    assert upstream.sent[0][2]["model"] == "big"
    assert upstream.sent[0][2]["stream_options"] == {"include_usage": True}
    assert upstream.metrics()["kvq_overflow_tokens_total", "completion"] == 2


@pytest.mark.parametrize(
    "answer",
    [
        httpx2.ConnectError("no"),
        httpx2.ReadTimeout("slow"),
        httpx2.Response(500),
        httpx2.Response(429),
        httpx2.Response(302, headers={"location": "https://other.example"}),
        b"no json",
        b"[1]",
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_failing_upstream_gives_the_refusal(answer, stream):
    upstream = Upstream(answer)
    status, head, text = upstream.ask(stream=stream)
    assert (status, head["retry-after"]) == (503, "7")
    assert "overloaded" in json.loads(text)["error"]["message"]
    assert OVERFLOWN not in head
    found = upstream.metrics()
    assert found["kvq_overflow_running",] == 0
    if not stream or not isinstance(answer, bytes):
        assert found["kvq_overflow_requests_total", "failed"] == 1
        assert found["kvq_overflow_tokens_left",] == 1_000_000


def test_a_stream_that_breaks_off_says_so():
    for answer in (STREAM, STREAM.replace("stream", "\x00")):
        upstream = Upstream(answer)
        status, _, text = upstream.ask(stream=True)
        assert status == 200
        assert "broke off" in text.strip().split("\n\n")[-1]
        assert "[DONE]" not in text
        assert upstream.metrics()["kvq_overflow_running",] == 0


@pytest.mark.parametrize(
    ("fields", "headers", "path"),
    [
        ({"priority": "interactive"}, (), "/v1/completions"),
        ({"priority": None}, (), "/v1/completions"),
        ({}, ((OVERFLOWN, "1"),), "/v1/completions"),
        ({"input": "a", "prompt": None}, (), "/v1/responses"),
        ({"input": "a"}, (), "/v1/embeddings"),
    ],
)
def test_what_may_not_go_there_stays(fields, headers, path):
    upstream = Upstream(json.dumps(WHOLE))
    assert upstream.ask(path, headers, **fields)[0] == 503
    assert upstream.sent == []


def test_flex_requests_are_batch_requests():
    upstream = Upstream(json.dumps(WHOLE))
    assert upstream.ask(priority=None, service_tier="flex")[0] == 200
    bad = upstream.ask(max_tokens="x")
    assert bad[0] == 400, "a wrong body is refused here"
    assert len(upstream.sent) == 1


def test_the_budget_is_of_a_day():
    upstream = Upstream(json.dumps(WHOLE), tokens_per_day=10)
    assert [upstream.ask()[0] for _ in range(3)] == [200, 200, 503]
    assert upstream.metrics()["kvq_overflow_requests_total", "limited"] == 1
    upstream.now += 86400
    assert upstream.ask()[0] == 200


def test_other_refusals_stay_refusals():
    upstream = Upstream(json.dumps(WHOLE))

    def restarting():
        raise unavailable("the engine is restarting")

    upstream.client.service.check_ready = restarting
    assert upstream.ask()[0] == 503
    assert upstream.sent == []


def test_concurrent_requests_are_limited():
    async def main():
        gate, registry = asyncio.Event(), CollectorRegistry()
        overflow = Overflow(OverflowConfig(url="http://up", max_concurrency=2), registry)

        async def handle(request):
            await gate.wait()
            return httpx2.Response(200, content=json.dumps(WHOLE))

        overflow._client._transport = httpx2.MockTransport(handle)
        raw, used = json.dumps(ASK).encode(), []
        tasks = [asyncio.create_task(overflow.take("/v1/completions", raw, used.append)) for _ in range(5)]
        while sum(task.done() for task in tasks) < 3:
            await asyncio.sleep(0.01)
        tasks[[task.done() for task in tasks].index(False)].cancel()
        gate.set()
        found = await asyncio.gather(*tasks, return_exceptions=True)
        assert sorted(type(one).__name__ for one in found) == ["CancelledError", *["NoneType"] * 3, "dict"]
        assert overflow.num_running == 0
        assert sorted(used) == [8, len(raw) // 4], "a cancelled one counts by its size"
        await overflow.close()

    asyncio.run(main())


@pytest.mark.parametrize("url", ["up.example/v1", "ftp://a", "https://", "https://a/v1?key=1", ""])
def test_an_upstream_is_a_url(url):
    with pytest.raises(ConfigError, match="--overflow-to"):
        OverflowConfig(url=url)


def test_marked_texts_do_not_overflow():
    with pytest.raises(ConfigError, match="--watermark"):
        ServerConfig(engine={"watermark": "always"}, overflow=lambda registry: None)
    assert "secret" not in repr(OverflowConfig(url="https://a", key="secret"))


def test_one_server_overflows_into_another():
    small = ("--kv", "int4", "--num-blocks", "64", "--max-num-seqs", "1", "--max-queue", "1")
    with Server("--kv", "int4", "--num-blocks", "256") as upstream:
        options = ("--overflow-to", f"{upstream.url}/v1", "--overflow", "all")
        with Server(*small, *options) as server, ThreadPoolExecutor(12) as pool:
            body = {"prompt": "The sea", "max_tokens": 60, "temperature": 0, "ignore_eos": True}
            answers = [*pool.map(lambda _: post(server, "/v1/completions", **body), range(12))]
        assert {answer.status_code for answer in answers} == {200}
        assert {answer.headers.get(OVERFLOWN) for answer in answers} == {None, "1"}
        assert len({answer.json()["choices"][0]["text"] for answer in answers}) == 1
