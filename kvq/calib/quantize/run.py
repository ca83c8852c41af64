"""`kvq.quantize`: quantization of a model to a new checkpoint."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from kvq.calib.export import fp8_scale_tensors
from kvq.calib.observe import Observations, observe
from kvq.calib.quantize.gguf import write_gguf
from kvq.calib.quantize.layer import LayerQuantizer, ModuleReport, install
from kvq.calib.quantize.output import check_output, write_checkpoint
from kvq.calib.quantize.partial import Partial, count_finished
from kvq.calib.quantize.settings import Progress, QuantizeSettings, Quantizing
from kvq.calib.quantize.targets import Targets, find_targets
from kvq.calib.quantize.walk import Walk, decoder_layers, draw_samples
from kvq.errors import ConfigError, ModelError
from kvq.evals import EvalText, calibration_text
from kvq.formats import KVRecipe
from kvq.models import load
from kvq.models.describe.checkpoint import content_digest, weight_files
from kvq.models.loading.prepared import PreparedModel
from kvq.models.loading.skeleton import build_skeleton
from kvq.models.loading.weights import load_plain
from kvq.version import __version__
from kvq.weights.manifest import relist


@dataclass(frozen=True, kw_only=True, slots=True)
class Quantized:
    """Result of `quantize_model`: the written folder, and the error and size of each module."""

    out: Path
    rows: tuple[ModuleReport, ...]
    ignored: dict[str, str] = field(default_factory=dict)  # module -> why its weights are kept
    skipped: dict[str, str] = field(default_factory=dict)  # Linear layer -> why its inputs are not scaled
    samples: int = 0  # windows used for calibration
    tokens: int = 0
    notes: tuple[str, ...] = ()

    @property
    def bytes_before(self) -> int:
        """Size in bytes of the quantized modules before quantization."""
        return sum(row.bytes_before for row in self.rows)

    @property
    def bytes_after(self) -> int:
        """Size in bytes of the quantized modules after quantization."""
        return sum(row.bytes_after for row in self.rows)


def quantize_model(work: Quantizing, settings: QuantizeSettings) -> Quantized:
    """Quantize a model's weights into a new folder, or a GGUF file.

    Finished layers are kept in OUT.partial until the new folder is complete. After an interruption, a run
    with the same settings continues from these layers and writes the same bytes.

    Raises:
        ConfigError: settings are incompatible with each other or the model; raised before any work starts.
        ModelError: the model is missing, damaged or unsupported.
        RequestError: the text is too short, or activations are not finite.
    """
    check_output(work, settings)
    if work.file_format == "gguf":
        made, notes = write_gguf(work, work.prepared())
        return Quantized(out=work.out, rows=tuple(made), notes=tuple(notes))
    dtype = work.stored_dtype()
    prepared = work.prepared()
    geometry = prepared.geometry
    if prepared.folder == work.out.resolve():
        raise ConfigError(f"{work.out} is the model itself; name another folder with --out")
    if (skeleton := build_skeleton(prepared)) is not None:
        _find_targets(skeleton[0], settings, prepared)  # raises before the weights are loaded
    text = work.text or calibration_text()
    windows = _draw_windows(settings, prepared, text)
    partial = Partial(work.out, _decisive(work, settings, prepared, text), restart=work.restart)
    partial.check()  # before the weights are loaded
    model = load_plain(prepared, dtype=dtype)
    _check_finite(model, dtype)
    targets = _find_targets(model, settings, prepared)
    seen = None
    if work.kv_scales:  # from the unquantized model: quantized weights hardly change the maxima of K and V
        whole = load(prepared.source, kv="fp32", device=work.device, dtype=work.dtype)
        seen = observe(whole, text, progress=work.progress("observing K and V"))
    assert len(decoder_layers(model)[1]) == len(geometry.layers), "one geometry for each layer"
    with partial.held():
        if finished := count_finished(partial.folder):
            work.on_resumed(finished)
        progress = work.progress("quantizing layers")
        _quantize_layers(prepared, targets, settings, windows, partial, progress)
        rows, skipped = _write(work, prepared, partial, targets, seen)
        partial.remove()
    return Quantized(
        out=work.out,
        rows=tuple(rows),
        ignored=targets.ignored,
        skipped=skipped,
        samples=len(windows),
        tokens=sum(map(len, windows)),
        notes=_notes(work, settings, targets, len(windows), text),
    )


def _find_targets(model: Any, settings: QuantizeSettings, prepared: PreparedModel) -> Targets:
    held = {entry.name for entry in prepared.entries}
    takes_experts = not settings.folds  # a norm's scales would have to suit all experts at once
    return find_targets(model, settings.fmt, held, takes_experts=takes_experts)


def _draw_windows(settings: QuantizeSettings, prepared: PreparedModel, text: EvalText) -> list[list[int]]:
    if not settings.needs_text:
        return []
    return draw_samples(
        prepared.tokenizer,
        text.text,
        samples=settings.samples,
        context=settings.context,
        max_context=prepared.geometry.max_context,
        seed=settings.seed,
    )


def _write(
    work: Quantizing, prepared: PreparedModel, partial: Partial, targets: Targets, seen: Observations | None
) -> tuple[list[ModuleReport], dict[str, str]]:
    """Write the checkpoint and, if K and V were observed, a recipe with scales for K and V."""
    scales = None if seen is None else fp8_scale_tensors(seen)
    written = write_checkpoint(work, prepared, partial, targets, scales)
    if seen is not None:  # static FP8 for K and V, with scales bound to the quantized weights
        digest = content_digest(weight_files(work.out))
        recipe = KVRecipe.uniform("fp8_per_head", prepared.geometry.head_dims)
        bound = replace(seen.scales(), model_digest=digest)
        replace(recipe, static_scales=bound, model_digest=digest).save(work.out / "kvq.json")
        relist(work.out / "kvq.json")
    return written


def _quantize_layers(
    prepared: PreparedModel,
    targets: Targets,
    settings: QuantizeSettings,
    windows: list[list[int]],
    partial: Partial,
    progress: Progress,
) -> None:
    """Quantize every layer into `partial`, continuing after any layers finished there earlier.

    With a method that needs data, every layer runs twice over all samples: once for the statistics of its
    inputs, and once with quantized weights for the hidden states of the next layer. Layers that were finished
    earlier run only once, with quantized weights, so later layers get bit-identical results. Finished layers
    are removed from memory.

    Raises:
        RequestError: activations are not finite; the message names the layer.
    """
    total, device = len(targets.layers), prepared.device  # the model itself is in main memory
    finished = count_finished(partial.folder)
    walk = Walk(targets.model, windows, device) if settings.needs_text else None
    for index in range(total):
        progress(index, total)
        if index < finished and walk is None:
            continue
        layer = targets.layer(index)
        quantizer = LayerQuantizer(targets, settings, index, prepared.geometry.layers[index].v_head_dim)
        layer.to(device, torch.float32)
        if index < finished:
            result = partial.load(index)
        else:
            result = quantizer.quantize(walk)
            partial.save(index, result)
        if walk is not None and index + 1 < total:
            install(layer, result, device)
            walk.advance(index)
        layer.to("meta")
    progress(total, total)


def _decisive(
    work: Quantizing, settings: QuantizeSettings, prepared: PreparedModel, text: EvalText
) -> dict[str, object]:
    """Return all settings that determine the bytes of a layer."""
    return settings.described() | {
        "model": prepared.digest,
        "text": text.digest if settings.needs_text else None,
        "dtype": work.stored_dtype(),
        "device": prepared.device.type,
        "kvq": __version__,
    }


def _check_finite(model: Any, dtype: str) -> None:
    """Raise ModelError for weights that are not finite, such as large bf16 values converted to fp16."""
    for name, parameter in model.named_parameters():
        if not parameter.isfinite().all():
            raise ModelError(
                f"{name} holds NaN or infinity in {dtype if dtype != 'auto' else parameter.dtype}; "
                f"where it is too large for fp16, write compressed-tensors with --dtype bf16"
            )


def _notes(
    work: Quantizing, settings: QuantizeSettings, targets: Targets, samples: int, text: EvalText
) -> tuple[str, ...]:
    notes = []
    if settings.needs_text and samples != settings.samples:
        notes.append(
            f"{text.name} has {samples} samples of that context, fewer than the {settings.samples} asked for"
        )
    if work.file_format == "compressed-tensors" and settings.fmt.code.is_integer:
        if not settings.fmt.symmetric:
            notes.append(
                "transformers with compressed-tensors 0.20 expects zero points otherwise and refuses them; "
                "kvq loads them"
            )
        if targets.has_experts:
            notes.append("transformers 5.23 refuses integer formats in models with experts; kvq loads them")
    return tuple(notes)
