"""The roofline plot of `kvq bench attention`: time over bytes, and the line that memory sets."""

from pathlib import Path
from typing import Any

from kvq.evals.figure import finish, log_axis, new_figure, title, write_figure
from kvq.evals.labels import label_point
from kvq.sizes import speed


def write_roofline(path: str | Path, result: dict[str, Any]) -> None:
    """Draw every row's time over the bytes it reads into an .svg, .png or .pdf file."""
    write_figure(path, roofline_figure, result)


def roofline_figure(result: dict[str, Any]) -> Any:
    """Points, and the time that reading takes. Both axes logarithmic, so that this is a straight line."""
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
