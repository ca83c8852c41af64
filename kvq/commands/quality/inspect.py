"""`kvq inspect`: a model's layers by kind, the bytes per token of every format, and the block layout."""

from collections import Counter
from typing import Any

import click

from kvq.commands.quality.layer_kinds import COMPUTE_BYTES, layer_kinds, print_kinds
from kvq.commands.shared.options import REVISION, TOKEN, kv_option, model_argument
from kvq.commands.shared.param_types import BLOCK_SIZES, RENAMED, TO_WRITE
from kvq.commands.shared.results import write_rows
from kvq.commands.shared.terminal import console, print_columns, warn
from kvq.errors import ConfigError, KVQError
from kvq.evals.report.page import SIZES, Columns
from kvq.formats import CODES, KVRecipe
from kvq.layout import BLOCK_SIZE, VERSION, named_recipe, plan_layout
from kvq.sizes import decimal

_FORMATS = (
    "fp32", "bf16", "fp16", "fp8", "fp8_per_head", "int8", "int8_per_head", "int6", "k8v4", "int5",
    "int4_g32", "int4", "int4_g64_rot", "int4_g128", "int3", "int2_g32_rot", "int2",
)  # fmt: skip


@click.command(name="inspect")
@model_argument()
@kv_option("int4", many=False)
@click.option(
    "--block-size", type=BLOCK_SIZES, default=BLOCK_SIZE, show_default=True, help="Tokens per block."
)
@click.option("--revision", help=REVISION)
@click.option("--token", help=TOKEN)
@click.option("--json", "json_path", type=TO_WRITE, help="Write the numbers as JSON.")
def command(
    model: str, kv: list[str], block_size: int, revision: str | None, token: str | None, json_path: str | None
) -> None:
    """Show a model's layers by kind and the bytes per token of every format. No weights are read."""
    from kvq.models.describe.checkpoint import is_gguf
    from kvq.models.describe.modules import build_on_meta, unquantized
    from kvq.models.describe.resolve import resolve_model
    from kvq.models.describe.text_part import read_config, read_entries
    from kvq.models.loading.quantized import check_scheme
    from kvq.models.observe.support import check_supported, is_listed

    source = resolve_model(model, revision=revision, token=token, weights=False)
    config = read_config(source.folder)
    # Counting bytes does not require pinned RoPE
    geometry = check_supported(config, max_context=1, folder=source.folder)
    if is_listed(geometry):  # other models have already been built
        build_on_meta(source.folder, unquantized(config))
    name = "bf16" if kv[0] == "auto" else kv[0]
    chosen = KVRecipe.load(name) if name.endswith(".json") else named_recipe(name, geometry)
    chosen.check_stored("inspect")
    layout = plan_layout(geometry, chosen, block_size=block_size)
    rows = []
    for label in dict.fromkeys((*_FORMATS, *CODES, name)):
        try:
            recipe = chosen if label == name else named_recipe(label, geometry)
            rows.append(
                _format_row(label, recipe, plan_layout(geometry, recipe, block_size=block_size), geometry)
            )
        except ConfigError as error:
            rows.append({"kv": label, "refused": str(error)})
    result: dict[str, Any] = {
        "model": str(source),
        "model_type": geometry.model_type,
        "max_context": geometry.max_context,
        "q_heads": geometry.q_heads,
        "block_size": block_size,
        "layout_version": VERSION,
        "weights": _weights(read_entries(source.folder)) if is_gguf(source.folder) else None,
        "layers": [_layer_row(layer) for layer in geometry.layers],
        "layer_kinds": layer_kinds(geometry),
        "state_bytes": geometry.state_bytes(COMPUTE_BYTES),
        "formats": rows,
        "layout": [_group_row(group) for group in layout.attended],
    }
    _print(result, name)
    if (scheme := config.get("quantization_config")) is not None:
        try:
            check_scheme(source.folder, scheme)
        except KVQError as error:  # only a warning, because bytes of KV don't depend on weights
            warn(str(error))
    write_rows([result], json_path)


def _weights(entries: Any) -> dict[str, int]:
    """Return the bytes of tensors, by the type in which they are stored."""
    found = Counter[str]()
    for entry in entries:
        found[entry.dtype] += entry.end - entry.begin
    return dict(found.most_common())


def _layer_row(layer: Any) -> dict[str, Any]:
    names = {"head_dim": "k_head_dim"}
    keys = ("index", "number", "kind", "kv_heads", "head_dim", "v_head_dim", "window", "readers")
    return {key: getattr(layer, names.get(key, key)) for key in keys}


def _format_row(label: str, recipe: Any, layout: Any, geometry: Any) -> dict[str, Any]:
    names = [{layer.k.name for layer in recipe.layers}, {layer.v.name for layer in recipe.layers}]
    k, v = ("/".join(sorted(found)) for found in names)
    return {
        "kv": label,
        "k": k,
        "v": v,
        "bits_per_element": float(recipe.bits_per_element(geometry.kv_heads, layout.block_size)),
        "kv_bytes_per_token": layout.kv_bytes_per_token,
        "compression": 2 * geometry.elements_per_token / layout.kv_bytes_per_token,
        "block_bytes": sum(group.block_bytes for group in layout.sealed),
    }


def _group_row(group: Any) -> dict[str, Any]:
    layer = group.layers[0]
    return {
        "group": group.name,
        "layers": len(group.layers),
        "block_bytes": group.block_bytes,
        "regions": {
            name: {key: getattr(getattr(layer, name), key) for key in ("offset", "row_bytes", "nbytes")}
            for name in ("k_codes", "v_codes", "k_scales", "v_scales", "k_means", "v_means")
        },
        "layer_bytes": layer.nbytes,
    }


def _print(result: dict[str, Any], chosen: str) -> None:
    out = console()
    out.print(
        f"{result['model']}: {result['model_type']}, {len(result['layers'])} layers with KV, "
        f"{result['q_heads']} query heads, context {result['max_context']:,}"
    )
    out.print()
    if result["weights"]:
        parts = ", ".join(f"{name} {decimal(nbytes)}" for name, nbytes in result["weights"].items())
        out.print(f"weights: {decimal(sum(result['weights'].values()))}: {parts}")
        out.print()
    print_kinds(result["layer_kinds"])
    if result["state_bytes"]:
        out.print(f"states: {result['state_bytes']:,} B a sequence, whatever its length")
    out.print()
    columns: Columns = {
        **{"kv": ("kv", ""), "k": ("K", ""), "v": ("V", "")},
        **SIZES,
        "block_bytes": (f"block of {result['block_size']}", "{:,} B".format),
    }
    print_columns([row for row in result["formats"] if "refused" not in row], columns)
    for row in result["formats"]:
        if "refused" in row:
            out.print(f"does not fit: {row['kv']}: {row['refused']}")
    out.print(f"{RENAMED}; a saved kvq.json has full names")
    out.print()
    out.print(f"layout of one {chosen} block of {result['block_size']} tokens:")
    for group in result["layout"]:
        regions = ", ".join(
            f"{name} at {r['offset']} ({r['nbytes']} B, {r['row_bytes']} a row)"
            for name, r in group["regions"].items()
            if r["nbytes"]
        )
        out.print(
            f"  {group['group']}: {group['layers']} layers x {group['layer_bytes']} B = "
            f"{group['block_bytes']:,} B; each layer {regions}"
        )
