"""The report of `kvq quantize`: for people, and as JSON."""

from typing import Any

import torch
from rich.table import Table

from kvq.calib.quantize import Quantized, QuantizeSettings
from kvq.commands.resources import Used
from kvq.commands.results import result_of
from kvq.commands.screen import echo
from kvq.commands.tables import console, new_table
from kvq.sizes import binary
from kvq.weights.files import TRANSFORMERS_NEEDS

_SHOWN = 12  # modules in the table for people


def report(
    device: torch.device,
    model: str,
    settings: QuantizeSettings,
    done: Quantized,
    used: Used,
    quality: dict[str, Any] | None,
    file_format: str,
) -> dict[str, Any]:
    """The common envelope; a row for each module."""
    return result_of(
        done.rows,
        device,
        model=model,
        out=str(done.out),
        settings=settings.described(),
        samples=done.samples,
        tokens=done.tokens,
        bytes_before=done.bytes_before,
        bytes_after=done.bytes_after,
        seconds=used.seconds,
        peak_bytes=used.peak_bytes,
        device_peak_bytes=used.device_peak_bytes,
        ignored=done.ignored,
        not_scaled=done.skipped,
        notes=list(done.notes),
        file_format=file_format,
        transformers_needs=list(TRANSFORMERS_NEEDS[file_format]),
        perplexity=quality,
    )


def print_report(done: Quantized, used: Used, quality: dict[str, Any] | None, file_format: str) -> None:
    """The worst modules, the totals, and what stayed as it was."""
    console().print(_table(done))
    saved = 1 - done.bytes_after / done.bytes_before
    echo(
        f"wrote {done.out}: {len(done.rows)} Linear layers, {binary(done.bytes_before)} to "
        f"{binary(done.bytes_after)} ({saved:.0%} less); {used.line()}"
    )
    needed = TRANSFORMERS_NEEDS[file_format]
    echo(
        f"kvq loads it as it is, and vLLM does; transformers needs {' and '.join(needed)} for it "
        f"(pip install {' '.join(needed)})"
    )
    if done.samples:
        echo(f"calibrated on {done.samples} samples, {done.tokens:,} tokens")
    for note in done.notes:
        echo(f"note: {note}")
    for what, found in (("kept as they were", done.ignored), ("inputs not scaled", done.skipped)):
        if found:
            echo(f"{what}: {_summary(found)}")
    if quality is not None:
        echo(
            f"perplexity on {quality['text']}, {quality['tokens']:,} tokens: "
            f"{quality['perplexity_before']:.4f} before, {quality['perplexity_after']:.4f} after "
            f"({quality['perplexity_change']:+.2%})"
        )


def _table(done: Quantized) -> Table:
    worst = sorted(done.rows, key=lambda row: -row.relative_error)[:_SHOWN]
    title = "the modules that lost most" if len(done.rows) > _SHOWN else "modules"
    prefix = done.rows[0].module.partition(f".{done.rows[0].layer}.")[0] + "."
    heads = ("module", "format", "error", "size", "from", "alpha", "seconds")
    title += f" (relative error of {worst[0].error_of})"
    table = new_table(heads, ("module", "format"), no_wrap=False, title=title)
    for row in worst:
        table.add_row(
            row.module.removeprefix(prefix),
            row.format,
            f"{row.relative_error:.4f}",
            binary(row.bytes_after),
            binary(row.bytes_before),
            "" if row.alpha is None else f"{row.alpha:.2f}",
            f"{row.seconds:.2f}",
        )
    return table


def _summary(found: dict[str, str]) -> str:
    """Names by reason, few of many."""
    by_reason: dict[str, list[str]] = {}
    for name, why in found.items():
        by_reason.setdefault(why, []).append(name)
    return "; ".join(
        f"{', '.join(names[:3])}{f' and {len(names) - 3} more' if len(names) > 3 else ''} ({why})"
        for why, names in by_reason.items()
    )
