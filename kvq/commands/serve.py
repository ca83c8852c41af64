"""`kvq serve`: an OpenAI-compatible server."""

from pathlib import Path
from typing import Any

import click

from kvq.commands.options import ModelOptions, kv_option, model_options
from kvq.errors import ConfigError


@click.command(name="serve")
@kv_option("auto", many=False)
@model_options
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", default=8000, show_default=True, type=click.IntRange(0, 65535))
@click.option("--served-model-name", help="The model's name for clients; default: the last part of its path.")
@click.option(
    "--api-key-file", type=click.Path(path_type=Path), help="Keys, one a line; needed beyond loopback."
)
@click.option(
    "--grace", default=30.0, show_default=True, help="Seconds that running requests get at the end."
)
@click.option("--max-num-seqs", default=128, show_default=True, help="Sequences that run side by side.")
@click.option("--max-num-batched-tokens", default=2048, show_default=True, help="New tokens of a step.")
@click.option("--kv-memory", help="Bytes of the block pool, such as 2GiB; default: what is free.")
@click.option("--num-blocks", type=int, help="Blocks of the pool, instead of --kv-memory.")
@click.option("--swap-memory", default="0", show_default=True, help="Host memory for preempted requests.")
@click.option("--itl-slo", type=float, help="Seconds between tokens that steps shall not exceed.")
@click.option("--ttft-slo", type=float, help="Seconds to the first token that prefill is hurried for.")
def command(
    kv: list[str],
    model_options: ModelOptions,
    host: str,
    port: int,
    served_model_name: str | None,
    api_key_file: Path | None,
    grace: float,
    itl_slo: float | None,
    ttft_slo: float | None,
    **engine: Any,
) -> None:
    """Serve a model over HTTP as OpenAI does: /v1/completions and /v1/chat/completions."""
    try:
        from kvq.server.run import ServerConfig, read_keys, serve
    except ImportError as error:
        raise ConfigError(
            f"the server needs more packages: pip install 'kvq-toolkit[serve]' ({error})"
        ) from error
    if model_options.calibrate_on_load:
        raise ConfigError("kvq serve takes scales from --scales; make them with kvq calibrate")
    load = model_options.load_options()
    load.pop("cache")
    options = load | engine | {"itl_slo_s": itl_slo, "ttft_slo_s": ttft_slo}
    config = ServerConfig(
        model=model_options.model,
        kv=kv[0],
        host=host,
        port=port,
        served_model_name=served_model_name,
        api_keys=read_keys(api_key_file) if api_key_file is not None else frozenset(),
        grace_s=grace,
        engine={name: value for name, value in options.items() if value is not None},
    )
    serve(config)
