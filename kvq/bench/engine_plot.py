"""The plot of `kvq bench engine`: what throughput costs in latency, format by format."""

import io
import itertools
from pathlib import Path
from typing import Any

from kvq import fileio
from kvq.evals.plot import check_plot_path, figure_class

__all__ = ["check_plot_path", "write_engine_plot"]
_COLORS = ("#57606a", "#bc4c00", "#1a7f37", "#0969da", "#8250df", "#cf222e")
_PANELS = (("itl_ms_p50", "time between tokens, ms, median"), ("ttft_ms_p99", "time to first token, ms, p99"))


def write_engine_plot(path: str | Path, result: dict[str, Any]) -> None:
    """Draw latency over output tokens/s, a line per server, into an .svg, .png or .pdf file.

    A ring marks the saturation point, a star the fastest point within the SLO.
    """
    check_plot_path(path)
    figure = figure_class()(figsize=(9.6, 4.2), layout="constrained")
    rows = [row for row in result["rows"] if row["output_tokens_per_s"] is not None]
    key = lambda row: (row["name"], row["kv"])  # noqa: E731 - used twice below
    lines = [list(group) for _, group in itertools.groupby(sorted(rows, key=key), key=key)]
    for axes, (figure_name, label) in zip(figure.subplots(1, 2), _PANELS, strict=True):
        for line, color in zip(lines, itertools.cycle(_COLORS), strict=False):
            points = [row for row in line if row[figure_name] is not None]
            _draw(axes, points, figure_name, color)
        axes.set_xlabel("output tokens per second, all requests", fontsize=8)
        axes.set_ylabel(label, fontsize=8)
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.25)
        axes.tick_params(labelsize=8)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
        axes.legend(fontsize=8, frameon=False)
    figure.suptitle(
        f"{result['model']}; {result['device']}, {result['date'][:10]}; labels: requests at a time, "
        f"ring: saturated, star: best within the SLO",
        fontsize=8,
        color="#57606a",
    )
    image = io.BytesIO()
    figure.savefig(image, format=Path(path).suffix[1:], dpi=160)
    fileio.write_bytes(path, image.getvalue())


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
        axes.annotate(
            f"{row['concurrency']:g}", at, xytext=(3, 3), textcoords="offset points", fontsize=7, color=color
        )
        if row.get("is_saturation"):
            axes.plot(*at, "o", ms=11, mfc="none", mec=color)
        if row.get("is_best_within_slo"):
            axes.plot(*at, "*", ms=12, color=color)
