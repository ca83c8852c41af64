"""`kvq serve`: an OpenAI-compatible server."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvq.commands.config_file import config_option
from kvq.commands.interrupts import nothing_begun
from kvq.commands.options import Finite, ModelOptions, kv_option, model_options
from kvq.commands.screen import echo
from kvq.commands.served import engine_of, engine_options, strict_option, tool_call_option
from kvq.errors import ConfigError
from kvq.extras import SERVER, require

if TYPE_CHECKING:
    from kvq.server.config import ServerConfig

_AT_LEAST_1 = click.IntRange(min=1)


@click.command(name="serve")
@config_option
@kv_option("auto", many=False)
@model_options
@click.option("--check", is_flag=True, help="Only look whether this configuration can work, and end.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", default=8000, show_default=True, type=click.IntRange(0, 65535))
@click.option("--served-model-name", help="The model's name for clients; default: the last part of its path.")
@click.option(
    "--api-key-file", type=click.Path(path_type=Path), help="Keys, one a line; needed beyond loopback."
)
@click.option("--allowed-host", multiple=True, help="Host header to answer; default: any beyond loopback.")
@click.option("--allow-origin", multiple=True, help="Web page that may call, such as https://a.org.")
@click.option("--ssl-certfile", type=click.Path(path_type=Path), help="Certificate for HTTPS, PEM.")
@click.option(
    "--ssl-keyfile",
    type=click.Path(path_type=Path),
    help="Its key, readable by its owner only; default: in the certificate's file.",
)
@click.option("--log-format", default="text", show_default=True, type=click.Choice(["text", "json"]))
@click.option(
    "--log-level",
    default="info",
    show_default=True,
    type=click.Choice(["debug", "info", "warning", "error"]),
    help="The least that is logged; probes such as /health/ready at debug only.",
)
@tool_call_option
@strict_option
@click.option(
    "--control-tokens-in",
    default="completions",
    show_default=True,
    type=click.Choice(["completions", "chats", "both", "none"]),
    help="Where control tokens that clients' texts spell count as such, and not as plain text.",
)
@click.option(
    "--grace",
    default=30.0,
    show_default=True,
    type=Finite(min=0),
    help="Seconds that running requests get at the end.",
)
@click.option(
    "--max-restarts",
    default=5,
    show_default=True,
    type=click.IntRange(min=0),
    help="Of the engine, within ten minutes.",
)
@click.option(
    "--metrics-names",
    multiple=True,
    default=["kvq"],
    show_default=True,
    help="Names at /metrics: kvq, vllm, llm; several with commas. kvq's are always there.",
)
@click.option(
    "--request-timeout",
    default=600.0,
    show_default=True,
    type=Finite(min=0),
    help="Seconds for a request; 0: any.",
)
@click.option(
    "--max-connections",
    default=4096,
    show_default=True,
    type=_AT_LEAST_1,
    help="At once, as far as the limit of open files (ulimit -n) allows.",
)
@click.option(
    "--max-connections-per-address",
    type=_AT_LEAST_1,
    help="Of one client address; default: half of all. Behind a proxy all come from one.",
)
@click.option(
    "--max-queue",
    default=1024,
    show_default=True,
    type=_AT_LEAST_1,
    help="Requests that may wait for a seat.",
)
@click.option(
    "--max-queued-tokens",
    default=1 << 20,
    show_default=True,
    type=_AT_LEAST_1,
    help="Prompt tokens that may wait.",
)
@click.option(
    "--max-wait",
    default=30.0,
    show_default=True,
    type=Finite(min=0, min_open=True),
    help="Seconds to a first token that are borne.",
)
@click.option(
    "--max-kv-pressure",
    default=0.95,
    show_default=True,
    type=Finite(0, 1, min_open=True),
    help="Share of live blocks that is borne.",
)
@click.option(
    "--max-concurrency-per-key", type=_AT_LEAST_1, help="Sequences of one API key: prompts times results."
)
@click.option("--requests-per-minute", type=_AT_LEAST_1, help="Of one API key.")
@click.option("--tokens-per-minute", type=_AT_LEAST_1, help="Of one API key; cached ones are free.")
@engine_options
def command(kv: list[str], model_options: ModelOptions, check: bool, **options: Any) -> None:
    """Serve a model over HTTP as OpenAI does: /v1/completions and /v1/chat/completions."""
    require("kvq serve", SERVER)
    with nothing_begun():  # until the event loop takes the signals
        from kvq.server.check import check_config
        from kvq.server.run import serve

        config = _config(kv[0], model_options, options)
        if not check:
            serve(config)
            return
        findings = check_config(config)
    for finding in findings:
        echo(finding)
    if any(finding.is_error for finding in findings):
        raise click.exceptions.Exit(1)


def _config(kv: str, model_options: ModelOptions, options: dict[str, Any]) -> "ServerConfig":
    from kvq.server.admission import AdmissionConfig
    from kvq.server.config import ServerConfig, allowed_hosts, read_keys
    from kvq.server.guard import Access
    from kvq.server.logs import LogConfig
    from kvq.server.names import parse_names
    from kvq.server.tenants import TenantLimits

    take = options.pop
    host, key_file, control = take("host"), take("api_key_file"), take("control_tokens_in")
    access = Access(
        api_keys=read_keys(key_file) if key_file is not None else (),
        hosts=allowed_hosts(host, take("allowed_host")),
        origins=frozenset(take("allow_origin")),
    )
    return ServerConfig(
        model=model_options.model,
        kv=kv,
        host=host,
        port=take("port"),
        served_model_name=take("served_model_name"),
        access=access,
        tls=_tls(take("ssl_certfile"), take("ssl_keyfile")),
        admission=AdmissionConfig(
            max_queue=take("max_queue"),
            max_queued_tokens=take("max_queued_tokens"),
            max_wait_s=take("max_wait"),
            max_kv_pressure=take("max_kv_pressure"),
        ),
        tenants=TenantLimits(
            max_concurrency=take("max_concurrency_per_key"),
            requests_per_minute=take("requests_per_minute"),
            tokens_per_minute=take("tokens_per_minute"),
        ),
        log=LogConfig(format=take("log_format"), level=take("log_level")),
        max_connections=take("max_connections"),
        max_connections_per_address=take("max_connections_per_address"),
        max_restarts=take("max_restarts"),
        metrics_names=parse_names(take("metrics_names")),
        tool_call_parser=take("tool_call_parser"),
        strict_requests=take("strict_requests"),
        trusts_chats=control in ("chats", "both"),
        trusts_completions=control in ("completions", "both"),
        grace_s=take("grace"),
        timeout_s=take("request_timeout") or None,
        engine=engine_of(model_options, take("engine_options")),
    )


def _tls(certificate: Path | None, key: Path | None) -> Any:
    from kvq.server.config import Tls

    if certificate is None:
        if key is not None:
            raise ConfigError(f"--ssl-keyfile {key} needs its certificate; give --ssl-certfile, too")
        return None
    return Tls(certificate=certificate, key=key or certificate)
