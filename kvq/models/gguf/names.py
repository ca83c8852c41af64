"""Names of a GGUF model's tensors in transformers, and what their values need to be those of transformers."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from kvq.errors import ModelError
from kvq.formats.tensor_entry import TensorEntry
from kvq.models.gguf.architectures import Architecture, architecture_of
from kvq.models.gguf.config import ROPE_TENSORS, Tensors

WHOLE = {
    "token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"
}  # fmt: skip
_LAYER = re.compile(r"blk\.(\d{1,6})\.(\w+)\.(weight|bias)")
_MOST_EXPERTS = 10_000
HEADS = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}  # parts with rows in heads' order
ROW_OF_ONE = "ffn_gate_inp_shexp"  # a vector in GGUF, a matrix of one row in transformers


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """Place of the values of one tensor of transformers.

    `tensor`: with the name and shape in transformers. `heads`: if not None, row 2 j + p of each of so many
    heads is row j + p * dim / 2 in transformers. `shift`: what GGUF has added to the values.
    """

    tensor: TensorEntry
    heads: int | None = None
    shift: float = 0.0


def find_sources(metadata: Mapping[str, Any], tensors: Tensors, config: Mapping[str, Any]) -> list[Source]:
    """Return the sources of a model's tensors; `config`: from `gguf_config`.

    Raises:
        ModelError: a tensor is none of its architecture's.
    """
    return [
        source
        for tensor in tensors.values()
        if tensor.name not in ROPE_TENSORS
        for source in _sources(architecture_of(metadata, str(tensor.path)), tensor, config)
    ]


def _sources(own: Architecture, tensor: TensorEntry, config: Mapping[str, Any]) -> Iterator[Source]:
    """Yield the tensors of transformers that a tensor of GGUF holds: one, or one for each expert."""
    if match := _LAYER.fullmatch(tensor.name):
        layer, part, kind = match.groups()
        name = f"model.layers.{layer}.{own.parts[part]}.{kind}" if part in own.parts else None
    else:
        part, _, kind = tensor.name.rpartition(".")
        name = f"{WHOLE[part]}.{kind}" if part in WHOLE and kind in ("weight", "bias") else None
    if name is None or ("{}" in name and tensor.shape[0] > _MOST_EXPERTS):
        raise ModelError(
            f"{tensor.path} holds tensor {tensor.name!r:.80}, for which {own.model_type} models have no "
            f"place; take another copy, or the model as safetensors"
        )
    if len(tensor.shape) == 1 and not tensor.kind.is_float:
        raise ModelError(
            f"{tensor.path}: vector {tensor.name} is stored as {tensor.dtype}; take another copy"
        )
    shape = (1, *tensor.shape) if part == ROW_OF_ONE and len(tensor.shape) == 1 else tensor.shape
    count, shape = (shape[0], shape[1:]) if "{}" in name else (1, shape)
    size = (tensor.end - tensor.begin) // count
    for i in range(count):
        begin = tensor.begin + i * size
        yield Source(
            tensor=replace(tensor, name=name.format(i), shape=shape, begin=begin, end=begin + size),
            heads=config[HEADS[part]] if part in HEADS and own.is_permuted else None,
            shift=own.norm_shift if part.endswith("norm") else 0.0,
        )
