"""`--config FILE`: options of a command from a YAML file; what the command line says goes before it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from kvq.errors import ConfigError, first_lines, nearest
from kvq.extras import require

_Command = TypeVar("_Command", bound=Callable[..., Any])


def config_option(command: _Command) -> _Command:
    """Add --config: keys are the long options' names, with dashes or underscores; lists repeat an option."""
    option = click.option(
        "--config",
        type=click.Path(path_type=Path),
        is_eager=True,
        expose_value=False,
        callback=_load,
        help="YAML file with any of these options, such as `max-num-seqs: 64`.",
    )
    return option(command)


def _load(context: click.Context, _: click.Parameter, path: Path | None) -> None:
    if path is None:
        return
    names = _names(context.command)
    given = _read(path)
    defaults = dict(context.default_map or {})
    for key, value in given.items():
        name = str(key).replace("_", "-")
        if name not in names:
            raise ConfigError(
                f"{path}: unknown option {key!r}{nearest(name, sorted(names)) or '; see --help for all'}"
            )
        if value is None:  # nothing behind the colon
            continue
        if isinstance(value, dict):
            raise ConfigError(f"{path}: {key} must be a value or a list, got a mapping")
        parameter = names[name]
        is_single = parameter.multiple and not isinstance(value, list)
        value = [value] if is_single else value
        try:
            parameter.type_cast_value(context, value)
        except click.BadParameter as error:
            raise ConfigError(f"{path}: {key}: {error.message}") from error
        defaults[str(parameter.name)] = value
    context.default_map = defaults


def _names(command: click.Command) -> dict[str, click.Option]:
    """Options by their long names, without the dashes."""
    return {
        option.removeprefix("--"): parameter
        for parameter in command.params
        if isinstance(parameter, click.Option)
        for option in parameter.opts
        if option.startswith("--") and parameter.name not in ("config", "help")
    }


def _read(path: Path) -> dict[Any, Any]:
    require("--config", ("yaml",))
    import yaml

    try:
        given = yaml.safe_load(path.read_text(encoding="utf8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} can't be read: {error}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is no YAML: {first_lines(error)}") from error
    if given is None:
        return {}
    if not isinstance(given, dict):
        raise ConfigError(f"{path} must map options to values, got a {type(given).__name__}")
    return given
