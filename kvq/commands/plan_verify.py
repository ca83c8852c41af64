"""`kvq plan --verify`: start engines here, and compare their memory with the plan."""

import sys
from typing import TYPE_CHECKING, Any

import click

from kvq.commands.results import write_rows
from kvq.errors import ConfigError

if TYPE_CHECKING:
    from kvq.engine.reconcile import Reconciliation

_ALLOWED = {
    "model",
    "kv",
    "verify",
    "kv_memory",
    "block_size",
    "max_num_seqs",
    "max_num_batched_tokens",
    "json_path",
}


def run(options: dict[str, Any], given: set[str]) -> None:
    """Start one engine a format; exit code 1 if any memory is off by more than the tolerance."""
    from kvq.capacity.plan.known import known_models
    from kvq.capacity.plan.plan import LIKELY_SEQUENCES
    from kvq.commands.progress import status
    from kvq.engine import LLM

    if wrong := sorted(given - _ALLOWED):
        names = ", ".join("--" + name.replace("_", "-") for name in wrong)
        raise ConfigError(f"--verify measures this machine; leave out {names}")
    if options["model"].lower() in known_models():
        raise ConfigError(
            f"--verify starts the model, and of {options['model']} only the shape is known; give its folder "
            f"or its hub name"
        )
    rows: list[dict[str, Any]] = []
    for kv in options["kv"]:
        with (
            status(f"starting an engine with KV in {kv}"),
            LLM(
                options["model"],
                kv,
                block_size=options["block_size"],
                kv_memory=options["kv_memory"],
                max_num_seqs=options["max_num_seqs"] or LIKELY_SEQUENCES,
                max_num_batched_tokens=options["max_num_batched_tokens"],
            ) as llm,
        ):
            rows.append(_row(kv, llm.core.memory, llm.core.model.weights.device.type))
    _print(rows)
    write_rows(rows, options["json_path"])
    if not all(row["holds"] for row in rows):
        sys.exit(1)


def _row(kv: str, memory: "Reconciliation", device: str) -> dict[str, Any]:
    return {
        "kv": kv,
        "device": device,
        "holds": not memory.wrong,
        "terms": [
            {"name": line.name, "planned_bytes": line.planned, "found_bytes": line.found}
            for line in memory.lines
        ],
    }


def _print(rows: list[dict[str, Any]]) -> None:
    from rich.table import Table

    from kvq.commands.tables import console
    from kvq.engine.reconcile import TOLERANCE

    table = Table(box=None, pad_edge=False)
    for name in ("KV", "", "planned, MB", "found, MB", "of the whole"):
        table.add_column(name, justify="left" if name in ("KV", "") else "right")
    for row in rows:
        whole = row["terms"][-1]["planned_bytes"]
        for term in row["terms"]:
            planned, found = term["planned_bytes"], term["found_bytes"]
            table.add_row(
                row["kv"],
                term["name"],
                f"{planned / 1e6:,.1f}",
                f"{found / 1e6:,.1f}",
                f"{(found - planned) / whole:+.2%}",
            )
    console().print(table)
    if not all(row["holds"] for row in rows):
        click.echo(f"kvq: memory is off the plan by more than {TOLERANCE:.0%} of the whole", err=True)
