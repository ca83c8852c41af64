"""Reports of `kvq plan` and `kvq simulate` as self-contained HTML pages."""

import itertools
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from kvq import fileio
from kvq.evals.report.figure import drawing, finish, legend_beside, log_axis, new_figure, short
from kvq.evals.report.page import Columns, html_table, origin, page, table
from kvq.sizes import binary, decimal

_COLORS = ("#0969da", "#bc4c00", "#1a7f37", "#8250df", "#cf222e", "#57606a", "#9a6700", "#1b7c83")
_LINES = ("o-", "s--", "^:", "D-.", "v-", "P--", "X:", "*-.")  # one per GPU; colours distinguish formats
_TERMS = ("#57606a", "#8c959f", "#d0d7de", "#bc4c00", "#e16f24", "#0969da")


def write_plan(path: str | Path, result: dict[str, Any], columns: Columns) -> None:
    """Write a page with users by context, memory by GPU, cost by latency, and all memory terms.

    `result`: JSON of `kvq plan`, whose rows must include `users_by_context` and `speed_by_users`.
    """
    rows = result["rows"]
    first = rows[0]
    gpus = list(dict.fromkeys(row["gpu"] for row in rows))
    best = max(rows, key=lambda row: row["max_users"])
    up_to = "up to " if best["mixed_lengths"] else ""
    parts = [
        f"<h1>How many users fit: {escape(first['model'])}</h1>",
        f"<p>Most of them fit on <b>{escape(best['gpu'])}</b> with KV in <b>{escape(best['kv'])}</b>: "
        f"{best['max_users']:,} requests of {up_to}{best['context']:,} tokens at once. An engine that "
        f"reserves a contiguous slot of {best['slot_tokens']:,} tokens for each, whatever it needs in the "
        f"end, would hold {best['contiguous_users']:,}.</p>",
        "<h2>Requests at once, by their length</h2>",
        drawing(_users, rows, gpus),
        "<h2>Where memory goes</h2>",
        drawing(_memory, rows, gpus),
    ]
    if any(row["speed_by_users"] for row in rows):
        parts += [
            "<h2>Cost over latency</h2>",
            "<p>From one request at a time to as many as fit; a roofline, not a measurement.</p>",
            drawing(_pareto, rows),
        ]
    parts.append("<h2>All figures</h2>")
    parts.append(html_table(*table(rows, columns)))
    for gpu in gpus:
        row = next(row for row in rows if row["gpu"] == gpu)
        parts.append(f"<h2>{escape(gpu)}, {escape(row['kv'])}, per GPU</h2>")
        terms = [
            (one["name"], decimal(one["bytes"]), binary(one["bytes"]), one["formula"]) for one in row["terms"]
        ]
        parts.append(html_table(("", "decimal", "binary", "formula"), terms))
    parts.append(origin(result))
    fileio.write_text(path, page(f"kvq plan: {first['model']}", parts))


def write_simulation(path: str | Path, result: dict[str, Any], columns: Columns) -> None:
    """Write a page with the latency, throughput and cost of each row. `result`: JSON of `kvq simulate`."""
    rows = result["rows"]
    first = rows[0]
    parts = [
        f"<h1>{escape(first['model'])} on {escape(first['gpu'])}, simulated</h1>",
        f"<p>{first['requests']:,} requests in {first['seconds']:,.0f} s of simulated time, served by kvq's "
        f"own scheduler and block memory; the time of steps comes from a roofline.</p>",
        drawing(_bars, rows),
        html_table(*table(rows, columns)),
        origin(result),
    ]
    fileio.write_text(path, page(f"kvq simulate: {first['model']}", parts))


def _users(rows: Sequence[dict[str, Any]], gpus: Sequence[str]) -> Any:
    figure = new_figure(9.6, 3.6 * -(-len(gpus) // 2))
    panels = _panels(figure, len(gpus))
    for axes, gpu in zip(panels, gpus, strict=True):
        for row, color in zip([r for r in rows if r["gpu"] == gpu], itertools.cycle(_COLORS), strict=False):
            points = [point for point in row["users_by_context"] if point[1]]
            x, y = [context for context, _ in points], [users for _, users in points]
            axes.plot(x, y, "o-", ms=3, color=color, label=short(row["kv"]))
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        _finish(axes, gpu, "tokens of a request", "requests at once")
    legend_beside(figure, panels[0])
    return figure


def _memory(rows: Sequence[dict[str, Any]], gpus: Sequence[str]) -> Any:
    figure = new_figure(9.6, 1.4 + 0.45 * len(gpus))
    axes = figure.subplots()
    firsts = [next(row for row in rows if row["gpu"] == gpu) for gpu in gpus]
    names = list(dict.fromkeys(term["name"] for row in firsts for term in row["terms"]))
    left = [0.0] * len(gpus)
    for name, color in zip(names, itertools.cycle(_TERMS), strict=False):
        sizes = [sum(term["bytes"] for term in row["terms"] if term["name"] == name) / 1e9 for row in firsts]
        shade = _COLORS[0] if name == "KV pool" else color
        axes.barh(range(len(gpus)), sizes, left=left, color=shade, label=name)
        left = [a + b for a, b in zip(left, sizes, strict=True)]
    axes.set_yticks(range(len(gpus)), gpus)
    axes.invert_yaxis()
    _finish(axes, "", "GB of each GPU", "")
    figure.legend(fontsize=7, frameon=False, ncols=3, loc="outside lower center")
    return figure


def _pareto(rows: Sequence[dict[str, Any]]) -> Any:
    figure = new_figure(9.6, 3.6)
    axes = figure.subplots()
    formats, gpus = (list(dict.fromkeys(row[key] for row in rows)) for key in ("kv", "gpu"))
    for row in rows:
        color = _COLORS[formats.index(row["kv"]) % len(_COLORS)]
        style = _LINES[gpus.index(row["gpu"]) % len(_LINES)]
        points = row["speed_by_users"]
        x, y = [p["itl_ms"] for p in points], [p["usd_per_million_tokens"] for p in points]
        axes.plot(x, y, style, ms=3, lw=1, color=color, label=f"{row['gpu']}, {short(row['kv'])}")
    axes.set_xscale("log")
    axes.set_yscale("log")
    _finish(axes, "", "time between tokens, ms", "$ a million tokens")
    legend_beside(figure, axes)
    return figure


def _bars(rows: Sequence[dict[str, Any]]) -> Any:
    figure = new_figure(9.6, 1.4 + 0.3 * len(rows))
    panels = (
        ("output_tokens_per_s", "tokens/s"),
        ("ttft_ms_p99", "time to first token, ms, p99"),
        ("itl_ms_p99", "time between tokens, ms, p99"),
    )
    labels = _labels(rows)
    for i, (axes, (key, label)) in enumerate(zip(figure.subplots(1, 3, sharey=True), panels, strict=True)):
        axes.barh(range(len(rows)), [row[key] or 0.0 for row in rows], color=_COLORS[i])
        axes.set_yticks(range(len(rows)), labels)
        _finish(axes, "", label, "")
    figure.axes[0].invert_yaxis()
    return figure


def _labels(rows: Sequence[dict[str, Any]]) -> list[str]:
    keys: list[tuple[str, Callable[[Any], str]]] = [
        ("kv", str),
        ("gpus", lambda n: f"{n} GPU" + "s" * (n > 1)),
        ("routing", str),
        ("max_num_batched_tokens", lambda n: f"chunk {n}"),
    ]
    used = [(key, show) for key, show in keys if key == "kv" or len({row[key] for row in rows}) > 1]
    return [", ".join(short(show(row[key])) for key, show in used) for row in rows]


def _panels(figure: Any, number: int) -> list[Any]:
    if number == 1:
        return [figure.subplots()]
    panels = list(figure.subplots(-(-number // 2), 2).flat)
    for spare in panels[number:]:
        spare.set_axis_off()
    return panels[:number]


def _finish(axes: Any, title: str, x: str, y: str) -> None:
    for axis in (axes.xaxis, axes.yaxis):
        if axis.get_scale() == "log":
            if axis.get_transform().base == 2:
                axis.set_major_formatter(lambda n, _: f"{n / 1024:g}K" if n >= 1024 else f"{n:g}")
                axis.set_minor_formatter("")
            else:
                log_axis(axis)
    axes.set_title(title, fontsize=9)
    axes.grid(alpha=0.25)
    finish(axes, x, y)
