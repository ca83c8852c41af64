"""`--config FILE`: options of a command from a YAML file; the command line takes precedence."""

import json
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import click

from kvq.commands.shared.foreign import translated
from kvq.commands.shared.param_types import TEXT_OR_MAPPING, TokenCount
from kvq.errors import ConfigError, first_lines, nearest
from kvq.extras import require
from kvq.strict_json import check_value

_MAX_BYTES = 1 << 20
_MAX_DEPTH = 8
# YAML 1.1 reads 8:30 as 510, 010 as 8, 0x50 as 80 and 1_0 as 10; here, these are strings.
_WHOLE = re.compile(r"[-+]?(?:0|[1-9][0-9]*)")
_REAL = re.compile(r"[-+]?(?:(?:0|[1-9][0-9]*)(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?")
_NUMBERS = {
    "tag:yaml.org,2002:int": re.compile(rf"^{_WHOLE.pattern}$"),
    # Without a dot, 1e5 may well be the name of a revision.
    "tag:yaml.org,2002:float": re.compile(
        rf"^(?:(?=.*\.){_REAL.pattern}|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
    ),
}
APART = "kvq.apart"  # key of a context's meta for what a file has besides options
_Command = TypeVar("_Command", bound=Callable[..., Any])


def config_option(command: _Command) -> _Command:
    """Add --config. Keys are long option names with dashes or underscores; lists repeat an option.

    Keys in the command's `apart` are not options: the context's meta has them under `APART`, with the path. A
    mapping as the context's `obj` takes precedence over the file.
    """
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
    given = read_mapping(path)
    apart = {key: given.pop(key) for key in getattr(context.command, "apart", ()) if key in given}
    if apart:
        context.meta[APART] = path, apart
    own = {_plain(key): value for key, value in (context.obj or {}).items()}
    given = {key: value for key, value in given.items() if _plain(key) not in own} | own
    defaults = dict(context.default_map or {})
    written: dict[str, Any] = {}
    for key, name, value in _translated(context.command, names, given):
        if name not in names:
            raise ConfigError(
                f"{path}: unknown option {key!r}{nearest(name, sorted(names)) or '; see --help for all'}"
            )
        parameter = names[name]
        if (before := written.setdefault(str(parameter.name), key)) != key:
            raise ConfigError(f"{path}: {before} and {key} are one option; give it once")
        if value is None:  # nothing after the colon
            continue
        if parameter.type is TEXT_OR_MAPPING and isinstance(value, dict):
            value = json.dumps(value)
        items = value if isinstance(value, list) else [value]
        if isinstance(value, list) and not parameter.multiple:
            raise ConfigError(f"{path}: {key} takes one value, got a list")
        for item in items:
            if (wanted := _wanted(parameter, item)) is not None:
                raise ConfigError(f"{path}: {key} is {wanted}, got {_shown(item)}")
        value = items if parameter.multiple else value
        try:
            parameter.type_cast_value(context, value)
        except click.BadParameter as error:
            raise ConfigError(f"{path}: {key}: {error.message}") from error
        defaults[str(parameter.name)] = value
    context.default_map = defaults


def _translated(
    command: click.Command, names: dict[str, click.Option], given: dict[Any, Any]
) -> Iterator[tuple[Any, str, Any]]:
    """Yield each option in a file as (key, kvq's name, value), translating options of other engines."""
    for key, value in given.items():
        name = _plain(key)
        several = [] if value is True else value if isinstance(value, list) else [value]
        words = [f"--{name}", *map(str, several)]
        if name in names or value in (None, False) or (known := translated(command, words)) == words:
            yield key, name, value
            continue
        found: dict[str, list[str]] = {}
        for word in known:
            name = word.removeprefix("--") if word.startswith("--") else name
            found.setdefault(name, []).extend([] if word.startswith("--") else [word])
        for name, texts in found.items():
            is_list = name in names and names[name].multiple
            yield key, name, (texts if is_list else texts[-1]) if texts else True


def _plain(key: object) -> str:
    return str(key).replace("_", "-")


def _names(command: click.Command) -> dict[str, click.Option]:
    """Return a command's options, keyed by their long names without the leading dashes."""
    return {
        option.removeprefix("--"): parameter
        for parameter in command.params
        if isinstance(parameter, click.Option)
        for option in parameter.opts
        if option.startswith("--") and parameter.name not in ("config", "help")
    }


def _wanted(option: click.Option, value: Any) -> str | None:
    """Return in words what an option accepts, or None if it accepts `value`. (click takes 80.5 as 80.)"""
    if option.is_flag:
        return None if isinstance(value, bool) else "true or false"
    kind = option.type
    if isinstance(kind, click.types.StringParamType | click.Path):
        return None if isinstance(value, str) else "a text; put it in quotes"
    is_text = isinstance(kind, TokenCount) and isinstance(value, str)  # such as 8k, which TokenCount parses
    if isinstance(kind, click.types.IntParamType) and not is_text:
        is_whole = type(value) is int or (isinstance(value, str) and _WHOLE.fullmatch(value))
        return None if is_whole else "a whole number in plain digits"
    if isinstance(kind, click.types.FloatParamType):
        is_real = type(value) in (int, float) or (isinstance(value, str) and _REAL.fullmatch(value))
        return None if is_real else "a number in plain digits"
    is_plain = isinstance(value, str | int | float) and not isinstance(value, bool)
    return None if is_plain else "one value"


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict | list):
        return "a mapping" if isinstance(value, dict) else "a list"
    return f"{value!r:.50}"


def read_mapping(path: Path) -> dict[Any, Any]:
    """Return the mapping in a YAML file; raise ConfigError if it is none, or ambiguous."""
    require("--config", ("yaml",))
    import yaml

    try:
        with path.open("rb") as file:
            raw = file.read(_MAX_BYTES + 1)
        if len(raw) > _MAX_BYTES:
            raise ConfigError(f"{path} may have {_MAX_BYTES} bytes")
        text = raw.decode("utf8")
        _check_shape(path, yaml.parse(text, yaml.SafeLoader))
        loader = _loader()(text)
        pairs = loader.get_single_node()
        given = None if pairs is None else loader.construct_document(pairs)
    except ConfigError:
        raise
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} can't be read: {error}") from error
    except (yaml.YAMLError, ValueError) as error:  # ValueError: an invalid date or number
        raise ConfigError(f"{path} is no YAML: {first_lines(error)}") from error
    if given is None:
        return {}
    if not isinstance(given, dict):
        raise ConfigError(f"{path} must map options to values, got a {type(given).__name__}")
    try:
        check_value(given)
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from error
    seen: set[str] = set()
    for key, _ in pairs.value:
        if key.value in seen:
            raise ConfigError(f"{path}: {key.value} is given twice")
        seen.add(key.value)
    return given


def _loader() -> Any:  # D357: only plain digits, because YAML 1.1 reads 8:30 as 510
    """Return a variant of YAML's safe loader that reads only plain digits as numbers."""
    import yaml

    loader: Any = type("Loader", (yaml.SafeLoader,), {})
    loader.yaml_implicit_resolvers = {
        first: [(tag, kept) for tag, kept in resolvers if tag not in _NUMBERS]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    for tag, pattern in _NUMBERS.items():
        loader.add_implicit_resolver(tag, pattern, list("-+.0123456789"))
    return loader


def _check_shape(path: Path, events: Iterable[Any]) -> None:
    """Raise ConfigError for aliases, tags, merges and deep nesting, before any value is built.

    Building values is recursive, and aliases may expand to gigabytes.
    """
    import yaml

    depth = 0
    for event in events:
        if isinstance(event, yaml.AliasEvent):
            raise ConfigError(f"{path}: aliases such as *{event.anchor} are not read; write the value again")
        if getattr(event, "tag", None) is not None:  # their constructors raise errors of many kinds
            raise ConfigError(f"{path}: tags such as {event.tag} are not read; write the value alone")
        if isinstance(event, yaml.ScalarEvent) and event.value == "<<" and event.implicit[0]:
            raise ConfigError(f"{path}: merges (<<) are not read; write the options again")
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        if depth > _MAX_DEPTH:
            raise ConfigError(f"{path}: values may be nested {_MAX_DEPTH} levels deep")
