"""The tables of an evaluation, as text cells: the same for the terminal and for the page."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvq.evals.bootstrap import FEWEST_DOCUMENTS
from kvq.evals.metrics import changes

Row = dict[str, Any]
_KEYS = {"needle": ("needle_summary", "needle")}  # of a task that puts rows under more than one
_RUN_KEYS = ("seconds", "intervals")  # of a row, not of what it measured


@dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    """One table under a title."""

    key: str
    title: str
    heads: Sequence[str]
    cells: Sequence[Sequence[str]]
    note: str = ""


def sections(result: dict[str, Any]) -> Iterator[Section]:
    """Every table that a result of `kvq eval` has figures for."""
    rows: list[Row] = result["rows"]
    if "perplexity" in rows[0]:
        yield _perplexity(rows)
        yield _divergence(rows)
        yield _by_depth(rows)
        if rows[0]["by_difficulty"]:
            yield _by_difficulty(rows)
    else:
        yield _sizes(rows)
    for key in row_keys(result):
        if key in _SECTIONS:
            yield _SECTIONS[key](result[key])
        elif key != "rows":
            yield _other(key, result[key])


def row_keys(result: Mapping[str, Any]) -> list[str]:
    """The keys of a result under which its tasks have put their rows."""
    keys = [str(task["key"]) for task in result.get("tasks", [])]
    return [part for key in keys for part in _KEYS.get(key, (key,))]


def interval_text(span: Sequence[float] | None, form: str) -> str:
    """Both bounds in a number format; a dash where there is no interval."""
    return "-" if span is None else f"{span[0]:{form}} .. {span[1]:{form}}"


def depth_name(row: Row) -> str:
    """A bucket of context depth."""
    return f"{row['first_depth']}-{row['last_depth']}"


def size_cells(row: Row) -> list[str]:
    """Format, bits, bytes, saving."""
    return [
        row["kv"],
        f"{row['bits_per_element']:.3f}".rstrip("0").rstrip("."),
        f"{row['kv_bytes_per_token']:,.0f}",
        f"{row['compression']:.2f}x",
    ]


_SIZE_HEADS = ("kv", "bits", "bytes/token", "vs bf16")


def _sizes(rows: list[Row]) -> Section:
    return Section(
        key="sizes", title="What is stored", heads=_SIZE_HEADS, cells=[size_cells(row) for row in rows]
    )


def _perplexity(rows: list[Row]) -> Section:
    cells = [
        [
            *size_cells(row),
            f"{row['perplexity']:.3f}",
            f"{row['perplexity_change']:+.3%}",
            row["verdict"],
            f"{row['seconds']:.1f}",
        ]
        for row in rows
    ]
    heads = (*_SIZE_HEADS, "perplexity", "change", "what that says", "seconds")
    return Section(key="perplexity", title="Perplexity", heads=heads, cells=cells)


def _divergence(rows: list[Row]) -> Section:
    cells = [
        [
            row["kv"],
            f"{row['kl_mean']:.6f}",
            interval_text(row["intervals"]["kl_mean"], ".6f"),
            f"{row['kl_median']:.6f}",
            f"{row['kl_p99']:.4f}",
            f"{row['kl_p999']:.4f}",
            f"{row['top1_agreement']:.2%}",
            interval_text(row["intervals"]["top1_agreement"], ".2%"),
            f"{row['top5_agreement']:.2%}",
        ]
        for row in rows
    ]
    heads = ("kv", "KL mean", "95%", "median", "99%", "99.9%", "top-1", "95%", "top-5")
    return Section(
        key="kl",
        title=f"Divergence from {rows[0]['kv']}",
        heads=heads,
        cells=cells,
        note="KL divergence in nats per token. Top-1: share of tokens with the same likeliest successor; "
        "top-5: share of the five likeliest that are among this format's five.",
    )


def _by_depth(rows: list[Row]) -> Section:
    heads = ["kv", *(depth_name(depth) for depth in rows[0]["by_depth"])]
    cells = [
        [row["kv"], *(f"{depth['kl_mean']:.5f}, {depth['top1_agreement']:.1%}" for depth in row["by_depth"])]
        for row in rows
    ]
    return Section(
        key="by_depth",
        title="By context depth",
        heads=heads,
        cells=cells,
        note="Mean KL and top-1 agreement of tokens that were predicted from so many tokens.",
    )


def _by_difficulty(rows: list[Row]) -> Section:
    heads = ["kv"]
    for part in rows[0]["by_difficulty"]:
        name = {1: "easiest quarter", 4: "hardest quarter"}.get(part["quarter"], f"quarter {part['quarter']}")
        heads.append(f"{name}, {part['documents']} documents")
    cells = [
        [
            row["kv"],
            *(
                f"{part['perplexity_change']:+.2%} "
                f"({interval_text(part['intervals']['perplexity_change'], '+.2%')})"
                for part in row["by_difficulty"]
            ),
        ]
        for row in rows
    ]
    return Section(
        key="by_difficulty",
        title="By difficulty",
        heads=heads,
        cells=cells,
        note="Change of perplexity, with its 95% interval, over quarters of the documents by the baseline's "
        "loss on them"
        + (
            "."
            if rows[0]["by_difficulty"][0]["intervals"]["kl_mean"]
            else f"; a quarter of fewer than {FEWEST_DOCUMENTS} documents has none: give more text, or a "
            f"shorter --context."
        ),
    )


def _generation(rows: list[Row]) -> Section:
    cells = [
        [
            row["kv"],
            f"{row['same_tokens_mean']:.1f}",
            interval_text(row["intervals"]["same_tokens_mean"], ".1f"),
            f"{row['same_tokens_median']:.0f}",
            f"{row['identical']:.1%}",
            interval_text(row["intervals"]["identical"], ".1%"),
            f"{row['seconds']:.1f}",
        ]
        for row in rows
    ]
    first = rows[0]
    return Section(
        key="generation",
        title="Greedy generation",
        heads=("kv", "same tokens, mean", "95%", "median", "identical", "95%", "seconds"),
        cells=cells,
        note=f"Tokens until the first that differs from {first['kv']}, of {first['new_tokens']} after each "
        f"of {first['prompts']} prompts.",
    )


def _attention(rows: list[Row]) -> Section:
    formats = list(dict.fromkeys(row["kv"] for row in rows))
    layers = sorted({row["layer"] for row in rows})
    found = {(row["kv"], row["layer"]): row for row in rows}
    cells = [[str(layer), *(_attention_cell(found[kv, layer]) for kv in formats)] for layer in layers]
    return Section(
        key="attention",
        title="Error of the attention output, by layer",
        heads=("layer", *formats),
        cells=cells,
        note="Mean |a - b| / |b| against unquantized KV on the same inputs (K alone quantized, V alone).",
    )


def _attention_cell(row: Row) -> str:
    return f"{row['error_mean']:.4f} ({row['k_error_mean']:.4f}, {row['v_error_mean']:.4f})"


def _needle_summary(rows: list[Row]) -> Section:
    cells = [
        [
            row["kv"],
            f"{row['retrieved']:.1%}",
            interval_text((row["retrieved_low"], row["retrieved_high"]), ".1%"),
            f"{row['token_accuracy']:.1%}",
            f"{row['trials']:,}",
            f"{row['seconds']:.1f}",
        ]
        for row in rows
    ]
    return Section(
        key="needle_summary",
        title="Needle in a haystack",
        heads=("kv", "retrieved", "95%", "tokens right", "trials", "seconds"),
        cells=cells,
        note="Answers with every token right, over all lengths and depths; Wilson's interval.",
    )


def _needle(rows: list[Row]) -> Section:
    depths = sorted({row["depth"] for row in rows})
    lines: dict[tuple[str, int], dict[float, str]] = {}
    for row in rows:
        lines.setdefault((row["kv"], row["length"]), {})[row["depth"]] = f"{row['retrieved']:.0%}"
    return Section(
        key="needle",
        title="Retrieved, by length and depth",
        heads=("kv", "length", *(f"{depth:.0%}" for depth in depths)),
        cells=[[kv, f"{length:,}", *map(cells.__getitem__, depths)] for (kv, length), cells in lines.items()],
        note="Length in tokens, answer included. Depth: share of the text that stands before the needle.",
    )


def _lm_eval(rows: list[Row]) -> Section:
    formats = list(dict.fromkeys(row["kv"] for row in rows))
    lines: dict[tuple[str, ...], dict[str, str]] = {}
    for row, change in zip(rows, changes(rows), strict=True):
        sign = {True: " \u2191", False: " \u2193"}.get(row["higher_is_better"], "")
        line = (row["task"], row["metric"] + sign, row["filter"], f"{row['samples']:,}")
        cell = _metric_cell(row) + ("" if change is None or row["kv"] == formats[0] else f" ({change:+.4f})")
        lines.setdefault(line, {})[row["kv"]] = cell
    return Section(
        key="lm_eval",
        title="lm-eval",
        heads=("task", "metric", "filter", "samples", *formats),
        cells=[[*line, *(cells.get(kv, "-") for kv in formats)] for line, cells in lines.items()],
        note=f"Value, its standard error, and the change from {formats[0]}. An arrow says where better is.",
    )


def _metric_cell(row: Row) -> str:
    if row["value"] is None:
        return "not a number"
    return f"{row['value']:.4f}" + ("" if row["stderr"] is None else f" \u00b1 {row['stderr']:.4f}")


def _other(key: str, rows: list[Row]) -> Section:
    """A table of whatever the rows of a task hold."""
    heads = [name for name in rows[0] if name not in _RUN_KEYS]
    cells = [[_plain(row[name]) for name in heads] for row in rows]
    return Section(key=key, title=key.replace("_", "-"), heads=heads, cells=cells)


def _plain(value: object) -> str:
    return "-" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


_SECTIONS: dict[str, Callable[[list[Row]], Section]] = {
    "generation": _generation,
    "attention": _attention,
    "needle_summary": _needle_summary,
    "needle": _needle,
    "lm_eval": _lm_eval,
}
