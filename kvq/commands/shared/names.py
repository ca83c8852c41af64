"""Option types whose values shells complete: KV formats, models, GPUs. They check nothing."""

from collections.abc import Callable, Iterable

import click
from click.shell_completion import CompletionItem
from click.types import StringParamType


class ShellNames(StringParamType):
    """Text that shells complete from names.

    `find`: returns the names, called only when a shell completes. `separators`: characters between several
    names. `paths`: "dir" or "file" if a path is a value, too. `halves`: names that make a pair. `missing`:
    error message if a name is needed and none is given.
    """

    def __init__(
        self,
        find: Callable[[], Iterable[str]],
        *,
        separators: str = "",
        paths: str = "",
        halves: Callable[[], Iterable[str]] = tuple,
        missing: str = "a MODEL is needed: a folder, a hub name, or 'tiny'.",
    ) -> None:
        self._find = find
        self._halves = halves
        self._separators = separators
        self._paths = paths
        self.missing = missing

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """Return names that complete the text after the last separator, else paths."""
        begin = 1 + max((incomplete.rfind(mark) for mark in self._separators), default=-1)
        find = self._find
        half, slash, _ = incomplete[begin:].partition("/")
        if slash and half.lower() in self._halves():
            begin, find = begin + len(half) + 1, self._halves
        before, last = incomplete[:begin], incomplete[begin:].lower()
        found = [CompletionItem(before + name) for name in find() if name.startswith(last)]
        arguments = [one for one in ctx.command.params if isinstance(one, click.Argument)]
        others = [one for one in arguments if not isinstance(one.type, ShellNames)]
        kind = "file" if others else self._paths  # other arguments of a command may be files
        # Paths come first: bash's script forgets items before them.
        is_path = self._paths == "dir" or (self._paths and not found)
        return [CompletionItem(incomplete, type=kind), *found] if is_path else found


def _formats() -> tuple[str, ...]:
    from kvq.formats.names import known_names

    return known_names()


def _halves() -> list[str]:
    from kvq.formats.names import split_pair

    return [name for name in _formats() if split_pair(name).k == name]


def _embedded() -> tuple[str, ...]:
    from kvq.models.describe.resolve import EMBEDDED

    return tuple(EMBEDDED)


def _models() -> tuple[str, ...]:
    from kvq.capacity.plan.catalogue import known_models

    return (*_embedded(), *known_models())


def _gpus() -> tuple[str, ...]:
    from kvq.capacity.plan.gpus import known_gpus

    return tuple(known_gpus())


# For `kvq inspect`: these names once stored other bytes.
RENAMED = "bare names keep K per channel of a block; what int4 was is int4_g32_s8_rot/int4_g32_s8_rot"

FORMATS = ShellNames(_formats, separators=",", paths="file", halves=_halves)  # or a kvq.json
ONE_FORMAT = ShellNames(_formats, paths="file", halves=_halves)
HALF_FORMAT = ShellNames(_halves)
MODEL = ShellNames(_embedded, paths="dir")
PLANNED_MODEL = ShellNames(  # the shape alone is enough
    _models,
    paths="dir",
    missing="Plans are of a model on GPUs: give MODEL and --gpu; see kvq models, kvq gpus.",
)
GPUS = ShellNames(_gpus, separators=",")
GPU = ShellNames(_gpus)
