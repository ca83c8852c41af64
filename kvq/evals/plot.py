"""The plot of a perplexity measurement: what each format saves against what it costs."""

import io
from pathlib import Path
from typing import Any

from kvq import fileio
from kvq.errors import ConfigError
from kvq.evals.page import svg_of
from kvq.extras import PLOTS, require

_SUFFIXES = (".svg", ".png", ".pdf")
_COLORS = {"fp8": "#0969da", "int8": "#1a7f37", "int4": "#bc4c00", "int2": "#cf222e", "k": "#8250df"}
_GREY = "#7d8590"  # unquantized; read on white and on black


def check_plot_path(path: str | Path) -> None:
    """Raise ConfigError if a plot can't be written there: unknown suffix, or no matplotlib."""
    if Path(path).suffix not in _SUFFIXES:
        raise ConfigError(f"can't plot to {path}; the name must end in {', '.join(_SUFFIXES)}")
    require(f"the plot {path}", PLOTS)


def write_plot(path: str | Path, result: dict[str, Any]) -> None:
    """Draw a measurement into an .svg, .png or .pdf file."""
    check_plot_path(path)
    image = io.BytesIO()
    _draw(result).savefig(image, format=Path(path).suffix[1:], dpi=160)
    fileio.write_bytes(path, image.getvalue())


def svg_plot(result: dict[str, Any]) -> str:
    """Return the plot as SVG text for a page."""
    return svg_of(_draw(result))


def figure_class() -> Any:
    """matplotlib's Figure, which needs no display.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    require("a plot", PLOTS)
    from matplotlib.figure import Figure

    return Figure


def _draw(result: dict[str, Any]) -> Any:
    rows = [r for r in result["rows"] if r["instrument"] != "window"]
    figure = figure_class()(figsize=(9.6, 4.0), layout="constrained")
    left, right = figure.subplots(1, 2)
    _bytes_panel(left, rows)
    kl_panel(right, rows)
    figure.suptitle(f"{result['model']}, {result['text']}", fontsize=9, color=_GREY)
    return figure


def _bytes_panel(axes: Any, rows: list[dict[str, Any]]) -> None:
    """Bars: KV bytes per token, each labelled with its change in perplexity."""
    names = [r["kv"] for r in rows]
    sizes = [r["kv_bytes_per_token"] for r in rows]
    axes.barh(names, sizes, color=[format_color(r["kv"]) for r in rows])
    for i, row in enumerate(rows):
        label = f" {row['perplexity_change']:+.2%}" if row["kl_mean"] else " baseline"
        axes.text(sizes[i], i, label, va="center", fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(0, max(sizes) * 1.22)
    axes.set_xlabel("KV cache bytes per token (label: change in perplexity)", fontsize=8)
    plain(axes)


def kl_panel(axes: Any, rows: list[dict[str, Any]]) -> None:
    """Points: bits per element against mean KL divergence, logarithmic."""
    quantized = [r for r in rows if r["kl_mean"] > 0]
    for row in quantized:
        axes.scatter(row["bits_per_element"], row["kl_mean"], color=format_color(row["kv"]), s=28, zorder=3)
        crowded = any(0 < other["bits_per_element"] - row["bits_per_element"] < 1 for other in quantized)
        axes.annotate(
            row["kv"],
            (row["bits_per_element"], row["kl_mean"]),
            xytext=(-5 if crowded else 5, 3),
            textcoords="offset points",
            ha="right" if crowded else "left",
            fontsize=8,
        )
    axes.set_yscale("log")
    axes.margins(x=0.18, y=0.12)
    axes.grid(alpha=0.25, which="both")
    axes.set_xlabel("bits per stored element, scales included", fontsize=8)
    axes.set_ylabel("mean KL divergence, nats per token", fontsize=8)
    plain(axes)


def format_color(name: str) -> str:
    """One colour for all formats of a kind."""
    return next((c for prefix, c in _COLORS.items() if name.startswith(prefix)), _GREY)


def plain(axes: Any) -> None:
    """Small figures at the ticks, no frame above and to the right."""
    axes.tick_params(labelsize=8)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
