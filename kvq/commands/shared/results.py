"""Results of commands: checks before measurements, finished rows, JSON, time and memory."""

import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from kvq.commands.shared.progress import progress_bar
from kvq.commands.shared.terminal import echo
from kvq.errors import ConfigError
from kvq.evals.watch import Watch
from kvq.extras import PLOTS, require
from kvq.sizes import binary

if TYPE_CHECKING:
    import torch


def begin(*paths: str | Path | None, plot: str | Path | None = None, html: str | Path | None = None) -> None:
    """Check the paths of results and look up the source commit, before anything is measured.

    Raises:
        ConfigError: a path can't be written, two paths refer to the same file, `plot` does not have the
        suffix of an image, or packages that draw plots are missing.
    """
    from kvq import fileio
    from kvq.evals.report.figure import check_plot_path
    from kvq.evals.report.results import source_commit

    if html is not None:
        require("--html", PLOTS)
    if plot is not None:
        check_plot_path(plot)
    named = [path for path in (*paths, html, plot) if path is not None]
    if len({fileio.check_writable(path).resolve() for path in named}) < len(named):
        raise ConfigError(
            f"two results would go into one file: {', '.join(map(str, named))}; give each a name of its own"
        )
    source_commit()


def json_beside(html_path: str | None, json_path: str | None) -> str | None:
    """Return the path of the JSON file, by default next to the HTML page if there is one."""
    if html_path is None or json_path is not None:
        return json_path
    return str(Path(html_path).with_suffix(".json"))


def result_of(
    rows: Sequence[Any], device: "torch.device | None" = None, facts: Mapping[str, object] | None = None
) -> dict[str, Any]:
    """Return the JSON envelope of rows and facts; `device` is None if the rows do not depend on a device."""
    import torch

    from kvq.evals.report.results import envelope

    return envelope(["kvq", *sys.argv[1:]], device or torch.device("cpu"), rows, facts)


def write_rows(
    rows: Sequence[Any],
    path: str | None,
    device: "torch.device | None" = None,
    facts: Mapping[str, object] | None = None,
) -> None:
    """Write the rows as JSON if `path` is not None."""
    if path is not None:
        _write_json(path, result_of(rows, device, facts))


Make = Callable[[], Sequence[Any]]  # returns the rows finished so far
_EVERY_S = 10.0  # minimum time between two writes
_SHARE = 50  # writes take at most 1/50 of the time


class FinishedRows:  # D359: finished rows survive Ctrl-C
    """Store for finished rows, in a file next to the result's path, until the result is complete.

    Inside `with FinishedRows(path, result, show) as finished:`, measure with `keep=finished.keep`. If an
    interruption or an error ends the block early, the rows so far are shown and remain in NAME.partial.json.
    """

    def __init__(
        self,
        path: str | None,
        result: Callable[[Sequence[Any]], dict[str, Any]],
        show: Callable[[dict[str, Any]], object],
    ) -> None:
        """`path`: file for the complete result, or None. `result`: returns the JSON envelope of rows."""
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

    def measure(self, what: str, work: Callable[..., Sequence[Any]]) -> dict[str, Any]:
        """Run `work(watch=...)` with a progress bar, and return the result with its rows."""
        with self:
            with progress_bar(what) as progress:
                rows = work(watch=Watch(progress, self.keep))
            return self.end(rows)

    def keep(self, make: Make) -> None:
        """Keep the rows returned by `make`, which is called when they are written or shown."""
        self._make = make
        began = time.monotonic()
        if self._partial is not None and began >= self._next_s:
            self._write(make())
            now = time.monotonic()
            self._next_s = now + max(_EVERY_S, _SHARE * (now - began))

    def finish(self, result: dict[str, Any]) -> None:
        """Write the complete result, and delete the file of finished rows."""
        self._make = None
        if self._path is not None and self._partial is not None:
            _write_json(self._path, result)
            with suppress(FileNotFoundError):
                self._partial.unlink()

    def end(self, rows: Sequence[Any]) -> dict[str, Any]:
        """Write, show and return the complete result."""
        result = self._result(rows)
        self.finish(result)
        self._show(result)
        return result

    def _write(self, rows: Sequence[Any]) -> None:
        if self._partial is not None and rows:
            _write_json(self._partial, self._unfinished(rows))

    def _unfinished(self, rows: Sequence[Any]) -> dict[str, Any]:
        return {**self._result(rows), "complete": False}


def _write_json(path: str | Path, result: dict[str, Any]) -> None:
    from kvq.evals.report.results import write_json

    write_json(path, result)


@contextmanager
def measured(device: "torch.device") -> Iterator[dict[str, Any]]:
    """Measure the time and memory of a block; yield a dict that is filled in at the end of the block.

    `seconds`: duration; `peak_bytes`: the process's peak RAM use so far; `grown_bytes`: growth of this peak
    during the block, 0 if an earlier peak was higher; `device_peak_bytes`: peak memory of tensors on the GPU
    during the block, None without a GPU.
    """
    import torch

    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    used: dict[str, Any] = {}
    before, began = _peak_bytes(), time.perf_counter()
    try:
        yield used
    finally:
        if on_gpu:
            torch.cuda.synchronize(device)
        seconds, peak = time.perf_counter() - began, _peak_bytes()
        used |= {"seconds": seconds, "peak_bytes": peak, "grown_bytes": peak - before}
        used |= {"device_peak_bytes": torch.cuda.max_memory_allocated(device) if on_gpu else None}


def used_line(used: Mapping[str, Any]) -> str:
    """Return the figures of `measured` in words."""
    peak, grown, on_gpu = (used[f"{name}_bytes"] for name in ("peak", "grown", "device_peak"))
    words = f"{used['seconds']:,.1f} s, peak memory {binary(peak)} (+{binary(grown)})"
    return words if on_gpu is None else f"{words}, GPU {binary(on_gpu)}"


def _peak_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak  # KiB on Linux
