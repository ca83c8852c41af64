"""GGUF file of a model: its tensors rounded to types that llama.cpp's users name, one at a time."""

import json
import math
import re
import struct
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from kvq.calib.observe import observe
from kvq.calib.quantize.layer import ModuleReport
from kvq.calib.quantize.settings import QuantizeSettings, Quantizing
from kvq.errors import ConfigError, ModelError
from kvq.evals import calibration_text
from kvq.formats import KVRecipe, StaticScales
from kvq.formats.checkpoints.fields import shown
from kvq.formats.ggml import GGML_TYPES, GgmlType
from kvq.formats.ggml_mixtures import DEFAULT, FILE_TYPES, file_type, fitting_type, wanted_type
from kvq.kernels.codec.ggml import dequantize
from kvq.kernels.codec.ggml_round import round_rows
from kvq.models import load
from kvq.models.describe.checkpoint import content_digest
from kvq.models.describe.kv_scales import is_kv_scale
from kvq.models.describe.modules import config_of, default_config, load_config
from kvq.models.describe.text_part import ModelTensors, read_tensors
from kvq.models.gguf.export.config import Target, config_metadata, find_targets, rope_factors
from kvq.models.gguf.export.file import GgufWriter, check_gguf_target
from kvq.models.gguf.export.tokenizer import tokenizer_metadata
from kvq.models.gguf.files import RECIPE, read_gguf
from kvq.models.loading.prepared import PreparedModel
from kvq.weights.manifest import verify_manifest

_NO_DIGEST = "0" * 32
_PIECE = 1 << 18  # values at a time: a few tensors of them stay in the second cache
# Fields that change no logits, or that other fields repeat
_IDLE = re.compile(
    r"_.*|.*_token_id|.*dropout.*|dtype|architectures|model_type|transformers_version|initializer_.*|use_cache|"
    r"pretraining_tp|router_(aux_loss_coef|jitter_noise)|output_router_logits|max_window_layers|"
    r"use_sliding_window|cache_implementation|sliding_window_pattern"
)


def check_gguf(work: Quantizing, settings: QuantizeSettings) -> None:
    """Raise ConfigError unless the options fit GGUF and the file can be written."""
    file_type(work.gguf_type or DEFAULT)
    plain = QuantizeSettings(method="rtn")
    given = [one.name for one in fields(plain) if getattr(settings, one.name) != getattr(plain, one.name)]
    given += ["text"] if work.text is not None and not work.kv_scales else []
    given += ["dtype"] if work.dtype != "auto" else []
    if given:
        raise ConfigError(
            f"GGUF files are rounded to --type, such as Q4_K_M or F16, without a text; leave out "
            f"{', '.join('--' + name.replace('_', '-') for name in given)}"
        )
    check_gguf_target(work.out, overwrite=work.overwrite)


def write_gguf(work: Quantizing, prepared: PreparedModel) -> tuple[list[ModuleReport], list[str]]:
    """Write the file completely or not at all; return the report's rows and notes.

    Raises:
        ConfigError: the file can't be written.
        ModelError: GGUF can't express the model or its tokenizer, or a weight is not finite.
    """
    verify_manifest(prepared.folder)
    config = load_config(prepared.folder)
    name, attributes = file_type(work.gguf_type or DEFAULT), config.to_dict()
    attributes |= {alias: attributes.get(own) for alias, own in config.attribute_map.items()}
    shapes = {entry.name: entry.shape for entry in prepared.entries if not is_kv_scale(entry.name)}
    targets = find_targets(attributes, shapes)
    kinds, notes = _kinds(targets, name, attributes)
    general = {
        "general.type": "model",
        "general.name": prepared.source.name,
        "general.alignment": 32,
        "general.file_type": FILE_TYPES[name],
        "general.quantization_version": 2,
    }
    tokens = tokenizer_metadata(prepared.tokenizer, attributes["vocab_size"], prepared.end_ids)
    metadata, factors = config_metadata(attributes) | general | tokens, rope_factors(attributes)
    tensors = {name: (GGML_TYPES["F32"], tuple(x.shape)) for name, x in factors.items()}
    tensors |= {one.name: (kinds[one.name], one.shape) for one in targets}
    stored, rows, progress = read_tensors(prepared.folder), list[ModuleReport](), work.progress("writing")
    with GgufWriter(work.out) as writer:
        writer.begin(metadata, tensors, factors.values())
        read = config_of(read_gguf(writer.path).config)
        _check_same_config(config, read, f"GGUF of {prepared.source.name}")
        scales = _scales(work, prepared)
        writer.begin(metadata | _recipe(scales, prepared, _NO_DIGEST), tensors, factors.values())
        for at, target in enumerate(targets):
            progress(at, len(targets))
            rows += _write_rounded(writer, target, kinds[target.name], stored, prepared.device)
        progress(len(targets), len(targets))
        writer.finish(metadata | _recipe(scales, prepared, content_digest([writer.path])))
    return sorted(rows, key=lambda row: row.layer < 0), notes


def _check_same_config(wanted: Any, found: Any, where: str) -> None:  # D387
    """Raise ModelError unless two of transformers' configs agree; `where`: what can't say the first."""
    from transformers import PreTrainedConfig

    before, after = wanted.to_dict(), found.to_dict()
    before["head_dim"] = before.get("head_dim") or wanted.hidden_size // wanted.num_attention_heads
    own = default_config(before).to_dict().keys() | after.keys()
    own -= PreTrainedConfig().to_dict().keys() - {"tie_word_embeddings"}
    for name in sorted(one for one in own if not _IDLE.fullmatch(one)):
        if _plain(before.get(name)) != _plain(after.get(name)):
            raise ModelError(
                f"{where} can't say that {name} is {shown(before.get(name))}; kvq would read "
                f"{shown(after.get(name))} from it"
            )


def _plain(value: Any) -> Any:
    """Return a value without what is neutral, with numbers in fp32."""
    if isinstance(value, dict):
        parts = {name: _plain(one) for name, one in value.items()}
        return {
            name: one for name, one in parts.items() if one and (name, one) != ("partial_rotary_factor", 1)
        }
    if isinstance(value, float):
        return struct.unpack("<f", struct.pack("<f", value))[0]
    return value or None


def _kinds(
    targets: list[Target], name: str, config: Mapping[str, Any]
) -> tuple[dict[str, GgmlType], list[str]]:
    """Return the types of tensors by name, and notes about types that rows don't fit."""
    head = "token_embd.weight" if config["tie_word_embeddings"] else "output.weight"
    kinds, instead = {}, Counter[str]()
    for one in targets:
        layers, is_head = config["num_hidden_layers"], one.name == head
        wanted = wanted_type(one.name, one.shape, name, layers=layers, is_head=is_head)
        kinds[one.name] = kind = fitting_type(wanted, one.shape[-1])
        if kind != wanted:
            instead[f"{kind.name} in place of {wanted.name}, whose blocks don't divide {one.shape[-1]}"] += 1
    return kinds, [f"tensors in {what} inputs: {count}" for what, count in instead.items()]


def _scales(work: Quantizing, prepared: PreparedModel) -> StaticScales | None:
    """Return the scales of K and V that the file will hold, if any."""
    if not work.kv_scales:
        return None
    whole = load(prepared.source, kv="fp32", device=work.device, dtype=work.dtype)
    text = work.text or calibration_text()
    return observe(whole, text, progress=work.progress("observing K and V")).scales()


def _recipe(scales: StaticScales | None, prepared: PreparedModel, digest: str) -> dict[str, str]:
    """Return the metadata with a KV recipe of these scales, bound to the file's digest."""
    if scales is None:
        return {}
    plain = KVRecipe.uniform("fp8_per_head", prepared.geometry.head_dims)
    bound = replace(plain, static_scales=replace(scales, model_digest=digest), model_digest=digest)
    return {RECIPE: json.dumps(bound.to_json())}


def _write_rounded(
    writer: GgufWriter, target: Target, kind: GgmlType, stored: ModelTensors, device: torch.device
) -> list[ModuleReport]:
    """Round a tensor and write it in pieces; return the report's row, or none for a vector.

    Raises:
        ModelError: a value is not finite, or too large for the type.
    """
    began, sums = time.perf_counter(), torch.zeros(2, dtype=torch.float64)

    def pieces() -> Iterator[Tensor]:
        for name in target.sources:
            values = stored[name]
            if target.heads is not None:
                values = values.view(target.heads, 2, -1, *values.shape[1:]).transpose(1, 2).flatten(0, 2)
            values = values.reshape(-1, values.shape[-1])
            for piece in values.split(max(1, _PIECE // values.shape[1])):
                wanted = piece.to(device, torch.float32) + target.shift
                raw = round_rows(wanted, kind)
                error = dequantize(raw, kind).float() - wanted
                sums.add_(torch.stack([x.square().sum(dtype=torch.float64) for x in (error, wanted)]).cpu())
                yield raw

    writer.add(pieces())
    error, whole = sums.tolist()
    if not math.isfinite(error + whole):
        raise ModelError(
            f"{target.sources[0]} holds NaN, infinity, or numbers too large for {kind.name} "
            f"({target.name}); is the checkpoint whole? Otherwise name --type BF16 or F32"
        )
    if len(target.shape) < 2:
        return []
    layer, values = target.name.split(".")[1], math.prod(target.shape)
    row = ModuleReport(
        layer=int(layer) if layer.isdigit() else -1,
        module=target.sources[0].removesuffix(".weight").replace("experts.0.", "experts."),
        method="rtn",
        format=kind.name,
        in_features=target.shape[-1],
        out_features=target.shape[-2],
        relative_error=(error / max(whole, 1e-30)) ** 0.5,
        error_of="weights",
        bytes_before=values * stored[target.sources[0]].dtype.itemsize,
        bytes_after=values // kind.values * kind.nbytes,
        alpha=None,
        seconds=time.perf_counter() - began,
    )
    return [row]
