"""Figures of reports: output to files and SVG, common style, and legends."""

import io
import logging
import warnings
from collections.abc import Callable
from html import escape
from pathlib import Path
from textwrap import fill
from typing import IO, Any

from kvq import fileio
from kvq.errors import ConfigError, EngineError, first_lines
from kvq.evals.report.labels import draw_literally, settle
from kvq.extras import PLOTS, require

_log = logging.getLogger(__name__)

GREY = "#7d8590"  # legible on white and on black
_SUFFIXES = (".svg", ".png", ".pdf")
_BLACK = "#000000"  # matplotlib's colour of frames and ticks
_LONGEST = 36  # characters of a name
_TITLE_WIDTH = 15  # small letters per inch
_DPI = 160  # of .png files
_LINE = 0.17  # inches between lines of a legend


def check_plot_path(path: str | Path) -> None:
    """Raise ConfigError if the suffix of `path` is unknown or matplotlib is not installed."""
    if Path(path).suffix not in _SUFFIXES:
        raise ConfigError(f"can't plot to {path}; the name must end in {', '.join(_SUFFIXES)}")
    require(f"the plot {path}", PLOTS)


def new_figure(width: float, height: float) -> Any:
    """Return an empty figure of this size in inches, with constrained layout; no display is needed.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    require("a plot", PLOTS)
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def write_figure(path: str | Path, make: Callable[..., Any], *given: Any) -> None:
    """Write the figure that `make(*given)` returns to an .svg, .png or .pdf file.

    Raises:
        EngineError: the figure can't be drawn.
    """
    check_plot_path(path)
    image = io.BytesIO()
    try:
        _save(make(*given), image, Path(path).suffix[1:])
    except Exception as error:  # any error of matplotlib's
        raise EngineError(f"can't draw {path}: {first_lines(error)}") from error
    fileio.write_bytes(path, image.getvalue())


def drawing(make: Callable[..., Any], *given: Any) -> str:
    """Return the figure drawn by `make(*given)` as SVG for a page, or "" if there is no figure.

    A figure that can't be drawn is replaced by a message, so the measurement is not lost.
    """
    require("a plot", PLOTS)
    try:
        figure = make(*given)
        return "" if figure is None else svg_of(figure)
    except Exception as error:  # noqa: BLE001 - any error of matplotlib's
        _log.warning("a plot of the report can't be drawn: %s", first_lines(error))
        return f'<p class="small">This plot can\'t be drawn: {escape(first_lines(error))}</p>'


def svg_of(figure: Any) -> str:
    """Return a figure as SVG text, without background and with black replaced by the page's text colour."""
    text = io.StringIO()
    _save(figure, text, "svg", is_transparent=True)
    svg = text.getvalue()
    return svg[svg.index("<svg") :].replace(_BLACK, "currentColor")


def _save(figure: Any, to: IO[Any], form: str, *, is_transparent: bool = False) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph ", UserWarning)  # missing letters are drawn as boxes
        draw_literally(figure)
        settle(figure)
        figure.savefig(to, format=form, dpi=_DPI, transparent=is_transparent)


def finish(axes: Any, x: str, y: str) -> None:
    """Label the axes, use small tick labels, and remove the top and right sides of the frame."""
    from matplotlib.ticker import ScalarFormatter

    axes.set_xlabel(x, fontsize=8)
    axes.set_ylabel(y, fontsize=8)
    axes.tick_params(labelsize=8)
    for axis in (axes.xaxis, axes.yaxis):
        ticks = axis.get_major_formatter()
        if isinstance(ticks, ScalarFormatter):  # no separate factor or offset at the axis
            ticks.set_scientific(False)
            ticks.set_useOffset(False)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def log_axis(axis: Any) -> None:
    """Label 1, 2, 5 and 10 of every decade as plain numbers."""
    from matplotlib.ticker import LogLocator

    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter("{x:g}")
    axis.set_minor_formatter("")


def title(figure: Any, text: str) -> None:
    """Add a grey title above the figure, wrapped if it is too long."""
    width = int(figure.get_figwidth() * _TITLE_WIDTH)
    figure.suptitle(fill(text, width), fontsize=8, color=GREY)


def legend_beside(figure: Any, source: Any) -> None:
    """Place the legend of `source` to the right of the figure, in as many columns as necessary."""
    handles, names = source.get_legend_handles_labels()
    if handles:
        rows = max(1, int(figure.get_figheight() / _LINE) - 2)
        columns = -(-len(names) // rows)
        figure.legend(handles, names, loc="outside right center", fontsize=8, frameon=False, ncols=columns)


def short(name: str) -> str:
    """Shorten a name for a tick or a legend by omitting its middle, since names differ at the ends."""
    return name if len(name) <= _LONGEST else f"{name[: _LONGEST // 3]}…{name[-_LONGEST * 2 // 3 + 1 :]}"
