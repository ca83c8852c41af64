"""Traces: OpenTelemetry spans of requests, for the collector that the operator names. They contain no texts.

A request is one span of kind SERVER. Its prompts have spans inside it for the queue, the prefill and the
decoding, from the times that the engine measured. Attributes follow semantic-conventions-genai 0.1.0.

Source: https://github.com/open-telemetry/semantic-conventions-genai, docs/gen-ai/client-inference.md.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from time import time_ns
from typing import Any
from urllib.parse import urlsplit

from opentelemetry.trace import Span, SpanKind, Status, StatusCode, TracerProvider, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from kvq.engine import SamplingParams
from kvq.errors import ConfigError
from kvq.server.engine.messages import Ended
from kvq.server.http.problems import Problem
from kvq.version import __version__

_PREFIX = "gen_ai."
_OPERATIONS = {  # of other paths: chat
    **dict.fromkeys(("/v1/completions", "/api/generate"), "text_completion"),
    "/v1/embeddings": "embeddings",
    **dict.fromkeys(("/v1/score", "/v1/rerank", "/v2/rerank"), "rerank"),
}


@dataclass(slots=True, eq=False)
class _Trace:
    """Span of a request that has not ended, with the sums over its prompts."""

    span: Span
    tokens: dict[str, int] = field(default_factory=dict)
    reasons: list[str] = field(default_factory=list)

    def fail(self, kind: str) -> None:
        self.span.set_attribute("error.type", kind)
        self.span.set_status(Status(StatusCode.ERROR))


_current: ContextVar[_Trace | None] = ContextVar("kvq_trace", default=None)


class Tracing:
    """Tracer of requests. A request's trace continues that of its client (W3C traceparent)."""

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("kvq", __version__)

    @contextmanager
    def request(self, path: str, headers: Mapping[str, str], *, model: str, stream: bool) -> Iterator[None]:
        """Trace a request until its response is complete."""
        operation = _OPERATIONS.get(path, "chat")
        parent = TraceContextTextMapPropagator().extract({k.lower(): v for k, v in headers.items()})
        attributes: dict[str, Any] = {"operation.name": operation, "provider.name": "kvq"}
        attributes |= {"request.model": model, "response.model": model, "request.stream": stream}
        span = self._tracer.start_span(
            f"{operation} {model}", parent, SpanKind.SERVER, {_PREFIX + k: v for k, v in attributes.items()}
        )
        trace = _Trace(span)
        _current.set(trace)  # the context ends with the request
        try:
            yield
        except Problem as problem:
            trace.fail(problem.code or problem.type)
            raise
        finally:
            for name, count in trace.tokens.items():
                span.set_attribute(f"{_PREFIX}usage.{name}", count)
            if trace.reasons:
                span.set_attribute(f"{_PREFIX}response.finish_reasons", trace.reasons)
            span.end()

    def finished(self, reason: str) -> None:
        """Note why a result of the current request ended."""
        if (trace := _current.get()) is not None:
            trace.reasons.append(reason)

    def failed(self, kind: str) -> None:
        """Mark the current request as failed."""
        if (trace := _current.get()) is not None:
            trace.fail(kind)

    def ended(self, ended: Ended, params: SamplingParams) -> None:  # D433: from the receipt
        """Add a prompt that has ended to the trace of the current request."""
        if (trace := _current.get()) is None:
            return
        if ended.error is not None:
            trace.fail(ended.kind or "engine")
        given: dict[str, Any] = {"temperature": params.temperature, "top_p": params.top_p}
        given |= {"max_tokens": params.max_tokens, "choice.count": params.n}
        for name, value in given.items():
            if value is not None:
                trace.span.set_attribute(f"{_PREFIX}request.{name}", value)
        if (used := ended.receipt) is not None:
            counts = {"input_tokens": used.prompt_tokens, "output_tokens": used.generated_tokens}
            counts |= {"cache_read.input_tokens": used.cached_tokens}
            trace.tokens = {name: count + trace.tokens.get(name, 0) for name, count in counts.items()}
        self._add_parts(trace.span, ended)

    def _add_parts(self, span: Span, ended: Ended) -> None:
        timing, end = ended.timing, time_ns()
        if timing is None or timing.e2e_s is None:
            return
        context, at = set_span_in_context(span), end - round(timing.e2e_s * 1e9)
        for name, seconds in (("queue", timing.queue_s), ("prefill", timing.prefill_s)):
            if seconds is not None:
                until = at + round(seconds * 1e9)
                self._tracer.start_span(name, context, start_time=at).end(until)
                at = until
        if timing.ttft_s is not None:
            self._tracer.start_span("decode", context, start_time=at).end(max(at, end))

    def close(self) -> None:
        """Send what waits, for at most some seconds."""
        if hasattr(self._provider, "shutdown"):
            self._provider.shutdown()


def otlp_tracing(endpoint: str) -> Tracing:
    """Return a tracing that sends spans over HTTP to a collector, such as http://127.0.0.1:4318.

    Raises:
        ConfigError: the endpoint is not an http or https URL.
    """
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    url = urlsplit(endpoint)
    if url.scheme not in ("http", "https") or not url.hostname:
        raise ConfigError(f"--otlp-traces takes a URL such as http://127.0.0.1:4318, got {endpoint!r}")
    whole = endpoint if url.path.strip("/") else f"{endpoint.rstrip('/')}/v1/traces"
    resource = Resource.create({"service.name": "kvq", "service.version": __version__})
    provider = TracerProvider(resource=resource)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=whole)))
    return Tracing(provider)
