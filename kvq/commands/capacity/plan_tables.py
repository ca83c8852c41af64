"""Tables and remarks of plans: memory by term, users, rates, and the predicted server."""

from collections.abc import Sequence
from typing import Any

from kvq.commands.capacity.plan_serve import COLUMNS as VLLM_COLUMNS
from kvq.commands.shared.tables import console, print_columns, text_table
from kvq.evals.report.page import Columns
from kvq.sizes import binary, decimal, dollars


def columns(rows: list[dict[str, Any]]) -> Columns:
    """Return the columns of a table of plans, by the keys of a row."""
    users = {"gpus_needed": ("GPUs needed", ",d")} if rows[0]["gpus_needed"] is not None else {}
    return {
        "gpu": ("GPU", ""),
        "kv": ("KV", ""),
        "kv_bytes_per_token": ("KV/token", binary),
        "kv_bytes_per_request": ("KV/request", decimal),
        "max_users": ("users", ",d"),
        "contiguous_users": (f"in slots of {rows[0]['slot_tokens']:,}", ",d"),
        "tokens_per_s": ("tokens/s", ",.0f"),
        "ttft_ms": ("TTFT, ms", ",.0f"),
        "itl_ms": ("ITL, ms", ",.1f"),
        "usd_per_million_tokens": ("$ / million", dollars),
    } | users


_AT_RATE: Columns = {
    "gpu": ("GPU", ""),
    "kv": ("KV", ""),
    "utilization": ("utilization", ".0%"),
    "at_once": ("requests at once", str),
    "rate_itl_ms": ("ITL, ms", ",.1f"),
    "rate_gpus": ("GPUs needed", ",d"),
}


def show(
    rows: list[dict[str, Any]], *, assumed: bool, max_num_seqs: int | None, remarks: Sequence[str] = ()
) -> None:
    """Print plans.

    `assumed`: efficiencies are assumed, not measured; `max_num_seqs`: value of the option; `remarks`: printed
    last.
    """
    out = console()
    firsts = {row["gpu"]: row for row in reversed(rows)}
    for gpu in dict.fromkeys(row["gpu"] for row in rows):
        first = firsts[gpu]
        spread = first["tensor_parallel"] * first["pipeline_parallel"]
        out.print(f"{first['model']} on {f'{spread} x ' if spread > 1 else ''}{gpu}, per GPU")
        cells = [
            (
                term["name"] + (f", {first['kv']}" if term["name"] == "KV pool" else ""),
                decimal(term["bytes"]),
                binary(term["bytes"]),
                term["formula"],
            )
            for term in first["terms"]
        ]
        out.print(text_table(("", "decimal", "binary", "formula"), cells, ("", "formula"), no_wrap=False))
        out.print()
    print_columns(rows, columns(rows))
    if "num_gpu_blocks" in rows[0]:
        out.print("figures that vLLM prints when it starts")
        print_columns(rows, VLLM_COLUMNS)
    if "utilization" in rows[0]:
        out.print("at that rate")
        at_once = ["too many" if row["in_flight"] is None else f"{row['in_flight']:,}" for row in rows]
        print_columns([row | {"at_once": n} for row, n in zip(rows, at_once, strict=True)], _AT_RATE)
    for line in (*_remarks(rows, assumed=assumed, max_num_seqs=max_num_seqs), *remarks):
        out.print(line, soft_wrap=True)


def _remarks(rows: list[dict[str, Any]], *, assumed: bool, max_num_seqs: int | None) -> list[str]:
    """Return notes on the figures, and the command lines of the predicted servers."""
    lines = []
    if rows[0]["tokens_per_s"] is not None:
        lines.append(
            f"Speed is a roofline at as many users as fit, with {'assumed' if assumed else 'measured'} "
            f"efficiencies; $ are for generated tokens at full load."
        )
    if rows[0]["state_bytes"]:
        lines.append(
            f"Recurrent states take {binary(rows[0]['state_bytes'])} of a GPU for every sequence, whatever "
            f"its length; their pool also has room for two snapshots of each if memory allows."
        )
    if rows[0]["refused"] is not None and rows[0]["engine"] == "kvq":
        lines.append(
            f"kvq does not run {rows[0]['model']}: {rows[0]['refused']}; the plan is for an engine that does."
        )
    elif rows[0]["serve"] is None:
        lines.append(
            "kvq serve runs on one GPU; this is the fullest GPU of an engine that splits the model so."
        )
    else:
        what = "that GPU" if rows[0]["tensor_parallel"] * rows[0]["pipeline_parallel"] == 1 else "those GPUs"
        lines.append(f"The plan predicts this server, on {what} without other processes:")
    for row in rows:
        what = f"{row['gpu']}, {row['kv']}:"
        if row["serve"] is not None:
            lines.append(f"{what} {row['serve']}")
            if max_num_seqs is None and row["max_users"] > (most := row["default_num_seqs"]):
                lines.append(f"  without --max-num-seqs at most {most} requests run at once")
        if row["users_at_context"] is not None:
            lines.append(
                f"{what} {row['users_at_context']:,} users instead of {row['max_users']:,} with "
                f"--max-model-len {row['context']}: layer groups share memory by the longest context"
            )
    return lines
