"""The roofline plot of `kvq bench attention`: time over bytes, and the line that memory sets."""

import io
from pathlib import Path
from typing import Any

from kvq import fileio
from kvq.evals.plot import check_plot_path, figure_class
from kvq.sizes import speed

__all__ = ["check_plot_path", "write_roofline"]


def write_roofline(path: str | Path, result: dict[str, Any]) -> None:
    """Draw every row's time over the bytes it reads into an .svg, .png or .pdf file."""
    rows, bandwidth = result["rows"], result["read_gb_per_s"]
    figure = figure_class()(figsize=(7.0, 4.4), layout="constrained")
    axes = figure.subplots()
    sizes = [row["gb_per_s"] * row["ms_median"] for row in rows]  # MB
    longest = max(sizes) * 1.1
    axes.plot([0, longest], [0, longest / bandwidth], color="0.5", lw=1)
    axes.text(longest, longest / bandwidth, f" {speed(bandwidth)}", fontsize=8, va="bottom", ha="right")
    for row, size in zip(rows, sizes, strict=True):
        mine = row["name"] == "kvq"
        axes.plot(size, row["ms_median"], "o" if mine else "x", color="tab:blue" if mine else "0.3")
        label = row["kv"] if mine else f"{row['name']} {row['kv']}"
        axes.annotate(f" {label}", (size, row["ms_median"]), fontsize=8)
    axes.set_yscale("log")
    axes.set_xlabel("MB of K and V that one call reads", fontsize=8)
    axes.set_ylabel("ms, median", fontsize=8)
    first = rows[0]
    axes.set_title(
        f"{first['operation']}, batch {first['batch']}, context {first['context']:,}, "
        f"{result['device']}, {result['date'][:10]}",
        fontsize=9,
    )
    image = io.BytesIO()
    figure.savefig(image, format=Path(path).suffix[1:], dpi=160)
    fileio.write_bytes(path, image.getvalue())
