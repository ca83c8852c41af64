"""The plots of `kvq eval`'s page."""

import itertools
from typing import Any

from kvq.evals.figure import GREY, finish, legend_beside, new_figure, short
from kvq.evals.plot import format_color, kl_panel
from kvq.evals.sections import depth_name

Row = dict[str, Any]
_MARKERS = "osD^vP*X"
_GRIDS_ACROSS = 3
_CELLS_ACROSS = 24  # a cell has to hold "100%"
_RETRIEVED = "#1a7f37"


def divergence_plot(rows: list[Row]) -> Any:
    """Mean KL over bits per element, and over context depth. None without a format that diverges."""
    diverging = [row for row in rows if row["kl_mean"] > 0]
    if not diverging:
        return None
    figure = new_figure(9.6, 4.0)
    left, right = figure.subplots(1, 2)
    kl_panel(left, diverging)
    for row, marker in zip(diverging, itertools.cycle(_MARKERS), strict=False):
        depths = row["by_depth"]
        right.plot(
            range(len(depths)),
            [depth["kl_mean"] for depth in depths],
            marker=marker,
            ms=4,
            color=format_color(row["kv"]),
            label=short(row["kv"]),
        )
    right.set_xticks(range(len(depths)), [depth_name(depth) for depth in depths])
    right.set_yscale("log")
    right.grid(alpha=0.25, which="both")
    finish(right, "tokens of context before the predicted one", "mean KL divergence, nats per token")
    legend_beside(figure, right)
    return figure


def difficulty_plot(rows: list[Row]) -> Any:
    """Change of perplexity by quarter of the documents, with error bars. None without quarters."""
    shown = [row for row in rows if row["by_difficulty"] and row["kl_mean"] > 0]
    if not shown:
        return None
    figure = new_figure(9.6, 3.6)
    axes = figure.subplots()
    for index, (row, marker) in enumerate(zip(shown, itertools.cycle(_MARKERS), strict=False)):
        shift = 0.6 * ((index + 0.5) / len(shown) - 0.5)
        for part in row["by_difficulty"]:
            change, span = part["perplexity_change"], part["intervals"]["perplexity_change"]
            low, high = span or (change, change)
            axes.errorbar(
                part["quarter"] + shift,
                100 * change,
                yerr=[[100 * max(0.0, change - low)], [100 * max(0.0, high - change)]],
                fmt=marker,
                ms=5,
                capsize=3,
                color=format_color(row["kv"]),
                label=short(row["kv"]) if part["quarter"] == 1 else None,
            )
    axes.axhline(0, lw=0.8, color=GREY)
    quarters = [part["quarter"] for part in shown[0]["by_difficulty"]]
    names = {1: "easiest quarter", quarters[-1]: "hardest quarter"}
    axes.set_xticks(quarters, [names.get(quarter, "") for quarter in quarters])
    axes.grid(alpha=0.25, axis="y")
    finish(axes, "documents, by the baseline's loss on them", "change of perplexity, %")
    legend_beside(figure, axes)
    return figure


def attention_plot(rows: list[Row]) -> Any:
    """Mean error of the attention output over layers, and its parts from K and from V alone."""
    figure = new_figure(9.6, 3.6)
    panels = (("error_mean", "K and V"), ("k_error_mean", "K alone"), ("v_error_mean", "V alone"))
    formats = list(dict.fromkeys(row["kv"] for row in rows))
    for axes, (key, name) in zip(figure.subplots(1, 3, sharey=True), panels, strict=True):
        for kv, marker in zip(formats, itertools.cycle(_MARKERS), strict=False):
            points = [(row["layer"], row[key]) for row in rows if row["kv"] == kv and row[key] > 0]
            x, y = [layer for layer, _ in points], [error for _, error in points]
            axes.plot(x, y, marker=marker, ms=3, lw=1, color=format_color(kv), label=short(kv))
        axes.set_yscale("log")
        axes.set_title(name, fontsize=9)
        axes.grid(alpha=0.25)
        finish(axes, "layer", "mean |a - b| / |b|" if key == "error_mean" else "")
    legend_beside(figure, axes)
    return figure


def generation_plot(rows: list[Row]) -> Any:
    """Tokens until the first difference, with error bars."""
    shown = rows[1:] or rows  # the baseline agrees with itself
    figure = new_figure(9.6, 1.0 + 0.35 * len(shown))
    axes = figure.subplots()
    means = [row["same_tokens_mean"] for row in shown]
    spans = [
        row["intervals"]["same_tokens_mean"] or (mean, mean) for row, mean in zip(shown, means, strict=True)
    ]
    axes.barh(
        range(len(shown)),
        means,
        color=[format_color(row["kv"]) for row in shown],
        xerr=[
            [max(0.0, mean - low) for mean, (low, _) in zip(means, spans, strict=True)],
            [max(0.0, high - mean) for mean, (_, high) in zip(means, spans, strict=True)],
        ],
        ecolor=GREY,
        capsize=3,
    )
    axes.set_yticks(range(len(shown)), [short(row["kv"]) for row in shown])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.02 * shown[0]["new_tokens"])
    finish(axes, f"tokens until the first difference, of {shown[0]['new_tokens']}", "")
    return figure


def needle_plot(rows: list[Row]) -> Any:
    """A grid per format: lengths across, depths downwards, the darker the more was retrieved."""
    formats = list(dict.fromkeys(row["kv"] for row in rows))
    lengths, depths = (sorted({row[key] for row in rows}) for key in ("length", "depth"))
    found = {(row["kv"], row["length"], row["depth"]): row["retrieved"] for row in rows}
    across = max(1, min(len(formats), _GRIDS_ACROSS, _CELLS_ACROSS // len(lengths)))
    down = -(-len(formats) // across)
    height = down * (0.9 + 0.28 * len(depths))
    figure = new_figure(9.6, height)
    grids = figure.subplots(down, across, squeeze=False).flat
    for axes, kv in itertools.zip_longest(grids, formats):
        if kv is None:
            axes.set_axis_off()
            continue
        for (x, length), (y, depth) in itertools.product(enumerate(lengths), enumerate(depths)):
            share = found[kv, length, depth]
            # Cells let the page shine through, light or dark: only on full ones its text is hard to read
            axes.add_patch(_cell(x, y, share))
            color = "#ffffff" if share > 0.85 else "#000000"
            axes.text(x, y, f"{share:.0%}", ha="center", va="center", fontsize=7, color=color)
        axes.set_xlim(-0.5, len(lengths) - 0.5)
        axes.set_ylim(len(depths) - 0.5, -0.5)
        axes.set_xticks(range(len(lengths)), [str(length) for length in lengths])
        axes.set_yticks(range(len(depths)), [f"{depth:.0%}" for depth in depths])
        axes.set_title(short(kv), fontsize=9)
        finish(axes, "tokens", "depth")
    return figure


def _cell(x: int, y: int, share: float) -> Any:
    """A square of the grid; paler for less, without a trace of colour for nothing."""
    from matplotlib.patches import Rectangle

    return Rectangle(
        (x - 0.48, y - 0.48), 0.96, 0.96, facecolor=_RETRIEVED, alpha=share, edgecolor="none", lw=0
    )
