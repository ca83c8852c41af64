"""`kvq models`: models for which kvq can plan without access to their files."""

from typing import Any

import click

from kvq.capacity.plan.catalogue import KnownModel, known_models
from kvq.commands.quality.layer_kinds import COMPUTE_BYTES, in_words, layer_kinds
from kvq.commands.shared.options import json_option
from kvq.commands.shared.results import write_rows
from kvq.commands.shared.terminal import print_columns
from kvq.evals.report.page import columns_of
from kvq.sizing.memory import kv_layout

_WIDTH = 260  # characters; wide enough to show every name in full


@click.command(name="models")
@json_option
def command(json_path: str | None) -> None:
    """List the models in kvq's catalogue, with the facts that determine their memory use.

    States is the memory of recurrent layers per sequence, regardless of its length. --json includes the
    source of each model's facts, and the reason if kvq doesn't run a model.
    """
    rows = [_row(model) for model in known_models().values()]
    print_columns(rows, columns_of("models"), width=_WIDTH)
    write_rows(rows, json_path)


def _row(model: KnownModel) -> dict[str, Any]:
    geometry, counted = model.geometry, model.parameters
    return {
        "model": model.name,
        "hub": model.model,
        "parameters": counted.total,
        "active_parameters": counted.active,
        "layers": geometry.last_layer + 1,
        "q_heads": geometry.q_heads,
        "kv_heads": geometry.layers[0].kv_heads,
        "head_dim": geometry.layers[0].k_head_dim,
        "windows": sorted({layer.window or 0 for layer in geometry.layers}),
        "kinds": in_words(geometry),
        "layer_kinds": layer_kinds(geometry),
        "max_context": geometry.max_context,
        "kv_bytes_per_token": kv_layout(geometry, "fp16").kv_bytes_per_token,
        "state_bytes": geometry.state_bytes(COMPUTE_BYTES) or None,
        "refused": model.refused,
        "site": "/".join(model.source.split("/")[2:5]),
        "source": model.source,
        "read": model.read,
        "note": model.note,
    }
