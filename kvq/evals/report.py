"""A report of one measurement as a single HTML page that needs no other file."""

from html import escape
from pathlib import Path
from typing import Any

from kvq import fileio
from kvq.evals.page import html_table, page
from kvq.evals.plot import svg_plot

_HEADS = ("KV format", "bits / element", "bytes / token", "vs bf16", "perplexity", "change", "KL mean",
          "KL 99.9%", "same top token", "seconds")  # fmt: skip


def write_report(path: str | Path, result: dict[str, Any], samples: dict[str, str] | None = None) -> None:
    """Write the page. `samples` maps KV format names to texts generated from one prompt."""
    fileio.write_text(path, render(result, samples or {}))


def render(result: dict[str, Any], samples: dict[str, str]) -> str:
    """Return the page's HTML."""
    rows = result["rows"]
    parts = [
        f"<h1>What each KV format saves and costs: {escape(result['model'])}</h1>",
        f"<p>{_summary(rows)}</p>",
        f'<p class="small">Measured on {escape(result["text"])} ({rows[0]["tokens"]:,} predicted tokens, '
        f"windows of {result['context']}), on {escape(result['device'])}, {escape(result['date'])}. Every "
        f"token went through kvq's own write-then-read path: quantized into blocks first, attended from "
        f"there.</p>",
        _instrument(result.get("instrument")),
        svg_plot(result),
        _table(rows),
        _samples(samples),
        _about(result),
    ]
    return page(f"kvq: {result['model']}", parts)


def _summary(rows: list[dict[str, Any]]) -> str:
    """The format that saves most at under 1% more perplexity, in a sentence."""
    good = [r for r in rows if r["instrument"] != "window" and r["perplexity_change"] < 0.01]
    best = min(good, key=lambda r: r["kv_bytes_per_token"])
    return (
        f"Of the formats measured, <b>{escape(best['kv'])}</b> is the smallest whose perplexity rises by "
        f"less than 1%: {best['compression']:.2f} times as many tokens fit into the same memory as with "
        f"bf16, and perplexity changes by {best['perplexity_change']:+.2%}."
    )


def _instrument(check: dict[str, Any] | None) -> str:
    if check is None:
        return ""
    verdict = (
        '<span class="good">can see damage</span>'
        if check["passed"]
        else '<span class="bad">can not see damage well enough; do not trust small differences</span>'
    )
    return (
        f"<p>Is the instrument fit? This model on this text {verdict}: with attention cut to "
        f"{check['window_tokens']} tokens perplexity changes by {check['window_change']:+.1%}, with "
        f"{escape(check['int2_format'])} by {check['int2_change']:+.1%}; both must reach "
        f"{check['limit']:+.0%}.</p>"
    )


def _table(rows: list[dict[str, Any]]) -> str:
    return "<h2>All figures</h2>" + html_table(_HEADS, map(row_cells, rows))


def row_cells(row: dict[str, Any]) -> list[str]:
    """One row of a perplexity result as text cells, in the order of the tables."""
    label = row["kv"]
    if row["attention_window"]:
        label += f", {row['attention_window']}-token window"
    return [
        label,
        f"{row['bits_per_element']:.3f}".rstrip("0").rstrip("."),
        f"{row['kv_bytes_per_token']:,.0f}",
        f"{row['compression']:.2f}x",
        f"{row['perplexity']:.3f}",
        f"{row['perplexity_change']:+.3%}",
        f"{row['kl_mean']:.6f}",
        f"{row['kl_p999']:.4f}",
        f"{row['top1_agreement']:.2%}",
        f"{row['seconds']:.1f}",
    ]


def _samples(samples: dict[str, str]) -> str:
    if not samples:
        return ""
    boxes = "".join(
        f"<div><b>{escape(kv)}</b><pre>{escape(text)}</pre></div>" for kv, text in samples.items()
    )
    return (
        "<h2>The same prompt, two caches</h2><p>Sampled with the same random numbers. This is a very small "
        f"model: read for differences between the columns, not for sense.</p>"
        f'<div class="pair">{boxes}</div>'
    )


def _about(result: dict[str, Any]) -> str:
    versions = ", ".join(f"{k} {v}" for k, v in result["versions"].items())
    return (
        "<h2>How to read this</h2><p>Bits per element count codes and scales; bytes per token are what the "
        "pool allocates, padding included. The change in perplexity, the KL divergence (nats per token) and "
        "the share of tokens with the same likeliest successor are against the first unquantized format of "
        "the table. Other models lose more or less: measure your own with "
        "<code>kvq perplexity --model PATH</code>.</p>"
        f'<p class="small">kvq {escape(result["kvq_version"])}, commit {escape(str(result["commit"]))}, '
        f"{escape(versions)}. Text SHA-256 {escape(result['text_digest'])}. Model digest "
        f"{escape(result['model_digest'])}. Command: <code>{escape(result['command'])}</code></p>"
    )
