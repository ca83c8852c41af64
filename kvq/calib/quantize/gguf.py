"""GGUF file of a model: its tensors rounded to types that llama.cpp's users name, one at a time."""

import json
import math
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kvq.calib.observe import observe
from kvq.calib.quantize.layer import ModuleReport
from kvq.calib.quantize.settings import QuantizeSettings, Quantizing
from kvq.errors import ConfigError, ModelError
from kvq.evals import calibration_text
from kvq.formats import KVRecipe
from kvq.formats.ggml import GGML_TYPES, GgmlType
from kvq.formats.ggml_mixtures import DEFAULT, FILE_TYPES, file_type, fitting_type, wanted_type
from kvq.kernels.codec.ggml import dequantize
from kvq.kernels.codec.ggml_round import round_rows
from kvq.models import load
from kvq.models.describe.checkpoint import content_digest
from kvq.models.describe.kv_scales import is_kv_scale
from kvq.models.describe.modules import config_of, load_config
from kvq.models.describe.same_config import check_same_config
from kvq.models.describe.text_part import ModelTensors, read_tensors
from kvq.models.gguf.export.config import Target, config_metadata, find_targets, rope_factors
from kvq.models.gguf.export.file import GgufWriter, Kinds, check_gguf_target
from kvq.models.gguf.export.tokenizer import tokenizer_metadata
from kvq.models.gguf.files import RECIPE, read_gguf
from kvq.models.loading.prepared import PreparedModel
from kvq.weights.manifest import verify_manifest

_NO_DIGEST = "0" * 32
_ROPE = "rope_freqs.weight"
_PIECE = 1 << 18  # values at a time: a few tensors of them stay in the second cache


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
    metadata = _metadata(prepared, attributes, name)
    with GgufWriter(work.out) as writer:
        begin = partial(
            _begin, writer, {one.name: (kinds[one.name], one.shape) for one in targets}, attributes
        )
        begin(metadata)
        check_same_config(config, config_of(read_gguf(writer.path).config), f"GGUF of {prepared.source.name}")
        recipe = _recipe(work, prepared, _is_exact(targets, kinds, prepared), notes)
        begin(metadata | _recipe_metadata(recipe, _NO_DIGEST))
        rounding = _Rounding(stored=read_tensors(prepared.folder), device=prepared.device)
        progress = work.progress("writing")
        for at, target in enumerate(targets):
            progress(at, len(targets))
            rounding.write(writer, target, kinds[target.name])
        progress(len(targets), len(targets))
        digest = content_digest([writer.path])
        writer.finish(metadata | _recipe_metadata(recipe, digest))
    return sorted(rounding.rows, key=lambda row: row.layer < 0), notes


def _begin(
    writer: GgufWriter, tensors: Kinds, config: Mapping[str, Any], metadata: Mapping[str, Any]
) -> None:
    factors = rope_factors(config)
    if factors is None:
        writer.begin(metadata, tensors)
        return
    writer.begin(metadata, {_ROPE: (GGML_TYPES["F32"], (len(factors),)), **tensors})
    writer.add([torch.tensor(factors, dtype=torch.float32).view(torch.uint8)])


def _kinds(
    targets: list[Target], name: str, config: Mapping[str, Any]
) -> tuple[dict[str, GgmlType], list[str]]:
    """Return the types of tensors by name, and notes about types that rows don't fit."""
    head = "output.weight" if any(one.name == "output.weight" for one in targets) else "token_embd.weight"
    kinds, instead = {}, Counter[str]()
    for one in targets:
        layers, is_head = config["num_hidden_layers"], one.name == head
        wanted = wanted_type(one.name, one.shape, name, layers=layers, is_head=is_head)
        kinds[one.name] = kind = fitting_type(wanted, one.shape[-1])
        if kind != wanted:
            instead[f"{kind.name} in place of {wanted.name}, whose blocks don't divide {one.shape[-1]}"] += 1
    return kinds, [f"tensors in {what} inputs: {count}" for what, count in instead.items()]


def _metadata(prepared: PreparedModel, config: Mapping[str, Any], name: str) -> dict[str, Any]:
    own = config_metadata(config)
    general = {
        "general.architecture": own.pop("general.architecture"),
        "general.type": "model",
        "general.name": prepared.source.name,
        "general.alignment": 32,
        "general.file_type": FILE_TYPES[name],
        "general.quantization_version": 2,
    }
    return general | own | tokenizer_metadata(prepared.tokenizer, config["vocab_size"], prepared.end_ids)


def _is_exact(targets: list[Target], kinds: Mapping[str, GgmlType], prepared: PreparedModel) -> bool:
    """Return True if no value changes."""
    stored = {entry.name: entry.dtype for entry in prepared.entries}
    return all(kinds[one.name].name in ("F32", stored[one.sources[0]]) for one in targets)


def _recipe(work: Quantizing, prepared: PreparedModel, is_exact: bool, notes: list[str]) -> KVRecipe | None:
    """Return the KV recipe that the file will hold: with new scales, or the one beside the model."""
    if work.kv_scales:
        whole = load(prepared.source, kv="fp32", device=work.device, dtype=work.dtype)
        text = work.text or calibration_text()
        scales = observe(whole, text, progress=work.progress("observing K and V")).scales()
        return replace(KVRecipe.uniform("fp8_per_head", prepared.geometry.head_dims), static_scales=scales)
    if not prepared.recipe_beside.is_file():
        return None
    recipe = KVRecipe.load(prepared.recipe_beside)
    if recipe.is_bound and is_exact:
        prepared.check_belongs(recipe)
    if not recipe.is_bound or is_exact:
        return recipe
    notes.append(
        f"{prepared.recipe_beside} was made for the unquantized weights and is not in the file; make one on "
        f"the file, with kvq tune or kvq calibrate"
    )
    return None


def _recipe_metadata(recipe: KVRecipe | None, digest: str) -> dict[str, str]:
    """Return the metadata of a recipe, with what is bound to a model bound to the file."""
    if recipe is None:
        return {}
    if recipe.is_bound:
        scales, centers = recipe.static_scales, recipe.centers
        recipe = replace(
            recipe,
            model_digest=digest,
            static_scales=scales and replace(scales, model_digest=digest),
            centers=centers and replace(centers, model_digest=digest),
        )
    return {RECIPE: json.dumps(recipe.to_json())}


@dataclass(kw_only=True, slots=True)
class _Rounding:
    """Rounding of a model's tensors, in pieces, with a report."""

    stored: ModelTensors
    device: torch.device
    rows: list[ModuleReport] = field(default_factory=list)

    def write(self, writer: GgufWriter, target: Target, kind: GgmlType) -> None:
        """Round a tensor and write it.

        Raises:
            ModelError: a value is not finite, or too large for the type.
        """
        began, sums = time.perf_counter(), [0.0, 0.0]
        writer.add(self._pieces(target, kind, sums))
        if not math.isfinite(sum(sums)):
            raise ModelError(
                f"{target.sources[0]} holds NaN, infinity, or numbers too large for {kind.name} "
                f"({target.name}); is the checkpoint whole? Otherwise name --type BF16 or F32"
            )
        if len(target.shape) < 2:
            return
        layer, first = target.name.split(".")[1], self.stored[target.sources[0]]
        self.rows.append(
            ModuleReport(
                layer=int(layer) if layer.isdigit() else -1,
                module=target.sources[0].removesuffix(".weight").replace("experts.0.", "experts."),
                method="rtn",
                format=kind.name,
                in_features=target.shape[-1],
                out_features=target.shape[-2],
                relative_error=(sums[0] / max(sums[1], 1e-30)) ** 0.5,
                error_of="weights",
                bytes_before=math.prod(target.shape) * first.dtype.itemsize,
                bytes_after=math.prod(target.shape) // kind.values * kind.nbytes,
                alpha=None,
                seconds=time.perf_counter() - began,
            )
        )

    def _pieces(self, target: Target, kind: GgmlType, sums: list[float]) -> Iterator[Tensor]:
        """Yield a tensor's bytes, and add the squares of errors and of values to `sums`."""
        for name in target.sources:
            values = self.stored[name]
            if target.heads is not None:
                pairs = values.view(target.heads, 2, -1, *values.shape[1:])
                values = pairs.transpose(1, 2).reshape(values.shape)
            values = values.view(1, -1) if values.ndim == 1 else values
            step = max(1, _PIECE // values.shape[1])
            for piece in values.split(step):
                wanted = piece.to(self.device, torch.float32) + target.shift
                raw = round_rows(wanted, kind)
                error = dequantize(raw, kind).float() - wanted
                sums[0] += float(error.square().sum(dtype=torch.float64))
                sums[1] += float(wanted.square().sum(dtype=torch.float64))
                yield raw
