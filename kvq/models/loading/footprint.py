"""Estimate of the memory that an engine needs for weights, from a model's small files and headers."""

from collections import Counter
from collections.abc import Iterator
from math import prod

import torch
from torch import Tensor

from kvq.errors import ConfigError
from kvq.formats.checkpoints import parse_config
from kvq.formats.checkpoints.stored import Stored, stored_layers
from kvq.formats.tensor_entry import TensorEntry
from kvq.formats.weights import WeightCode, WeightFormat
from kvq.models.describe.modules import build_on_meta, unquantized
from kvq.models.describe.text_part import read_tensors
from kvq.models.gguf.files import read_gguf
from kvq.models.loading.prepared import PreparedModel
from kvq.models.loading.quantized import runs_experts
from kvq.models.loading.skeleton import keeps_blocks
from kvq.models.parts.device import DTYPE_NAMES
from kvq.models.parts.linear import has_own_products
from kvq.sizing.held import PLAIN, HeldAs, everywhere, held_in_blocks
from kvq.sizing.memory import Split, Term, activation_term, weight_terms
from kvq.sizing.parameters import count_parameters
from kvq.weights import is_expert_code, stacked_experts

_STORED = {"F32": "fp32", "BF16": "bf16", "F16": "fp16"}
_SCALES = (".weight_scale", ".scales")  # suffixes of scale names in the formats that kvq reads
_HEAD = WeightFormat(code=WeightCode.INT8)
_ROUNDED_SCALE = 4  # bytes
_SAMPLE = 4096  # values that are checked per tensor
_WIDENED = {"bf16": 0xFFFF, "fp16": 0x1FFF}  # bits of fp32 that are zero in a widened number


def planned_weights(model: PreparedModel) -> tuple[Term, ...]:
    """Return the memory terms of the weights on the model's device.

    Raises:
        ConfigError: kvq can't count the parameters of the model's family.
    """
    return weight_terms(count_parameters(model.config, model.geometry), held_by_engine(model))


def planned_activations(model: PreparedModel, step_tokens: int) -> Term:
    """Return the memory that a step needs in addition to weights and KV."""
    try:
        parameters = count_parameters(model.config, model.geometry)
    except ConfigError:
        parameters = None
    return activation_term(model.geometry, parameters, step_tokens=step_tokens, split=Split())


def held_by_engine(model: PreparedModel) -> HeldAs:
    """Return the dtypes and formats in which the engine keeps the checkpoint's tensors."""
    other, rounded = PLAIN[DTYPE_NAMES[model.dtype]], model.rounded_to
    if rounded is not None:
        form = Stored.of(rounded, _ROUNDED_SCALE)
        head = Stored.of(_HEAD, _ROUNDED_SCALE) if rounded.code.is_integer else form
        packs = _packs(model, rounded)
        return HeldAs(rules=everywhere(form), other=other, head=head, has_packed_experts=packs)
    is_own = model.device.type == "cpu" and has_own_products(model.dtype, model.backend)
    is_exact = is_own and model.dtype is torch.float32
    plain = PLAIN[_narrowest(model)] if is_exact else other
    if model.is_gguf and model.is_quantized:
        types = read_gguf(model.folder).types
        if is_own or any(keeps_blocks(kind, model) for kind in types.values()):
            return held_in_blocks(types, other, on_gpu=not is_own)
    if not model.is_quantized or model.is_gguf:
        packs = is_exact and _knows_experts(model)
        return HeldAs(other=other, kept=plain, shares_head=is_own, has_packed_experts=packs)
    said = model.config["quantization_config"]
    scheme = parse_config(said)
    codes = next((layer.fmt for _, layer in scheme.rules if layer), None)
    has_experts = any(map(is_expert_code, (entry.name for entry in model.entries)))
    return HeldAs(
        rules=stored_layers(said, scheme, _scale_bytes(model)) or (),
        other=other,
        kept=plain,
        shares_head=is_own,
        has_packed_experts=has_experts and codes is not None and _packs(model, codes),
    )


def _packs(model: PreparedModel, fmt: WeightFormat) -> bool:
    """Return True if kernels support this model's experts, stored as codes of `fmt`."""
    return runs_experts(fmt, model.device, model.backend) is not None and _knows_experts(model)


def _knows_experts(model: PreparedModel) -> bool:
    """Return True if the model has experts and kernels support them."""
    if not count_parameters(model.config, model.geometry).experts:
        return False
    return bool(stacked_experts(build_on_meta(model.folder, unquantized(model.config))))


def _scale_bytes(model: PreparedModel) -> int:
    """Return the size of a stored scale in bytes; kernels keep its dtype."""
    types = Counter(entry.dtype for entry in model.entries if entry.name.endswith(_SCALES))
    return 4 if types and types.most_common(1)[0][0] == "F32" else 2


def _narrowest(model: PreparedModel) -> str:
    """Return the smallest dtype that stores all Linear weights exactly; fp32 is often a widened copy."""
    if model.is_gguf and model.is_quantized:  # dequantized
        return "fp32"
    matrices = Counter[str]()
    for entry in _matrices(model):
        if entry.dtype in _STORED:
            matrices[entry.dtype] += prod(entry.shape)
    stored = _STORED[matrices.most_common(1)[0][0]] if matrices else "fp32"
    if stored != "fp32":
        return stored
    for name, empty in _WIDENED.items():
        if all(not (bits & empty).any() for bits in _samples(model)):
            return name
    return "fp32"


def _matrices(model: PreparedModel) -> list[TensorEntry]:
    """Return the entries of weight matrices, without the scales of quantized weights."""
    return [entry for entry in model.entries if len(entry.shape) == 2 and not entry.name.endswith(_SCALES)]


def _samples(model: PreparedModel) -> Iterator[Tensor]:
    """Yield the bits of each fp32 matrix's first values; the caller stops at the first non-widened matrix."""
    stored = read_tensors(model.folder)
    for entry in _matrices(model):
        if entry.dtype == "F32":
            yield stored[entry.name].flatten()[:_SAMPLE].view(torch.int32)
