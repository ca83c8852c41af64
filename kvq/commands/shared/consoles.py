"""Consoles for tables: what they are told is text, never markup, and can't steer the terminal."""

from typing import Any

from rich import console
from rich.text import Text

from kvq.printable import printable


class PlainConsole(console.Console):  # noqa: TID251 - the one place
    """rich's, for texts from outside."""

    def __init__(self, *, stderr: bool = False, width: int | None = None) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, stderr=stderr, width=width)

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(printable(text), **options)
