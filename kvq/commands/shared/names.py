"""Options whose values shells complete: KV formats, models, GPUs. Their checks are elsewhere."""

from collections.abc import Callable, Iterable

import click
from click.shell_completion import CompletionItem
from click.types import StringParamType


class Names(StringParamType):
    """A text that shells complete from names.

    `find`: the names, found only when a shell asks. `separators`: characters between several names.
    `paths`: "dir" or "file" if a path is a value as well. `halves`: names of which two make a pair.
    `missing`: what to say where none is given and one is needed.
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
        """Names that go on from the last separator, else paths."""
        begin = 1 + max((incomplete.rfind(mark) for mark in self._separators), default=-1)
        find = self._find
        half, slash, _ = incomplete[begin:].partition("/")
        if slash and half.lower() in self._halves():
            begin, find = begin + len(half) + 1, self._halves
        before, last = incomplete[:begin], incomplete[begin:].lower()
        found = [CompletionItem(before + name) for name in find() if name.startswith(last)]
        arguments = [one for one in ctx.command.params if isinstance(one, click.Argument)]
        others = [one for one in arguments if not isinstance(one.type, Names)]
        kind = "file" if others else self._paths  # a command's own arguments may be files
        # Paths come first: bash's script forgets what it was told before them.
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


# What --kv's help and `kvq inspect` say, since the same names once stored other bytes.
RENAMED = "bare names keep K per channel of a block; what int4 was is int4_g32_s8_rot/int4_g32_s8_rot"

FORMATS = Names(_formats, separators=",", paths="file", halves=_halves)  # or a kvq.json
ONE_FORMAT = Names(_formats, paths="file", halves=_halves)
HALF_FORMAT = Names(_halves)
MODEL = Names(_embedded, paths="dir")  # that is loaded
PLANNED_MODEL = Names(  # whose shape is enough
    _models,
    paths="dir",
    missing="Plans are of a model on GPUs: give MODEL and --gpu; see kvq models, kvq gpus.",
)
GPUS = Names(_gpus, separators=",")
GPU = Names(_gpus)
