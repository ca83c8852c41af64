"""Rows that long measurements have finished: written as they come, and shown when the rest never comes."""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from kvq.commands.screen import echo
from kvq.evals.results import write_json

Make = Callable[[], Sequence[Any]]  # the rows that are finished now
_EVERY_S = 10.0  # between two writes, at least
_SHARE = 50  # of the time, one part in so many is spent on them at most


class FinishedRows:
    """Keeps what is finished in a file beside the result's, until the result is whole.

    `with FinishedRows(path, result, show) as finished:` measures with `keep=finished.keep`. When that is
    ended early, by an interruption or an error, the rows so far are shown, and lie in NAME.partial.json.
    """

    def __init__(
        self,
        path: str | None,
        result: Callable[[Sequence[Any]], dict[str, Any]],
        show: Callable[[dict[str, Any]], object],
    ) -> None:
        """`path`: of the whole result, None to write nothing. `result`: the JSON envelope of rows."""
        self._path = None if path is None else Path(path)
        self._partial: Path | None = None
        if self._path is not None:
            name = f"{self._path.stem}.partial{self._path.suffix or '.json'}"
            self._partial = self._path.with_name(name)
        self._result = result
        self._show = show
        self._make: Make | None = None
        self._next_s = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        if kind is None or self._make is None:
            return
        rows = self._make()
        if not rows:
            return
        echo("not complete; finished so far:")
        self._show(self._unfinished(rows))
        where = "above" if self._partial is None else f"in {self._partial}, and above"
        self._write(rows)
        echo(f"kvq: not complete: what was finished is {where}", err=True)

    def keep(self, make: Make) -> None:
        """Take note of the rows that `make` returns; they are made when they are written or shown."""
        self._make = make
        began = time.monotonic()
        if self._partial is not None and began >= self._next_s:
            self._write(make())
            now = time.monotonic()
            self._next_s = now + max(_EVERY_S, _SHARE * (now - began))

    def finish(self, result: dict[str, Any]) -> None:
        """Write the whole result; what was kept is no longer needed."""
        self._make = None
        if self._path is not None and self._partial is not None:
            write_json(self._path, result)
            with suppress(FileNotFoundError):
                self._partial.unlink()

    def end(self, rows: Sequence[Any]) -> dict[str, Any]:
        """The whole result, of all rows: written, shown and returned."""
        result = self._result(rows)
        self.finish(result)
        self._show(result)
        return result

    def _write(self, rows: Sequence[Any]) -> None:
        if self._partial is not None and rows:
            write_json(self._partial, self._unfinished(rows))

    def _unfinished(self, rows: Sequence[Any]) -> dict[str, Any]:
        return {**self._result(rows), "complete": False}
