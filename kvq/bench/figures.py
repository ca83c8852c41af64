"""Plots of `kvq bench attention`, `kvq bench engine` and `kvq bench speculation`."""

import itertools
from typing import Any

from kvq.evals.report.figure import finish, legend_beside, log_axis, new_figure, title
from kvq.evals.report.labels import label_point
from kvq.sizes import speed


def roofline_figure(result: dict[str, Any]) -> Any:
    """Plot each row's time against the bytes it reads, and the bandwidth limit, on logarithmic axes."""
    rows, bandwidth = result["rows"], result["read_gb_per_s"]
    figure = new_figure(7.0, 4.4)
    axes = figure.subplots()
    sizes = [row["gb_per_s"] * row["ms_median"] for row in rows]  # MB
    ends = (min(sizes) / 1.5, max(sizes) * 1.5)
    axes.plot(ends, [size / bandwidth for size in ends], color="0.5", lw=1)
    label_point(axes, f"reading, {speed(bandwidth)}", (max(sizes), max(sizes) / bandwidth), 8)
    for row, size in zip(rows, sizes, strict=True):
        mine = row["name"] == "kvq"
        axes.plot(size, row["ms_median"], "o" if mine else "x", color="tab:blue" if mine else "0.3")
        label = row["kv"] if mine else f"{row['name']} {row['kv']}"
        label_point(axes, label, (size, row["ms_median"]), 8)
    axes.set_xscale("log")
    axes.set_yscale("log")
    log_axis(axes.xaxis)
    log_axis(axes.yaxis)
    axes.margins(x=0.15, y=0.1)
    finish(axes, "MB of K and V that one call reads", "ms, median")
    first = rows[0]
    title(
        figure,
        f"{first['operation']}, batch {first['batch']}, context {first['context']:,}, "
        f"{result['device']}, {result['date'][:10]}",
    )
    return figure


_COLORS = ("#57606a", "#bc4c00", "#1a7f37", "#0969da", "#8250df", "#cf222e")
_PANELS = (("itl_ms_p50", "time between tokens, ms, median"), ("ttft_ms_p99", "time to first token, ms, p99"))


def engine_figure(result: dict[str, Any]) -> Any:
    """Plot latency against output tokens/s, with a line per server.

    A ring marks the saturation point, and a star marks the fastest point within the SLO.
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
        axes.set_xlim(0, 1.04 * axes.get_xlim()[1])  # points may be close together and far from zero
        axes.set_ylim(0, 1.04 * axes.get_ylim()[1])
        axes.grid(alpha=0.25)
    legend_beside(figure, axes)
    title(
        figure,
        f"{result['model']}; {result['device']}, {result['date'][:10]}; labels: requests at a time, "
        f"ring: saturated, star: best within the SLO",
    )
    return figure


def speculation_figure(result: dict[str, Any]) -> Any:
    """Plot the speedup against the draft depth per format, with dashed lines for the expected speedup."""
    figure = new_figure(7.0, 4.2)
    axes = figure.subplots()
    rows = [row for row in result["rows"] if not row["adapts"]]
    for kv, color in zip(dict.fromkeys(row["kv"] for row in rows), itertools.cycle(_COLORS), strict=False):
        mine = [row for row in rows if row["kv"] == kv]
        axes.plot(
            [row["k"] for row in mine], [row["speedup"] for row in mine], "o-", color=color, ms=4, label=kv
        )
        known = [row for row in mine if row["expected_speedup"] is not None]
        axes.plot(
            [row["k"] for row in known], [row["expected_speedup"] for row in known], "--", color=color, lw=1
        )
    axes.axhline(1, color="0.5", lw=1)
    finish(axes, "drafts of a sequence in a step", "times the tokens per second without drafts")
    axes.grid(alpha=0.25)
    legend_beside(figure, axes)
    title(
        figure,
        f"{rows[0]['method']}, batch {rows[0]['batch']}, {result['device']}, {result['date'][:10]}; "
        f"dashed: expected",
    )
    return figure


def _draw(axes: Any, rows: list[dict[str, Any]], name: str, color: str) -> None:
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
