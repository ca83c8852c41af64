"""`kvq models`: the models that kvq can plan for without their files."""

from typing import TYPE_CHECKING, Any

import click

from kvq.commands.options import json_option
from kvq.commands.results import write_rows
from kvq.sizes import binary, count

if TYPE_CHECKING:
    from kvq.capacity.plan.target import KnownModel

_COLUMNS = {
    "model": ("model", ""),
    "parameters": ("parameters", count),
    "active_parameters": ("active", count),
    "layers": ("layers", "d"),
    "kv_heads": ("KV heads", "d"),
    "head_dim": ("head_dim", "d"),
    "max_context": ("context", ",d"),
    "kv_bytes_per_token": ("KV/token, fp16", binary),
    "source": ("source", ""),
}


@click.command(name="models")
@json_option
def command(json_path: str | None) -> None:
    """List models that `kvq plan` knows, with what decides about memory."""
    from kvq.capacity.plan.target import known_models
    from kvq.commands.tables import print_columns

    rows = [_row(model) for model in known_models().values()]
    print_columns(rows, _COLUMNS)
    write_rows(rows, json_path)


def _row(model: "KnownModel") -> dict[str, Any]:
    from kvq.geometry import parse_geometry
    from kvq.sizing.memory import kv_layout
    from kvq.sizing.parameters import count_parameters

    geometry = parse_geometry(model.config)
    counted = count_parameters(model.config, geometry)
    return {
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
