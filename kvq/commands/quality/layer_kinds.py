"""Layer kinds of a model: KV that grows with each token, and states of constant size per sequence."""

from collections.abc import Iterator
from typing import Any

from kvq.commands.shared.terminal import print_columns
from kvq.evals.report.page import columns_of
from kvq.geometry import LayerGeometry, ModelGeometry

COMPUTE_BYTES = 2  # per element of a state in the compute dtype
_PIECES = 5  # maximum number of layer ranges shown per kind


def kind_of(layer: LayerGeometry) -> str:
    """Return the kind of a layer, such as `full`, `latent` or `sliding-4096`."""
    return f"{layer.kind}-{layer.window}" if layer.window else layer.kind


def layer_kinds(geometry: ModelGeometry) -> list[dict[str, Any]]:
    """Return a row per kind: layers that store K and V, share another layer's K and V, or have states."""
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for number, row in _rows(geometry):
        key = tuple(row.items())
        found.setdefault(key, {**row, "layers": 0, "numbers": []})
        found[key]["layers"] += 1
        found[key]["numbers"].append(number)
    return list(found.values())


def print_kinds(rows: list[dict[str, Any]]) -> None:
    """Print the kinds of layers as a table."""
    heads = columns_of("layer kinds")
    shown: list[dict[str, Any]] = [{**dict.fromkeys(heads), **row} for row in rows]
    for row in shown:
        row["which"] = _ranges(row["numbers"])
        if "reads" in row:  # a layer that shares K and V
            row["kind"] = f"shared, reads {row['reads']}"
    print_columns(shown, heads)


def _ranges(numbers: list[int]) -> str:
    """Format numbers as `0-2, 4-6`; if there are many ranges, show only the first few and the last."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    texts = [str(a) if a == b else f"{a}-{b}" for a, b in runs]
    return ", ".join(texts if len(texts) <= _PIECES else [*texts[: _PIECES - 1], "..", texts[-1]])


def in_words(geometry: ModelGeometry) -> str:
    """Return the kinds as text, such as `15 full + 45 Qwen3_5MoeGatedDeltaNet`."""
    counts: dict[str, int] = {}
    for row in layer_kinds(geometry):
        counts[row["kind"]] = counts.get(row["kind"], 0) + row["layers"]
    return " + ".join(f"{count} {kind}" for kind, count in counts.items())


def _rows(geometry: ModelGeometry) -> Iterator[tuple[int, dict[str, Any]]]:
    for layer in geometry.layers:
        yield (
            layer.number,
            {
                "kind": kind_of(layer),
                "kv_heads": layer.kv_heads,
                "head_dim": layer.k_head_dim,
                "v_head_dim": layer.v_head_dim,
                "elements_per_token": layer.elements_per_token,
            },
        )
    for layer in geometry.layers:
        for number in layer.readers:
            yield number, {"kind": "shared", "reads": layer.number}
    for state in geometry.states:
        nbytes = sum(tensor.nbytes(COMPUTE_BYTES) for tensor in state.tensors)
        yield state.number, {"kind": state.kind, "state_bytes": nbytes}
