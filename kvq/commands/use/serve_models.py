"""Configuration of `kvq serve` with several models, which its --config file lists."""

from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from kvq.commands.shared.config_file import APART
from kvq.commands.shared.declare import GIVEN
from kvq.errors import ConfigError

if TYPE_CHECKING:
    from kvq.server.admission.config import ServerConfig
    from kvq.server.models.config import ModelsConfig

_OF_MODELS = ("words", "model", "served_model_name")  # options that each model has its own of
_OF_SERVER = {  # options that all models share
    *("check", "grace", "host", "port", "api_key_file", "api_key", "metrics_key_file", "allowed_host"),
    *("allow_origin", "ssl_certfile", "ssl_keyfile", "log_format", "log_level", "metrics_names"),
    *("max_connections", "max_connections_per_address"),
    *("max_concurrency_per_key", "requests_per_minute", "tokens_per_minute"),
}


def models_config(server: "ServerConfig", declared: click.Command) -> "ModelsConfig | None":
    """Return the configuration of several models, or None if the --config file lists none.

    `server`: what the options of the whole server say. `declared`: a command with all options that returns a
    `ServerConfig`; for each model, it reads the command line, that model's options, and the file's options.

    Raises:
        ConfigError: an option is not for one model, or can't be used.
    """
    from kvq.server.models.config import HostedModel, ModelsConfig, read_entries, read_rollouts

    context = click.get_current_context()
    if APART not in context.meta:
        return None
    path, apart = context.meta[APART]
    for name in _OF_MODELS:
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            raise ConfigError(f"{path} lists models; name them there, not on the command line")
    if server.record is not None:
        raise ConfigError(f"{path}: several models can't record in one file; give each a record of its own")
    found = []
    for entry, options in read_entries(path, apart.get("models")):
        if shared := sorted(_OF_SERVER & options.keys()):
            raise ConfigError(f"{path}: {shared[0]} is for the whole server; move it out of {entry.name}")
        also = options.pop("served_model_name", [])
        names = [entry.name, *(also if isinstance(also, list) else [also])]
        config = _config(declared, context.meta[GIVEN], options | {"served_model_name": names}, entry.name)
        found.append(HostedModel(entry=entry, config=config))
    models, aliases = [one.entry.name for one in found], list[str]()
    for one in found:
        aliases += (one.config.served_model_name or ())[1:]
    rollouts = read_rollouts(path, apart.get("rollouts"), models, aliases)
    return ModelsConfig(path=path, server=server, models=tuple(found), rollouts=rollouts)


def _config(declared: click.Command, words: list[str], options: dict[str, Any], name: str) -> "ServerConfig":
    try:
        with declared.make_context("serve", list(words), obj=options) as context:
            config: ServerConfig = declared.invoke(context)
    except ConfigError as error:
        raise ConfigError(f"{error} (model {name})") from error
    except click.UsageError as error:
        raise ConfigError(f"{error.format_message()} (model {name})") from error
    return config
