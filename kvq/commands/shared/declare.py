"""Declaration of options: fields of frozen dataclasses that commands receive as one argument."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from kvq.commands.shared.param_types import TO_WRITE

GIVEN = "kvq.given"  # key of a context's meta for the words of the command line, in kvq's spelling
_Command = TypeVar("_Command", bound=Callable[..., Any])


def option(  # D356: options are fields of frozen dataclasses
    default: Any = None, help: str | None = None, *, type: Any = None, names: str = "", multiple: bool = False
) -> Any:
    """Return a field of a frozen dataclass that becomes an option of commands using that dataclass.

    See `gathered`. The option is named after the field, unless `names` lists spellings, separated by spaces.
    The default False makes a flag, and True a flag with a --no- form. `--help` shows defaults, except for
    flags that are off.
    """
    attributes = {
        "default": default,
        "help": help,
        "type": type,
        "multiple": multiple,
        "is_flag": isinstance(default, bool),
        "show_default": default is not None and default is not False and default != (),
    }
    return dataclasses.field(default=default, metadata={"names": names.split(), "attributes": attributes})


def path_option(names: str, help: str, *, type: click.Path = TO_WRITE) -> Any:
    """Return an `option` field for a path, by default a path to write to. The value is None if omitted."""
    return option(None, help, names=names, type=type)


def picked(options: object, *names: str) -> dict[str, Any]:
    """Return the named attributes as keyword arguments, for a callee with parameters of the same names."""
    return {name: getattr(options, name) for name in names}


def given_options() -> dict[str, str]:
    """Return the options present on the command line, as {name: longest spelling}."""
    context = click.get_current_context()
    return {
        one.name: max(one.opts, key=len)
        for one in context.command.params
        if one.name and context.get_parameter_source(one.name) is ParameterSource.COMMANDLINE
    }


def gathered(kind: type[Any], name: str) -> Callable[[_Command], _Command]:
    """Pass options to a command as one argument `name`, an instance of the frozen dataclass `kind`.

    Fields made by `option` become options of the command. Other fields receive the values of options with the
    same names, which other decorators must add above.
    """

    def gather(command: _Command) -> _Command:
        def change(values: dict[str, Any]) -> dict[str, Any]:
            own = {field.name: values.pop(field.name) for field in dataclasses.fields(kind)}
            return values | {name: kind(**own)}

        command = adapted(command, change)
        for field in reversed(dataclasses.fields(kind)):
            if field.metadata:
                own = field.name.replace("_", "-")
                names = field.metadata["names"] or [
                    f"--{own}/--no-{own}" if field.default is True else f"--{own}"
                ]
                click.option(*names, field.name, **field.metadata["attributes"])(command)
        return command

    return gather


class SectionedCommand(click.Command):
    """Command with many options, which also accepts options of other engines.

    `--help` groups options into `sections`, a map from the first option of each section to its title.
    """

    sections: Mapping[str, str] = MappingProxyType({})
    apart: tuple[str, ...] = ()  # keys of a --config file that are not options

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not ctx.resilient_parsing:
            from kvq.commands.shared.foreign import translated

            args = translated(self, args)
        ctx.meta[GIVEN] = list(args)
        return super().parse_args(ctx, args)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        title, shown = "Options", dict[str, list[tuple[str, str]]]()
        for param in (one for one in self.get_params(ctx) if isinstance(one, click.Option)):
            title = "Options" if param.name == "help" else self.sections.get(str(param.name), title)
            if (record := param.get_help_record(ctx)) is not None:
                shown.setdefault(title, []).append(record)
        for title, records in shown.items():
            with formatter.section(title):
                formatter.write_dl(records)


def adapted(command: _Command, change: Callable[[dict[str, Any]], dict[str, Any]]) -> _Command:
    """Wrap a command so that it is called with `change(values)`, where `values` are its options."""

    @functools.wraps(command)
    def wrapped(**values: Any) -> Any:
        return command(**change(values))

    return wrapped  # type: ignore[return-value]
