"""Progress of long operations on standard error, so that results on standard output can be piped.

A terminal shows a bar. A pipe or a log gets an occasional plain line with the operation, the completed share
and the remaining time.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Self

from kvq.commands.shared.terminal import echo, hear_stages

if TYPE_CHECKING:
    from kvq.commands.shared.consoles import PlainConsole

Update = Callable[[int, int | None], None]  # (done, total); total is None while unknown

FIRST_S = 5.0  # delay before the first plain line; shorter work prints no lines
EVERY_S = 30.0  # time between further lines, or a tenth of the elapsed time if longer


class _PlainLines:  # D360: a line after 5 s, then every 30 s or tenth of the time
    """Progress in plain lines, printed by a separate thread so that stalled work is also reported."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._stage = ""
        self._done = 0
        self._total: int | None = None
        self._began = time.monotonic()
        self._has_spoken = False
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvq-progress", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        if self._has_spoken and kind is None:
            echo(f"kvq: {self._what}: done in {_span(self._elapsed_s)}", err=True)

    def update(self, done: int, total: int | None) -> None:
        """Set the amount of completed work."""
        self._done, self._total = done, total

    def stage(self, name: str) -> None:
        """Set the current stage of the work."""
        self._stage = f": {name}"

    @property
    def _elapsed_s(self) -> float:
        return time.monotonic() - self._began

    def _run(self) -> None:
        wait_s = FIRST_S
        while not self._ended.wait(wait_s):
            self._has_spoken = True
            echo(f"kvq: {self._line()}", err=True)
            wait_s = max(EVERY_S, self._elapsed_s / 10)

    def _line(self) -> str:
        what, elapsed_s = self._what + self._stage, self._elapsed_s
        done, total = self._done, self._total
        if not total:
            counted = f", {done:,} done" if done else ""
            return f"{what}{counted}, {_span(elapsed_s)} so far"
        left = f"about {_span(elapsed_s * (total - done) / done)} left" if done else "time left not known yet"
        return f"{what}: {done / total:.0%} done ({done:,} of {total:,}) in {_span(elapsed_s)}, {left}"


def _span(seconds: float) -> str:
    """Format a duration in its two largest units."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


@contextmanager
def progress_bar(what: str) -> Iterator[Update]:
    """Yield a function (done, total) that shows the progress of the work."""
    console = _console()
    if not console.is_terminal:
        with _PlainLines(what) as lines:
            yield lines.update
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


@contextmanager
def named_progress() -> Iterator[Callable[[str, int, int | None], None]]:
    """Yield a function (what, done, total) for work in several steps; each new `what` starts a step."""
    with ExitStack() as stack:
        current: str | None = None
        update: Update = lambda done, total: None  # noqa: E731 - until a step begins

        def progress(what: str, done: int, total: int | None) -> None:
            nonlocal current, update
            if what != current:
                stack.close()
                current, update = what, stack.enter_context(progress_bar(what))
            update(done, total)

        yield progress


@contextmanager
def status(what: str) -> Iterator[None]:
    """Show a spinner or plain lines for work of unknown length, with stages from kvq's log."""
    console = _console()
    with ExitStack() as stack:
        if console.is_terminal:
            spinner = stack.enter_context(console.status(what))
            stack.enter_context(hear_stages(lambda stage: spinner.update(f"{what}: {stage}")))
        else:
            lines = stack.enter_context(_PlainLines(what))
            stack.enter_context(hear_stages(lines.stage))
        yield


def _console() -> "PlainConsole":
    from kvq.commands.shared.consoles import PlainConsole

    return PlainConsole(stderr=True)
