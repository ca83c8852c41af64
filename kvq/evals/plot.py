"""The plot of a perplexity measurement: what each format saves against what it costs."""

from pathlib import Path
from typing import Any

from kvq.evals.figure import GREY, drawing, finish, new_figure, short, title, write_figure
from kvq.evals.labels import label_point

_COLORS = {"fp8": "#0969da", "int8": "#1a7f37", "int4": "#bc4c00", "int2": "#cf222e", "k": "#8250df"}
_LARGE = 10  # a change of perplexity that is told as a factor


def write_plot(path: str | Path, result: dict[str, Any]) -> None:
    """Draw a measurement into an .svg, .png or .pdf file."""
    write_figure(path, perplexity_figure, result)


def svg_plot(result: dict[str, Any]) -> str:
    """Return the plot as SVG for a page."""
    return drawing(perplexity_figure, result)


def perplexity_figure(result: dict[str, Any]) -> Any:
    """Bytes and perplexity of every format, and its divergence."""
    rows = [r for r in result["rows"] if r["instrument"] != "window"]
    figure = new_figure(9.6, max(4.0, 1.0 + 0.22 * len(rows)))
    left, right = figure.subplots(1, 2)
    _bytes_panel(left, rows)
    kl_panel(right, rows)
    title(figure, f"{result['model']}, {result['text']}")
    return figure


def _bytes_panel(axes: Any, rows: list[dict[str, Any]]) -> None:
    """Bars: KV bytes per token, each labelled with its change in perplexity."""
    sizes = [r["kv_bytes_per_token"] for r in rows]
    axes.barh(range(len(rows)), sizes, color=[format_color(r["kv"]) for r in rows])
    axes.set_yticks(range(len(rows)), [short(r["kv"]) for r in rows])
    for i, row in enumerate(rows):
        label = _change(row["perplexity_change"]) if row["kl_mean"] else "baseline"
        axes.text(sizes[i], i, f" {label}", va="center", fontsize=8)
    axes.invert_yaxis()
    finish(axes, "KV cache bytes per token (label: change in perplexity)", "")


def _change(share: float) -> str:
    return f"{share:+.2%}" if share < _LARGE else f"{1 + share:,.3g} times"


def kl_panel(axes: Any, rows: list[dict[str, Any]]) -> None:
    """Points: bits per element against mean KL divergence, logarithmic."""
    quantized = [r for r in rows if r["kl_mean"] > 0]
    for row in quantized:
        at = (row["bits_per_element"], row["kl_mean"])
        axes.scatter(*at, color=format_color(row["kv"]), s=28, zorder=3)
        label_point(axes, short(row["kv"]), at, fontsize=8)
    axes.set_yscale("log")
    axes.margins(x=0.18, y=0.12)
    axes.grid(alpha=0.25, which="both")
    finish(axes, "bits per stored element, scales included", "mean KL divergence, nats per token")


def format_color(name: str) -> str:
    """One colour for all formats of a kind."""
    return next((c for prefix, c in _COLORS.items() if name.startswith(prefix)), GREY)
