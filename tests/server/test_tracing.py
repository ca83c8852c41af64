"""Spans of requests: what they say, what they continue, and what they never contain."""

import asyncio
import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

pytest.importorskip("opentelemetry.sdk.trace", reason="needs opentelemetry-sdk")
pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="needs the OTLP exporter")
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from kvq.engine import Receipt, SamplingParams
from kvq.engine.requests.outputs import Timing
from kvq.errors import ConfigError
from kvq.server.engine.messages import Ended
from kvq.server.http.problems import unavailable
from kvq.server.tracing import Tracing, otlp_tracing
from tests.server.kit import Server
from tests.server.pooling.test_server import post
from tests.waiting import wait_for

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
USED = {"prompt_tokens": 30, "cached_tokens": 16, "generated_tokens": 7}
SECRET = "The harbour of Oslo"


def receipt() -> Receipt:
    names = Receipt.__dataclass_fields__
    return Receipt(**{name: 0 for name in names if name not in ("miss", "exact")} | USED)


@pytest.fixture
def traced():
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return Tracing(provider), exporter


def test_a_request_is_a_span_with_its_parts(traced):
    tracing, exporter = traced
    timing = Timing(arrival_s=5.0, queue_s=0.25, prefill_s=0.5, ttft_s=0.75, e2e_s=2.0)
    with tracing.request("/v1/chat/completions", {"Traceparent": PARENT}, model="tiny", stream=True):
        for _ in range(2):
            ended = Ended(number=1, receipt=receipt(), timing=timing)
            tracing.ended(ended, SamplingParams(temperature=0.5, max_tokens=9))
            tracing.finished("length")
    *parts, whole = exporter.get_finished_spans()
    assert (whole.name, whole.kind, whole.status.status_code) == (
        "chat tiny",
        SpanKind.SERVER,
        StatusCode.UNSET,
    )
    assert f"{whole.context.trace_id:x}" in PARENT
    assert f"{whole.parent.span_id:x}" in PARENT
    assert dict(whole.attributes) == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "kvq",
        "gen_ai.request.model": "tiny",
        "gen_ai.response.model": "tiny",
        "gen_ai.request.stream": True,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.request.max_tokens": 9,
        "gen_ai.request.choice.count": 1,
        "gen_ai.usage.input_tokens": 60,
        "gen_ai.usage.output_tokens": 14,
        "gen_ai.usage.cache_read.input_tokens": 32,
        "gen_ai.response.finish_reasons": ("length", "length"),
    }
    assert [part.name for part in parts] == ["queue", "prefill", "decode"] * 2
    assert all(part.parent.span_id == whole.context.span_id for part in parts)
    lengths = [round((part.end_time - part.start_time) / 1e9, 2) for part in parts[:3]]
    assert lengths == [0.25, 0.5, 1.25]
    assert [one.start_time for one in parts[1:3]] == [one.end_time for one in parts[:2]]


def test_failures_are_marked(traced):
    tracing, exporter = traced
    with (
        pytest.raises(type(unavailable(""))),
        tracing.request("/v1/completions", {}, model="m", stream=False),
    ):
        raise unavailable(SECRET)
    with tracing.request("/v1/embeddings", {}, model="m", stream=False):
        tracing.ended(Ended(number=1, error=SECRET, kind="request"), SamplingParams())
    with tracing.request("/v2/rerank", {}, model="m", stream=False):
        tracing.failed("timeout")
    spans = exporter.get_finished_spans()
    assert [span.name for span in spans] == ["text_completion m", "embeddings m", "rerank m"]
    assert [span.attributes["error.type"] for span in spans] == ["unavailable", "request", "timeout"]
    assert {span.status.status_code for span in spans} == {StatusCode.ERROR}
    assert SECRET not in "".join(span.to_json() for span in spans)


def test_concurrent_requests_keep_apart(traced):
    tracing, exporter = traced

    async def one(number):
        with tracing.request("/v1/completions", {}, model=str(number), stream=False):
            await asyncio.sleep(0.01 * (number % 3))
            tracing.finished(f"reason {number}")

    async def main():
        await asyncio.gather(*(asyncio.create_task(one(number)) for number in range(9)))

    asyncio.run(main())
    found = {
        span.name: span.attributes["gen_ai.response.finish_reasons"] for span in exporter.get_finished_spans()
    }
    assert found == {f"text_completion {number}": (f"reason {number}",) for number in range(9)}


@pytest.mark.parametrize("endpoint", ["127.0.0.1:4318", "ftp://a", "http://", ""])
def test_an_endpoint_is_a_url(endpoint):
    with pytest.raises(ConfigError, match="--otlp-traces"):
        otlp_tracing(endpoint)


def test_a_server_sends_spans_to_the_collector_and_no_texts():
    bodies: list[bytes] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["content-length"]))
            bodies.append(body if self.path == "/v1/traces" else b"")
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            pass

    collector = HTTPServer(("127.0.0.1", 0), Collector)
    threading.Thread(target=collector.serve_forever, daemon=True).start()
    try:
        options = (
            "--kv",
            "int4",
            "--num-blocks",
            "64",
            "--otlp-traces",
            f"http://127.0.0.1:{collector.server_port}",
        )
        with Server(*options) as server:
            messages = [{"role": "user", "content": SECRET}]
            assert post(server, "/v1/chat/completions", messages=messages, max_tokens=4).status_code == 200
            with_stream = post(server, "/v1/completions", prompt=SECRET, max_tokens=4, stream=True)
            assert "[DONE]" in with_stream.text
            assert post(server, "/v1/embeddings", input=SECRET).status_code == 400
        wait_for(lambda: bodies, lambda: "spans arrived")
    finally:
        collector.shutdown()
        collector.server_close()
    sent = [ExportTraceServiceRequest.FromString(body) for body in bodies]
    scopes = [scope for one in sent for resource in one.resource_spans for scope in resource.scope_spans]
    spans = [span for scope in scopes for span in scope.spans]
    assert {"chat tiny", "text_completion tiny", "embeddings tiny", "queue", "prefill", "decode"} == {
        span.name for span in spans
    }
    whole = next(span for span in spans if span.name == "chat tiny")
    values = {one.key: one.value for one in whole.attributes}
    assert values["gen_ai.usage.output_tokens"].int_value == 4
    assert values["gen_ai.response.finish_reasons"].array_value.values[0].string_value == "length"
    raw = b"".join(bodies) + json.dumps([str(span) for span in spans]).encode()
    assert not any(word.encode() in raw for word in SECRET.split()[1::2])
