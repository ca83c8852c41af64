"""Report of `kvq quantize` on the terminal and as JSON."""

from dataclasses import asdict
from typing import Any

from kvq.calib.quantize import Quantized
from kvq.commands.shared.declare import picked
from kvq.commands.shared.results import used_line
from kvq.commands.shared.terminal import echo, print_cautions, print_columns
from kvq.evals.report.page import columns_of
from kvq.sizes import binary
from kvq.weights.files import TRANSFORMERS_NEEDS

_SHOWN = 12  # maximum number of modules in the table


def report(
    done: Quantized, used: dict[str, Any], quality: dict[str, Any] | None, file_format: str
) -> dict[str, Any]:
    """Return the facts of the JSON report; its rows, one per module, are separate."""
    return {
        "out": str(done.out),
        **picked(done, "samples", "tokens", "bytes_before", "bytes_after"),
        **{key: used[key] for key in ("seconds", "peak_bytes", "device_peak_bytes")},
        "ignored": done.ignored,
        "not_scaled": done.skipped,
        "notes": list(done.notes),
        "file_format": file_format,
        "transformers_needs": list(TRANSFORMERS_NEEDS[file_format]),
        "perplexity": quality,
    }


def print_report(
    done: Quantized, used: dict[str, Any], quality: dict[str, Any] | None, file_format: str
) -> None:
    """Print the modules with the largest errors, the totals, and the modules that were not quantized."""
    worst = sorted(done.rows, key=lambda row: -row.relative_error)[:_SHOWN]
    prefix = done.rows[0].module.partition(f".{done.rows[0].layer}.")[0] + "."
    which = "the modules that lost most" if len(done.rows) > _SHOWN else "modules"
    echo(f"{which} (relative error of {worst[0].error_of})")
    print_columns(
        [asdict(row) | {"module": row.module.removeprefix(prefix)} for row in worst], columns_of("quantize")
    )
    what, others = ("tensors", "llama.cpp") if file_format == "gguf" else ("Linear layers", "vLLM")
    saved = 1 - done.bytes_after / done.bytes_before
    echo(
        f"wrote {done.out}: {len(done.rows)} {what}, {binary(done.bytes_before)} to "
        f"{binary(done.bytes_after)} ({saved:.0%} less); {used_line(used)}"
    )
    needed = TRANSFORMERS_NEEDS[file_format]
    echo(
        f"kvq and {others} load it as it is; transformers needs {' and '.join(needed)} for it "
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
        print_cautions(quality)
        echo(
            f"perplexity on {quality['text']}, {quality['tokens']:,} tokens: "
            f"{quality['perplexity_before']:.4f} before, {quality['perplexity_after']:.4f} after "
            f"({quality['perplexity_change']:+.2%})"
        )


def _summary(found: dict[str, str]) -> str:
    """Format names grouped by reason, with at most three names per reason."""
    by_reason: dict[str, list[str]] = {}
    for name, why in found.items():
        by_reason.setdefault(why, []).append(name)
    return "; ".join(
        f"{', '.join(names[:3])}{f' and {len(names) - 3} more' if len(names) > 3 else ''} ({why})"
        for why, names in by_reason.items()
    )
