"""The plot of `kvq bench engine`: what throughput costs in latency, format by format."""

import itertools
from pathlib import Path
from typing import Any

from kvq.evals.figure import finish, legend_beside, new_figure, title, write_figure
from kvq.evals.labels import label_point

_COLORS = ("#57606a", "#bc4c00", "#1a7f37", "#0969da", "#8250df", "#cf222e")
_PANELS = (("itl_ms_p50", "time between tokens, ms, median"), ("ttft_ms_p99", "time to first token, ms, p99"))


def write_engine_plot(path: str | Path, result: dict[str, Any]) -> None:
    """Draw the plot into an .svg, .png or .pdf file."""
    write_figure(path, engine_figure, result)


def engine_figure(result: dict[str, Any]) -> Any:
    """Latency over output tokens/s, a line per server.

    A ring marks the saturation point, a star the fastest point within the SLO.
    """
    figure = new_figure(9.6, 4.2)
    rows = [row for row in result["rows"] if row["output_tokens_per_s"] is not None]
    key = lambda row: (row["name"], row["kv"])  # noqa: E731 - used twice below
    lines = [list(group) for _, group in itertools.groupby(sorted(rows, key=key), key=key)]
    for axes, (figure_name, label) in zip(figure.subplots(1, 2), _PANELS, strict=True):
        for line, color in zip(lines, itertools.cycle(_COLORS), strict=False):
            points = [row for row in line if row[figure_name] is not None]
            _draw(axes, points, figure_name, color)
        finish(axes, "output tokens per second, all requests", label)
        axes.set_xlim(0, 1.04 * axes.get_xlim()[1])  # points may lie together, far from zero
        axes.set_ylim(0, 1.04 * axes.get_ylim()[1])
        axes.grid(alpha=0.25)
    legend_beside(figure, axes)
    title(
        figure,
        f"{result['model']}; {result['device']}, {result['date'][:10]}; labels: requests at a time, "
        f"ring: saturated, star: best within the SLO",
    )
    return figure


def _draw(axes: Any, rows: list[dict[str, Any]], name: str, color: str) -> None:
    """One server's line over its concurrencies."""
    if not rows:
        return
    first = rows[0]
    mine = first["name"] == "kvq"
    label = first["kv"] if mine else f"{first['name']} {first['kv']}"
    x, y = [row["output_tokens_per_s"] for row in rows], [row[name] for row in rows]
    axes.plot(x, y, "o-" if mine else "x--", color=color, ms=4, lw=1.2, label=label)
    for row, at in zip(rows, zip(x, y, strict=True), strict=True):
        label_point(axes, f"{row['concurrency']:g}", at, 7, color)
        if row.get("is_saturation"):
            axes.plot(*at, "o", ms=11, mfc="none", mec=color)
        if row.get("is_best_within_slo"):
            axes.plot(*at, "*", ms=12, color=color)
