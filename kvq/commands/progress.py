"""Progress bars on standard error, so that results on standard output can be piped."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


@contextmanager
def progress_bar(what: str) -> Iterator[Callable[[int, int | None], None]]:
    """Yield a function (done, total, if it is known yet) that draws a bar; not on a pipe or in a log."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def counted(progress: Callable[[int, int | None], None], total: int) -> Callable[[], None]:
    """A callback that moves a progress bar on by one of `total`."""
    done = 0

    def step() -> None:
        nonlocal done
        done += 1
        progress(done, total)

    return step


@contextmanager
def status(what: str) -> Iterator[None]:
    """Show a spinner with a line of text while something short runs."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield
        return
    with console.status(what):
        yield


@contextmanager
def progress_steps() -> Iterator[Callable[[str], Callable[[int, int], None]]]:
    """Yield a function that begins a step by its name, and returns one (done, total) that draws its bar."""
    with ExitStack() as bars:

        def begin(what: str) -> Callable[[int, int], None]:
            bars.close()
            return bars.enter_context(progress_bar(what))

        yield begin
