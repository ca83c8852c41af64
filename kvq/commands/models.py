"""`kvq models`: the models that kvq can plan for without their files."""

from typing import Any

import click

from kvq.commands.results import write_rows
from kvq.sizes import binary, count


@click.command(name="models")
@click.option("--json", "json_path", type=click.Path(), help="Write them as JSON.")
def command(json_path: str | None) -> None:
    """List models that `kvq plan` knows, with what decides about memory."""
    from kvq.capacity.plan.known import known_models
    from kvq.commands.tables import console, new_table
    from kvq.geometry import parse_geometry
    from kvq.sizing.memory import kv_layout
    from kvq.sizing.parameters import count_parameters

    rows: list[dict[str, Any]] = []
    for model in known_models().values():
        geometry = parse_geometry(model.config)
        counted = count_parameters(model.config, geometry)
        rows.append(
            {
                "model": model.name,
                "parameters": counted.total,
                "active_parameters": counted.active,
                "layers": len(geometry.layers),
                "q_heads": geometry.q_heads,
                "kv_heads": geometry.layers[0].kv_heads,
                "head_dim": geometry.layers[0].k_head_dim,
                "windows": sorted({layer.window or 0 for layer in geometry.layers}),
                "max_context": geometry.max_context,
                "kv_bytes_per_token": kv_layout(geometry, "fp16").kv_bytes_per_token,
                "source": model.source,
            }
        )
    columns = ("parameters", "active", "layers", "KV heads", "head_dim", "context", "KV/token, fp16")
    table = new_table(("model", *columns, "source"), ("model", "source"))
    for row in rows:
        table.add_row(
            row["model"],
            count(row["parameters"]),
            count(row["active_parameters"]),
            str(row["layers"]),
            str(row["kv_heads"]),
            str(row["head_dim"]),
            f"{row['max_context']:,}",
            binary(row["kv_bytes_per_token"]),
            row["source"],
        )
    console().print(table)
    write_rows(rows, json_path)
