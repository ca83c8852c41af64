"""Consoles for tables, in which text is never parsed as markup and can't send control codes."""

from collections.abc import Callable
from typing import Concatenate, ParamSpec

from rich.console import Console  # noqa: TID251 - the one place
from rich.text import Text

from kvq.printable import printable

P = ParamSpec("P")
_Render = Callable[Concatenate[Console, str, P], Text]


def _of_printable(render: _Render[P]) -> _Render[P]:
    """Return a method that calls `render` with control characters in the text spelled out."""

    def render_str(self: Console, text: str, /, *args: P.args, **options: P.kwargs) -> Text:
        return render(self, printable(text), *args, **options)

    return render_str


class PlainConsole(Console):
    """Rich console for untrusted text."""

    def __init__(self, *, stderr: bool = False, width: int | None = None) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, stderr=stderr, width=width)

    # rich passes the text only as a positional argument
    render_str = _of_printable(Console.render_str)  # type: ignore[assignment]
