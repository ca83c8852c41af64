"""Tables of an evaluation as text cells, for the terminal and HTML."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import floor
from typing import Any

from kvq.evals.report.bootstrap import FEWEST_DOCUMENTS
from kvq.evals.report.gates import changes
from kvq.evals.report.page import Columns, columns_of, sizes, span, table
from kvq.evals.report.session_tables import session_tables
from kvq.models.check.verdict import describe_check

Row = dict[str, Any]
_KEYS = {"needle": ("needle_summary", "needle")}  # tasks with rows under more than one key
MOST = 0.5  # share of keys; if more are exact, a format's figures mean little
_RUN_KEYS = ("seconds", "intervals")  # fields of a row that are not measured figures
_KV: Columns = {"kv": ("kv", "")}
_SECONDS: Columns = {"seconds": ("seconds", ".1f")}


@dataclass(frozen=True, slots=True)
class _Section:
    """One table with a title."""

    key: str
    title: str
    heads: Sequence[str]
    cells: Sequence[Sequence[str]]
    note: str = ""
    drawn: Sequence[Row] = ()  # rows for a plot that its key does not find


def sections(result: dict[str, Any]) -> Iterator[_Section]:
    """Yield the tables for which a result of `kvq eval` has figures, or the table of `kvq perplexity`."""
    rows: list[Row] = result["rows"]
    if "tasks" not in result:
        yield _plain_perplexity(rows)
        return
    if "perplexity" in rows[0]:
        yield _perplexity(rows, has_verdict=not result.get("cautions"))
        yield _divergence(rows)
        yield _by_depth(rows)
        if rows[0]["by_difficulty"]:
            yield _by_difficulty(rows)
    else:
        yield _section("sizes", "What is stored", rows, {**_KV, **sizes(rows)})
    for key in row_keys(result):
        if key in _SECTIONS:
            yield _SECTIONS[key](result[key])
        elif facts := result.get(f"{key}_facts"):
            for one in session_tables(key, result[key], facts):
                drawn = result[key] if one.is_drawn else ()
                yield _Section("sessions", one.title, one.heads, one.cells, one.note, drawn)
        elif key != "rows":
            yield _other(key, result[key])


def outcomes(result: Mapping[str, Any]) -> Iterator[tuple[bool, str]]:
    """Yield (passed, text) for void tasks, the instrument check, mostly exact formats, and gates."""
    for name, reason in result.get("void", {}).items():
        yield False, f"{name} is VOID: {reason}"
    if check := result.get("instrument"):
        yield check["passed"], describe_check(check)
    for row in result["rows"]:
        if row.get("exact_keys", 0) > MOST:
            yield False, f"caution: {exactness_warning(row['kv'], row['exact_keys'], result['context'])}"
    for gate in result.get("gates", []):
        if gate["passed"]:
            yield True, f"gate {gate['gate']}: passed"
        for failure in gate["failures"]:
            yield False, f"gate {gate['gate']}: FAILED by {failure['told']}"


def exactness_warning(kv: str, share: float, tokens: int) -> str:
    """Return a warning that this share of keys was exact in sequences of `tokens` tokens."""
    percent = f"{floor(1000 * share) / 10:g}%"  # rounded down, so that 100% means all
    return (
        f"with {kv}, {percent} of the keys that queries see in {tokens:,} tokens are exact: its figures are "
        f"more of those than of its formats"
    )


def row_keys(result: Mapping[str, Any]) -> list[str]:
    """Return the keys under which a result stores the rows of its tasks."""
    keys = [str(task["key"]) for task in result.get("tasks", [])]
    return [part for key in keys for part in _KEYS.get(key, (key,))]


def depth_name(row: Row) -> str:
    """Return the name of a bucket of context depth."""
    return f"{row['first_depth']}-{row['last_depth']}"


def _section(key: str, title: str, rows: Sequence[Row], columns: Columns, note: str = "") -> _Section:
    return _Section(key, title, *table(rows, columns), note)


def _plain_perplexity(rows: list[Row]) -> _Section:
    cut = "{kv}, {attention_window}-token window"
    named = [row | {"kv": cut.format_map(row)} if row["attention_window"] else row for row in rows]
    columns = {**_KV, **sizes(rows), **columns_of("perplexity, all")}
    return _section("perplexity", "All figures", named, columns)


def _perplexity(rows: list[Row], *, has_verdict: bool) -> _Section:
    says: Columns = {"verdict": ("what that says", "")} if has_verdict else {}
    columns = {**_KV, **sizes(rows), **columns_of("perplexity"), **says, **_SECONDS}
    return _section("perplexity", "Perplexity", rows, columns)


def _divergence(rows: list[Row]) -> _Section:
    note = (
        "KL divergence in nats per token. Top-1: share of tokens with the same likeliest successor; "
        "top-5: share of the five likeliest that are among this format's five."
    )
    return _section("kl", f"Divergence from {rows[0]['kv']}", rows, columns_of("divergence"), note)


def _by_depth(rows: list[Row]) -> _Section:
    cell = "{0[kl_mean]:.5f}, {0[top1_agreement]:.1%}".format
    buckets = {f"by_depth.{i}": (depth_name(one), cell) for i, one in enumerate(rows[0]["by_depth"])}
    note = "Mean KL and top-1 agreement of tokens that were predicted from so many tokens."
    return _section("by_depth", "By context depth", rows, {**_KV, **buckets}, note)


def _by_difficulty(rows: list[Row]) -> _Section:
    parts = rows[0]["by_difficulty"]
    columns = dict(_KV)
    for i, part in enumerate(parts):
        name = {1: "easiest quarter", 4: "hardest quarter"}.get(part["quarter"], f"quarter {part['quarter']}")
        columns[f"by_difficulty.{i}"] = (f"{name}, {part['documents']} documents", _quarter)
    few = (
        f"; a quarter of fewer than {FEWEST_DOCUMENTS} documents has none: give more text, or a shorter "
        f"--context."
    )
    note = (
        "Change of perplexity, with its 95% interval, over quarters of the documents by the baseline's "
        "loss on them" + ("." if parts[0]["intervals"]["kl_mean"] else few)
    )
    return _section("by_difficulty", "By difficulty", rows, columns, note)


def _quarter(part: Row) -> str:
    bounds = part["intervals"]["perplexity_change"]
    return f"{part['perplexity_change']:+.2%} ({span('+.2%')(bounds) if bounds else '-'})"


def _generation(rows: list[Row]) -> _Section:
    first = rows[0]
    note = (
        f"Tokens until the first that differs from {first['kv']}, of {first['new_tokens']} after each "
        f"of {first['prompts']} prompts."
    )
    return _section("generation", "Greedy generation", rows, columns_of("generation"), note)


def _attention(rows: list[Row]) -> _Section:
    cell = "{error_mean:.4f} ({k_error_mean:.4f}, {v_error_mean:.4f})".format_map
    heads, cells = _crossed(rows, lambda row: (str(row["layer"]),), "kv", cell)
    note = "Mean |a - b| / |b| against unquantized KV on the same inputs (K alone quantized, V alone)."
    return _Section("attention", "Error of the attention output, by layer", ("layer", *heads), cells, note)


def _needle_summary(rows: list[Row]) -> _Section:
    bounded = [row | {"bounds": (row["retrieved_low"], row["retrieved_high"])} for row in rows]
    note = "Answers with every token right, over all lengths and depths; Wilson's interval."
    return _section("needle_summary", "Needle in a haystack", bounded, columns_of("needle"), note)


def _needle(rows: list[Row]) -> _Section:  # D26: with sinks and recent tokens, both ends are exact
    rows = sorted(rows, key=lambda row: row["depth"])  # stable
    heads, cells = _crossed(
        rows, lambda row: (row["kv"], f"{row['length']:,}"), "depth", "{retrieved:.0%}".format_map
    )
    heads = ["kv", "length", *(f"{depth:.0%}" for depth in heads)]
    note = "Length in tokens, answer included. Depth: share of the text that stands before the needle."
    return _Section("needle", "Retrieved, by length and depth", heads, cells, note)


def _lm_eval(rows: list[Row]) -> _Section:
    first = rows[0]["kv"]

    def line(row: Row) -> tuple[str, ...]:
        sign = {True: " \u2191", False: " \u2193"}.get(row["higher_is_better"], "")
        return row["task"], row["metric"] + sign, row["filter"], f"{row['samples']:,}"

    def cell(row: Row) -> str:
        if row["value"] is None:
            return "not a number"
        error = "" if row["stderr"] is None else f" \u00b1 {row['stderr']:.4f}"
        change = "" if row["change"] is None or row["kv"] == first else f" ({row['change']:+.4f})"
        return f"{row['value']:.4f}{error}{change}"

    changed = [row | {"change": change} for row, change in zip(rows, changes(rows), strict=True)]
    heads, cells = _crossed(changed, line, "kv", cell)
    note = f"Value, its standard error, and the change from {first}. An arrow says where better is."
    return _Section("lm_eval", "lm-eval", ("task", "metric", "filter", "samples", *heads), cells, note)


def _crossed(
    rows: list[Row], line: Callable[[Row], tuple[str, ...]], across: str, cell: Callable[[Row], str]
) -> tuple[list[Any], list[list[str]]]:
    """Return the values of `across` as heads, and a line of cells per identity; missing rows are dashes."""
    heads = list(dict.fromkeys(row[across] for row in rows))
    lines: dict[tuple[str, ...], dict[Any, str]] = {}
    for row in rows:
        lines.setdefault(line(row), {})[row[across]] = cell(row)
    return heads, [[*names, *(cells.get(head, "-") for head in heads)] for names, cells in lines.items()]


def _other(key: str, rows: list[Row]) -> _Section:
    """Return a table of all fields in a task's rows, for tasks without a special table."""
    columns = {name: (name, _plain) for name in rows[0] if name not in _RUN_KEYS}
    return _section(key, key.replace("_", "-"), rows, columns)


def _plain(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


_SECTIONS: dict[str, Callable[[list[Row]], _Section]] = {
    "generation": _generation,
    "attention": _attention,
    "needle_summary": _needle_summary,
    "needle": _needle,
    "lm_eval": _lm_eval,
}
