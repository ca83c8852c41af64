"""A LoRA adapter in a PEFT folder: read from safetensors alone, and checked against its model."""

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from torch import Tensor

from kvq.errors import ModelError, explained
from kvq.formats.tensor_entry import TensorEntry
from kvq.kernels.adapters.reference import Factors
from kvq.models.adapters.config import MAX_RANK, AdapterConfig, is_end, read_config
from kvq.models.describe.checkpoint import read_header

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX, _SUFFIXES = "base_model.model.", (".lora_A.weight", ".lora_B.weight")
_DTYPES = ("F32", "BF16", "F16")
_HEADER_BYTES = 1 << 20

Shapes = Mapping[str, tuple[int, int]]  # inputs and outputs of the layers that an adapter may change, by name


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StoredAdapter:
    """An adapter as it is in its folder. `digest`: SHA-256 of its weights and its configuration."""

    config: AdapterConfig
    factors: dict[str, Factors]  # by layer
    digest: bytes


def read_adapter(name: str, folder: Path, shapes: Shapes) -> StoredAdapter:
    """Read an adapter. `shapes`: the layers of the model.

    Raises:
        ModelError: a file is missing, damaged or too large, or the adapter is for another model or of a kind
            that kvq would run incorrectly. The message names the adapter, the file and the tensor.
    """
    at = folder / CONFIG
    try:
        config = read_config(at)
        at = folder / WEIGHTS
        return _read(at, config, shapes)
    except ModelError as error:
        raise ModelError(f"adapter {name!r}: {at}: {error}") from error


def _read(path: Path, config: AdapterConfig, shapes: Shapes) -> StoredAdapter:
    if not path.is_file():
        pickled = path.with_suffix(".bin")
        why = f"{pickled.name} is pickled, and can run code when read; " if pickled.exists() else ""
        raise ModelError(f"the file is missing; {why}save the adapter as safetensors")
    with explained(ModelError, "it can't be read"):
        size, most = path.stat().st_size, 4 * MAX_RANK * sum(map(sum, shapes.values())) + _HEADER_BYTES
        if size > most:
            raise ModelError(f"it has {size} bytes, more than the {most} of any adapter for this model")
        pairs = _pairs(read_header(path))
        _check_layers(config, pairs, shapes)
        for layer, entries in pairs.items():
            _check_pair(entries, config.rank_of(layer), *shapes[layer])
        raw = path.read_bytes()
    try:
        tensors = load_tensors(raw)
        found = {layer: [_finite(tensors, entry) for entry in pair] for layer, pair in pairs.items()}
    except (SafetensorError, KeyError) as error:  # other bytes than those whose header was checked
        raise ModelError(f"it changed while it was read ({error}); load it again") from error
    factors = {
        layer: Factors(a=a, b=b, scale=config.scale_of(layer)).narrowest() for layer, (a, b) in found.items()
    }
    return StoredAdapter(config=config, factors=factors, digest=sha256(repr(config).encode() + raw).digest())


def _pairs(entries: list[TensorEntry]) -> dict[str, list[TensorEntry]]:
    """Return the tensors A and B of each layer."""
    pairs: dict[str, list[TensorEntry]] = {}
    for entry in sorted(entries, key=lambda entry: entry.name):  # A before B
        suffix = next((own for own in _SUFFIXES if entry.name.endswith(own)), None)
        if suffix is None or not entry.name.startswith(_PREFIX):
            raise ModelError(
                f"tensor {entry.name} is none of lora_A and lora_B of a layer; save the adapter without "
                f"modules_to_save, embeddings, biases and DoRA"
            )
        pairs.setdefault(entry.name.removeprefix(_PREFIX).removesuffix(suffix), []).append(entry)
    for layer, pair in pairs.items():
        if len(pair) < 2:
            missing = next(own for own in _SUFFIXES if not pair[0].name.endswith(own))
            raise ModelError(f"tensor {_PREFIX}{layer}{missing} is missing; copy the adapter again")
    if not pairs:
        raise ModelError("it holds no tensors; copy the adapter again")
    return pairs


def _check_layers(config: AdapterConfig, found: Mapping[str, object], shapes: Shapes) -> None:
    for layer in found:
        if layer not in shapes:
            raise ModelError(
                f"tensor {_PREFIX}{layer}{_SUFFIXES[0]} is for {layer}, which is no layer of this model that "
                f"adapters can change; was it made for another model?"
            )
        if config.targets is not None and not any(is_end(end, layer) for end in config.targets):
            raise ModelError(f"it has tensors for {layer}, which target_modules in {CONFIG} leaves out")
    if config.targets is None or config.is_partial:
        return
    for layer in shapes:
        if layer not in found and any(is_end(end, layer) for end in config.targets):
            raise ModelError(f"tensor {_PREFIX}{layer}{_SUFFIXES[0]} is missing; copy the adapter again")


def _check_pair(pair: list[TensorEntry], rank: int, inputs: int, outputs: int) -> None:
    """Raise ModelError unless A and B fit their layer and the rank."""
    for entry, wanted in zip(pair, ((rank, inputs), (outputs, rank)), strict=True):
        if entry.dtype not in _DTYPES:
            raise ModelError(f"tensor {entry.name} is {entry.dtype}; allowed: {', '.join(_DTYPES)}")
        if entry.shape != wanted:
            raise ModelError(
                f"tensor {entry.name} is {list(entry.shape)}, and must be {list(wanted)} for this model and "
                f"the rank in {CONFIG}; was it made for another model?"
            )


def _finite(tensors: Mapping[str, Tensor], entry: TensorEntry) -> Tensor:
    tensor = tensors[entry.name]
    if not torch.isfinite(tensor).all():
        raise ModelError(f"tensor {entry.name} holds NaN or infinity")
    return tensor
