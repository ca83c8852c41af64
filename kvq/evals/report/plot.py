"""Plots of `kvq perplexity` and `kvq eval`: memory saved against quality lost."""

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

from kvq.evals.report.figure import GREY, finish, legend_beside, new_figure, short, title
from kvq.evals.report.labels import label_point
from kvq.evals.report.sections import depth_name

Row = dict[str, Any]
_COLORS = {"fp8": "#0969da", "int8": "#1a7f37", "int4": "#bc4c00", "int2": "#cf222e", "k": "#8250df"}
_LARGE = 10  # larger changes in perplexity are shown as factors
_MARKERS = "osD^vP*X"
_GRIDS_ACROSS = 3
_CELLS_ACROSS = 24  # a cell must have room for "100%"
_RETRIEVED = "#1a7f37"


def perplexity_figure(result: dict[str, Any]) -> Any:
    """Plot the bytes, perplexity and divergence of every format."""
    rows = [r for r in result["rows"] if r["instrument"] != "window"]
    figure = new_figure(9.6, max(4.0, 1.0 + 0.22 * len(rows)))
    left, right = figure.subplots(1, 2)
    _bytes_panel(left, rows)
    _kl_panel(right, rows)
    title(figure, f"{result['model']}, {result['text']}")
    return figure


def _bytes_panel(axes: Any, rows: list[Row]) -> None:
    """Draw bars for KV bytes per token, labelled with the change in perplexity and the mean KL."""
    sizes = [r["kv_bytes_per_token"] for r in rows]
    axes.barh(range(len(rows)), sizes, color=[format_color(r["kv"]) for r in rows])
    axes.set_yticks(range(len(rows)), [short(r["kv"]) for r in rows])
    for i, row in enumerate(rows):
        axes.text(sizes[i], i, f" {_cost(row)}", va="center", fontsize=8)
    axes.invert_yaxis()
    finish(axes, "KV cache bytes per token (label: change in perplexity, KL)", "")


def _cost(row: Row) -> str:
    share, kl = row["perplexity_change"], row["kl_mean"]
    change = f"{share:+.2%}" if share < _LARGE else f"{1 + share:,.3g} times"
    return f"{change}, KL {kl:.2g}" if kl else "baseline"


def _kl_panel(axes: Any, rows: list[Row]) -> None:
    """Plot mean KL divergence, on a logarithmic axis, against bits per element."""
    for row in rows:
        if row["kl_mean"] > 0:
            at = (row["bits_per_element"], row["kl_mean"])
            axes.scatter(*at, color=format_color(row["kv"]), s=28, zorder=3)
            label_point(axes, short(row["kv"]), at, 8)
    axes.margins(x=0.18, y=0.12)
    finish_kl(axes, "bits per stored element, scales included")


def finish_kl(axes: Any, x: str) -> None:
    """Set up the y axis as a logarithmic axis for mean KL divergence, and label the x axis."""
    axes.set_yscale("log")
    axes.grid(alpha=0.25, which="both")
    finish(axes, x, "mean KL divergence, nats per token")


def format_color(name: str) -> str:
    """Return the colour shared by all formats of the same kind."""
    return next((c for prefix, c in _COLORS.items() if name.startswith(prefix)), GREY)


def divergence_plot(rows: list[Row]) -> Any:
    """Plot mean KL against bits per element and context depth; return None if no format diverges."""
    diverging = [row for row in rows if row["kl_mean"] > 0]
    if not diverging:
        return None
    figure = new_figure(9.6, 4.0)
    left, right = figure.subplots(1, 2)
    _kl_panel(left, diverging)
    for row, look in _looks(diverging):
        right.plot([depth["kl_mean"] for depth in row["by_depth"]], ms=4, **look)
    depths = [depth_name(depth) for depth in diverging[0]["by_depth"]]
    right.set_xticks(range(len(depths)), depths)
    finish_kl(right, "tokens of context before the predicted one")
    legend_beside(figure, right)
    return figure


def _looks(rows: Iterable[Row]) -> Iterator[tuple[Row, dict[str, str]]]:
    """Yield each format's row with its marker, colour and legend name."""
    for row, marker in zip(rows, itertools.cycle(_MARKERS), strict=False):
        yield row, {"marker": marker, "color": format_color(row["kv"]), "label": short(row["kv"])}


def difficulty_plot(rows: list[Row]) -> Any:
    """Plot the perplexity change by quarter of the documents; return None if there are no quarters."""
    shown = [row for row in rows if row["by_difficulty"] and row["kl_mean"] > 0]
    if not shown:
        return None
    figure = new_figure(9.6, 3.6)
    axes = figure.subplots()
    for index, (row, look) in enumerate(_looks(shown)):
        shift = 0.6 * ((index + 0.5) / len(shown) - 0.5)
        parts = row["by_difficulty"]
        changes = [100 * part["perplexity_change"] for part in parts]
        spans = [part["intervals"]["perplexity_change"] for part in parts]
        axes.errorbar(
            [part["quarter"] + shift for part in parts],
            changes,
            yerr=_error_bars(changes, [span and (100 * span[0], 100 * span[1]) for span in spans]),
            ls="none",
            ms=5,
            capsize=3,
            **look,
        )
    axes.axhline(0, lw=0.8, color=GREY)
    quarters = [part["quarter"] for part in shown[0]["by_difficulty"]]
    names = {1: "easiest quarter", quarters[-1]: "hardest quarter"}
    axes.set_xticks(quarters, [names.get(quarter, "") for quarter in quarters])
    axes.grid(alpha=0.25, axis="y")
    finish(axes, "documents, by the baseline's loss on them", "change of perplexity, %")
    legend_beside(figure, axes)
    return figure


def _error_bars(middles: list[float], spans: list[Any]) -> list[list[float]]:
    """Return the lower and upper lengths of all error bars, or 0 where there is no interval."""
    pairs = [(middle, span or (middle, middle)) for middle, span in zip(middles, spans, strict=True)]
    return [
        [max(0.0, middle - low) for middle, (low, _) in pairs],
        [max(0.0, high - middle) for middle, (_, high) in pairs],
    ]


def attention_plot(rows: list[Row]) -> Any:
    """Plot the mean error of the attention output by layer, with K and V quantized jointly and separately."""
    figure = new_figure(9.6, 3.6)
    panels = {"error_mean": "K and V", "k_error_mean": "K alone", "v_error_mean": "V alone"}
    formats = {row["kv"]: row for row in rows}
    for axes, (key, name) in zip(figure.subplots(1, 3, sharey=True), panels.items(), strict=True):
        for last, look in _looks(formats.values()):
            points = [row for row in rows if row["kv"] == last["kv"] and row[key] > 0]
            axes.plot([row["layer"] for row in points], [row[key] for row in points], ms=3, lw=1, **look)
        axes.set_yscale("log")
        axes.set_title(name, fontsize=9)
        axes.grid(alpha=0.25)
        finish(axes, "layer", "mean |a - b| / |b|" if key == "error_mean" else "")
    legend_beside(figure, axes)
    return figure


def generation_plot(rows: list[Row]) -> Any:
    """Plot the number of tokens until the first difference, with error bars."""
    shown = rows[1:] or rows  # the baseline agrees with itself
    figure = new_figure(9.6, 1.0 + 0.35 * len(shown))
    axes = figure.subplots()
    means = [row["same_tokens_mean"] for row in shown]
    axes.barh(
        range(len(shown)),
        means,
        color=[format_color(row["kv"]) for row in shown],
        xerr=_error_bars(means, [row["intervals"]["same_tokens_mean"] for row in shown]),
        ecolor=GREY,
        capsize=3,
    )
    axes.set_yticks(range(len(shown)), [short(row["kv"]) for row in shown])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.02 * shown[0]["new_tokens"])
    finish(axes, f"tokens until the first difference, of {shown[0]['new_tokens']}", "")
    return figure


def sessions_plot(rows: list[Row]) -> Any:
    """Plot by depth which decisions differ from the baseline's, and how many turns fail."""
    depths = [depth_name(part) for part in rows[0]["by_depth"]]
    figure = new_figure(9.6, 3.6)
    left, right = figure.subplots(1, 2)
    for row, look in _looks(rows):
        parts = row["by_depth"]
        at = [depths.index(depth_name(part)) for part in parts]
        if row is not rows[0]:
            left.plot(at, [100 * (1 - part["top1_decisive"]) for part in parts], ms=4, **look)
        right.plot(at, [100 * part["failed"] for part in parts], ms=4, **look)
    for axes, words in ((left, "decisions that differ, %"), (right, "turns that fail, %")):
        axes.set_xticks(range(len(depths)), depths)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.25)
        finish(axes, "tokens of context before the answer", words)
    legend_beside(figure, right)
    return figure


def needle_plot(rows: list[Row]) -> Any:
    """Plot a grid per format, with lengths across and depths down; darker cells mean better retrieval."""
    formats = list(dict.fromkeys(row["kv"] for row in rows))
    lengths, depths = (sorted({row[key] for row in rows}) for key in ("length", "depth"))
    across = max(1, min(len(formats), _GRIDS_ACROSS, _CELLS_ACROSS // len(lengths)))
    down = -(-len(formats) // across)
    figure = new_figure(9.6, down * (0.9 + 0.28 * len(depths)))
    grids = figure.subplots(down, across, squeeze=False).flat
    for axes, kv in itertools.zip_longest(grids, formats):
        if kv is None:
            axes.set_axis_off()
            continue
        for row in rows:
            if row["kv"] == kv:
                _draw_cell(axes, lengths.index(row["length"]), depths.index(row["depth"]), row["retrieved"])
        axes.set_xlim(-0.5, len(lengths) - 0.5)
        axes.set_ylim(len(depths) - 0.5, -0.5)
        axes.set_xticks(range(len(lengths)), [str(length) for length in lengths])
        axes.set_yticks(range(len(depths)), [f"{depth:.0%}" for depth in depths])
        axes.set_title(short(kv), fontsize=9)
        finish(axes, "tokens", "depth")
    return figure


def _draw_cell(axes: Any, x: int, y: int, share: float) -> None:
    """Draw a cell of the grid, with a paler colour for a smaller share and none for 0."""
    from matplotlib.patches import Rectangle

    at = (x - 0.48, y - 0.48)
    axes.add_patch(Rectangle(at, 0.96, 0.96, facecolor=_RETRIEVED, alpha=share, edgecolor="none", lw=0))
    # Cells are translucent over a light or dark page; black text is hard to read only on opaque cells
    color = "#ffffff" if share > 0.85 else "#000000"
    axes.text(x, y, f"{share:.0%}", ha="center", va="center", fontsize=7, color=color)
