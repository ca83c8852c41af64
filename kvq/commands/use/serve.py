"""`kvq serve`: an OpenAI-compatible server."""

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from kvq.commands.shared.config_file import config_option
from kvq.commands.shared.declare import SectionedCommand, gathered, option, picked
from kvq.commands.shared.interrupts import nothing_begun
from kvq.commands.shared.param_types import (
    AT_LEAST_0,
    AT_LEAST_1,
    FILE,
    FOLDER,
    NATURAL,
    POSITIVE,
    SHARE,
    SIZE,
    TO_WRITE,
    TOKENS,
)
from kvq.commands.shared.terminal import echo
from kvq.commands.use.engine_options import service_options
from kvq.commands.use.serve_models import models_config
from kvq.errors import ConfigError, not_one_of
from kvq.extras import EVENTS, OTEL, OVERFLOW, SERVER, require
from kvq.sizes import parse_bytes

if TYPE_CHECKING:
    from kvq.server.admission.config import ServerConfig
    from kvq.server.http.credentials import Access


@dataclass(frozen=True, kw_only=True, slots=True)
class _ServeOptions:
    """Options of the HTTP server."""

    check: bool = option(False, "Only check whether this configuration can work, then end.")
    control_tokens_in: str = option(
        "completions",
        "Requests in whose texts the spellings of control tokens are control tokens, not plain text.",
        type=click.Choice(["completions", "chats", "both", "none"]),
    )
    adapter_folder: Path | None = option(
        None, "Folder from which clients may load adapters: POST /v1/load_lora_adapter.", type=FOLDER
    )
    kv_also: tuple[str, ...] = option(
        (), "KV format that requests may ask for by kv_format, besides --kv; may be repeated.", multiple=True
    )
    kv_also_share: float = option(0.2, "Share of the KV memory for each of them.", type=SHARE)
    guard_fallback: str | None = option(
        None, "Format of --kv-also for new requests that name none, after an alert of --guard."
    )
    grace: float = option(30.0, "Seconds that running requests get to end at shutdown.", type=AT_LEAST_0)
    max_restarts: int = option(5, "Most restarts of the engine within ten minutes.", type=NATURAL)
    host: str = option("127.0.0.1", "Address to listen on.")
    port: int = option(8000, type=click.IntRange(0, 65535))
    api_key_file: Path | None = option(
        None, "File of API keys, one a line; keys are needed if --host is not loopback.", type=FILE
    )
    api_key: tuple[str, ...] = ()
    metrics_key_file: Path | None = option(None, "File of keys for /metrics and /health only.", type=FILE)
    allowed_host: tuple[str, ...] = option(
        (), "Host header to accept; default: any if --host is not loopback.", multiple=True
    )
    allow_origin: tuple[str, ...] = option(
        (), "Origin of a web page that may call, such as https://a.org.", multiple=True
    )
    ssl_certfile: Path | None = option(None, "Certificate for HTTPS, PEM.", type=FILE)
    ssl_keyfile: Path | None = option(
        None, "Key of the certificate, readable by its owner only; default: in the same file.", type=FILE
    )
    log_format: str = option("text", type=click.Choice(["text", "json"]))
    log_level: str = option(
        "info",
        "Lowest level that is logged; probes such as /health/ready are logged at debug.",
        type=click.Choice(["debug", "info", "warning", "error"]),
    )
    metrics_names: tuple[str, ...] = option(
        ("kvq",),
        "Name prefixes at /metrics: kvq, vllm, llm; several with commas. kvq's are always there.",
        multiple=True,
    )
    kv_events: str | None = option(
        None, "Publish block events for routers: a port of loopback, or tcp://HOST:PORT to listen on."
    )
    kv_events_topic: str = option("", "Topic of block events, such as kv@HOST@MODEL for llm-d.")
    kv_events_form: Literal["maps", "arrays"] = option(
        "maps",
        "Encoding of block events: maps as of vLLM 0.32, arrays as before it.",
        type=click.Choice(["maps", "arrays"]),
    )
    kv_events_replay: str | None = option(None, "Address that replays missed block events, as --kv-events.")
    otlp_traces: str | None = option(
        None, "OpenTelemetry collector, such as http://127.0.0.1:4318, for spans of requests without texts."
    )
    record: Path | None = option(None, "Record chats and their answers in this file.", type=TO_WRITE)
    record_limit: str = option("1GiB", "Largest size of that file; then recording ends.", type=SIZE)
    record_redact: tuple[str, ...] = option(
        (), "Regular expression of texts to leave out, as addresses, card numbers and keys.", multiple=True
    )
    record_plain: bool = option(False, "Leave nothing out, not even personal data and secrets.")
    stored_responses: int = option(
        1000,
        "Responses of /v1/responses kept in memory for later requests; 0: none.",
        type=click.IntRange(0, 1 << 24),
    )
    stored_responses_memory: str = option("256MiB", "Most memory for them.", type=SIZE)
    request_timeout: float = option(600.0, "Seconds for a request; 0: no limit.", type=AT_LEAST_0)
    max_connections: int = option(
        4096, "Connections at a time, within the limit of open files (ulimit -n).", type=AT_LEAST_1
    )
    max_connections_per_address: int | None = option(
        None,
        "Connections of one client address; default: half of all. Behind a proxy all have one address.",
        type=AT_LEAST_1,
    )
    max_queue: int = option(1024, "Most requests that wait.", type=AT_LEAST_1)
    max_queued_tokens: int = option(1 << 20, "Most prompt tokens that wait.", type=TOKENS)
    max_wait: float = option(30.0, "Refuse requests that would wait longer (seconds).", type=POSITIVE)
    max_kv_pressure: float = option(0.95, "Refuse requests above this share of live blocks.", type=SHARE)
    overflow_to: str | None = option(
        None,
        "OpenAI-compatible API, such as https://host/v1, for completions and chats that this server refuses "
        "for its load. Their texts go there.",
    )
    overflow_key_file: Path | None = option(None, "Its API key, readable by its owner only.", type=FILE)
    overflow_model: str | None = option(None, "The model's name there; default: the request's.")
    overflow: Literal["batch", "all"] = option(
        "batch", "Requests that may go there: of batch priority, or all.", type=click.Choice(["batch", "all"])
    )
    overflow_concurrency: int = option(16, "Most requests there at a time.", type=AT_LEAST_1)
    overflow_tokens_per_day: int = option(1_000_000, "Most tokens there in a UTC day.", type=TOKENS)
    max_concurrency_per_key: int | None = option(
        None, "Most sequences of one API key: prompts times results.", type=AT_LEAST_1
    )
    requests_per_minute: int | None = option(None, "Most requests of one API key.", type=AT_LEAST_1)
    tokens_per_minute: int | None = option(None, "Most tokens of a key; cached ones are free.", type=TOKENS)


def _declared(callback: Callable[..., Any]) -> SectionedCommand:
    """Return a command with the options of `kvq serve`, which calls `callback(service, options)`."""
    key = click.option(
        "--api-key",
        multiple=True,
        help="API key, or several with commas. Process lists show it: a file or KVQ_API_KEY is better.",
    )
    options = config_option(service_options(key(gathered(_ServeOptions, "options")(callback))))
    command: SectionedCommand = click.command(name="serve", cls=SectionedCommand)(options)
    command.apart = ("models", "rollouts")
    return command


def _serve(service: Callable[[], dict[str, Any]], options: _ServeOptions) -> None:
    """Serve models over HTTP with an OpenAI-compatible API: completions, chats and responses.

    Several models, and versions of one, are in the --config file; see docs/server.md.
    """
    require("kvq serve", SERVER)
    with nothing_begun():  # until the event loop handles signals
        config = _config(service, options)
        models = models_config(config, _declared(_config))
        if not options.check:
            from kvq.server.run import serve, serve_models

            serve(config) if models is None else serve_models(models)
            return
        from kvq.server.check import check_config, check_models  # imports torch, which only this needs

        findings = check_config(config) if models is None else check_models(models)
    for finding in findings:
        echo(finding)
    if any(finding.is_error for finding in findings):
        raise click.exceptions.Exit(1)


def _config(service: Callable[[], dict[str, Any]], options: _ServeOptions) -> "ServerConfig":
    from kvq.server.admission.admission import AdmissionConfig
    from kvq.server.admission.config import ServerConfig
    from kvq.server.admission.metric_names import parse_names
    from kvq.server.admission.rate_limits import TenantLimits
    from kvq.server.logs import LogConfig

    fields, also = service(), tuple(filter(None, ",".join(options.kv_also).split(",")))
    access = partial(_access, options, (fields["kv"], *also))
    return ServerConfig(
        **fields,
        **picked(options, "host", "port", "max_connections", "max_connections_per_address", "max_restarts"),
        access=access(),
        read_access=access if options.api_key_file or options.ssl_certfile else None,
        tls=_tls(options.ssl_certfile, options.ssl_keyfile),
        admission=AdmissionConfig(
            max_wait_s=options.max_wait,
            **picked(options, "max_queue", "max_queued_tokens", "max_kv_pressure"),
        ),
        tenants=TenantLimits(
            max_concurrency=options.max_concurrency_per_key,
            **picked(options, "requests_per_minute", "tokens_per_minute"),
        ),
        log=LogConfig(format=options.log_format, level=options.log_level),
        kv_events=_events(options),
        kv_also=also,
        **picked(options, "kv_also_share", "guard_fallback", "adapter_folder"),
        record=_record(options),
        tracing=_tracing(options),
        overflow=_overflow(options),
        stored_responses=options.stored_responses,
        stored_responses_bytes=parse_bytes(options.stored_responses_memory, "--stored-responses-memory"),
        metrics_names=parse_names(options.metrics_names),
        trusts_chats=options.control_tokens_in in ("chats", "both"),
        trusts_completions=options.control_tokens_in in ("completions", "both"),
        grace_s=options.grace,
        timeout_s=options.request_timeout or None,
    )


def _access(options: _ServeOptions, formats: tuple[str, ...]) -> "Access":
    from kvq.server.admission.config import allowed_hosts, read_keys
    from kvq.server.http.credentials import Access

    keys = {} if options.api_key_file is None else read_keys(options.api_key_file)
    own = {key: kv for key, kv in keys.items() if kv is not None}
    for kv in own.values():
        if kv not in formats:
            raise ConfigError(
                f"{options.api_key_file}: {not_one_of('kv_format', kv, formats)}; see --kv-also"
            )
    beside = re.split(r"[,\s]+", ",".join([*options.api_key, os.environ.get("KVQ_API_KEY", "")]))
    return Access(
        api_keys=tuple(dict.fromkeys([*keys, *filter(None, beside)])),
        kv_formats=own,
        metrics_keys=() if options.metrics_key_file is None else tuple(read_keys(options.metrics_key_file)),
        hosts=allowed_hosts(options.host, options.allowed_host),
        origins=frozenset(options.allow_origin),
    )


def _events(options: _ServeOptions) -> Any:
    from kvq.server.kv_events.config import EventsConfig, listening

    if options.kv_events is None:
        if options.kv_events_replay is not None or options.kv_events_topic:
            raise ConfigError("--kv-events-replay and --kv-events-topic need --kv-events, such as 5557")
        return None
    require("--kv-events", EVENTS)
    replay = options.kv_events_replay
    return EventsConfig(
        address=listening(options.kv_events, "--kv-events"),
        topic=options.kv_events_topic,
        form=options.kv_events_form,
        replay=None if replay is None else listening(replay, "--kv-events-replay"),
    )


def _overflow(options: _ServeOptions) -> Any:
    if options.overflow_to is None:
        if options.overflow_key_file is not None or options.overflow_model is not None:
            raise ConfigError("--overflow-key-file and --overflow-model need --overflow-to and a URL")
        return None
    require("--overflow-to", OVERFLOW)
    from kvq.server.admission.config import read_keys
    from kvq.server.overflow import Overflow, OverflowConfig

    keys = [*read_keys(options.overflow_key_file)] if options.overflow_key_file is not None else [None]
    config = OverflowConfig(
        url=options.overflow_to,
        key=keys[0],
        model=options.overflow_model,
        takes=options.overflow,
        max_concurrency=options.overflow_concurrency,
        tokens_per_day=options.overflow_tokens_per_day,
        timeout_s=options.request_timeout or 600.0,
    )
    return partial(Overflow, config)


def _tracing(options: _ServeOptions) -> Any:
    if options.otlp_traces is None:
        return None
    require("--otlp-traces", OTEL)
    from kvq.server.tracing import otlp_tracing

    return partial(otlp_tracing, options.otlp_traces)


def _record(options: _ServeOptions) -> Any:
    from kvq.server.recording import Recorder
    from kvq.server.redaction import Redactor

    if options.record is None:
        if options.record_redact or options.record_plain:
            raise ConfigError("--record-redact and --record-plain need --record and a file")
        return None
    if options.record_plain and options.record_redact:
        raise ConfigError("--record-plain records all text; leave it or --record-redact out")
    redactor = None if options.record_plain else Redactor(options.record_redact)
    return partial(
        Recorder, Path(options.record), redactor, parse_bytes(options.record_limit, "--record-limit")
    )


def _tls(certificate: Path | None, key: Path | None) -> Any:
    from kvq.server.http.credentials import tls_context

    if certificate is None:
        if key is not None:
            raise ConfigError(f"--ssl-keyfile {key} needs its certificate; give --ssl-certfile, too")
        return None
    context = partial(tls_context, certificate, key or certificate)
    context()  # raises for unusable files
    return context


command = _declared(_serve)
command.sections = {
    "device": "Model",
    "served_model_name": "Requests and answers",
    "max_num_seqs": "Memory and steps",
    "check": "Server",
    **dict.fromkeys(("api_key", "host"), "Address and access"),
    "log_format": "Logs, metrics and block events",
    "record": "Recording",
    "stored_responses": "Limits",
}
