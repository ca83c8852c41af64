"""Output of a quantized checkpoint: packed layers, all other tensors unchanged, and the config."""

from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import safe_open

from kvq.calib.quantize.gguf import check_gguf
from kvq.calib.quantize.layer import ModuleReport
from kvq.calib.quantize.partial import Partial
from kvq.calib.quantize.settings import QuantizeSettings, Quantizing
from kvq.calib.quantize.targets import Targets
from kvq.errors import ConfigError
from kvq.formats.weights import WeightFormat
from kvq.models.describe.checkpoint import read_json, weight_files
from kvq.models.describe.resolve import tokenizer_folder
from kvq.models.loading.prepared import QUANTIZED_FROM, PreparedModel
from kvq.models.parts.device import DTYPES
from kvq.weights.files import check_fits, pack_linear, quantization_config
from kvq.weights.writer import CheckpointWriter, check_target

_COPIED = (
    *("tokenizer", "special_tokens", "vocab", "merges"),
    *("generation_config", "chat_template", "added_tokens"),
)
_SUFFIXES = (".json", ".jinja", ".txt", ".model", ".tiktoken")

KVScales = dict[str, torch.Tensor]  # names of tensors -> fp32 [1]


def check_output(work: Quantizing, settings: QuantizeSettings) -> None:
    """Raise ConfigError unless the output can be written and its format can store the weights."""
    file_format = work.file_format
    if file_format == "gguf":
        check_gguf(work, settings)
        return
    if work.gguf_type is not None:
        raise ConfigError(f"--type names types of GGUF files, got --format {file_format}; leave one out")
    check_fits(file_format, settings.fmt)
    grouped = settings.act_order == "group" and settings.fmt.group_size is not None
    if grouped and file_format != "autogptq":
        raise ConfigError(
            f"{file_format} can't hold groups in the order of activity; use --act-order static, whose groups "
            f"are neighbouring inputs, or --format autogptq"
        )
    if work.kv_scales and file_format != "compressed-tensors":
        raise ConfigError(f"{file_format} can't hold scales of K and V; use --format compressed-tensors")
    check_target(work.out, overwrite=work.overwrite)


def write_checkpoint(
    work: Quantizing, prepared: PreparedModel, partial: Partial, targets: Targets, kv_scales: KVScales | None
) -> tuple[list[ModuleReport], dict[str, str]]:
    """Write the folder completely or not at all; return report rows, and why some inputs are not scaled."""
    source, progress = prepared.folder, work.progress("writing")
    dtype = DTYPES.get(work.stored_dtype())  # of unquantized tensors; None: as in the source
    rows: list[ModuleReport] = []
    skipped: dict[str, str] = {}
    formats: dict[str, WeightFormat] = {}
    replaced: set[str] = set()
    ordered = False
    with CheckpointWriter(work.out, overwrite=work.overwrite) as writer:
        for index in range(len(targets.layers)):
            progress(index, len(targets.layers))
            result = partial.load(index)
            for name, weight in result.weights.items():
                full = targets.full_name(index, name)
                writer.add(pack_linear(work.file_format, full, weight))
                formats[full] = weight.fmt
                ordered |= weight.order is not None
                replaced.add(f"{full}.weight")
            changed = {targets.full_name(index, name): x for name, x in result.parameters.items()}
            writer.add(changed)
            replaced |= changed.keys()
            rows += result.rows
            skipped |= {targets.full_name(index, name): why for name, why in result.skipped.items()}
        _copy_others(writer, source, replaced, dtype)
        writer.add(kv_scales or {})
        config = read_json(source / "config.json")
        if dtype is not None:
            config.pop("torch_dtype", None)
            config["dtype"] = str(dtype).removeprefix("torch.")
        config[QUANTIZED_FROM] = {"name": prepared.source.name, "digest": prepared.digest}
        # Parameters outside Linear layers need not be listed
        ignored = [name for name, why in targets.ignored.items() if not why.startswith("not a Linear")]
        config["quantization_config"] = quantization_config(
            work.file_format, formats, ignored, kv_scales=kv_scales is not None, act_order=ordered
        )
        writer.finish(config, small_files(source))
    return rows, skipped


def small_files(folder: Path) -> Sequence[Path]:
    """Return the small files, such as the tokenizer's, that a quantized copy needs unchanged."""
    found = {path.name: path for place in (tokenizer_folder(folder), folder) for path in place.iterdir()}
    return sorted(
        path
        for path in found.values()
        if path.is_file() and path.suffix in _SUFFIXES and path.name.startswith(_COPIED)
    )


def _copy_others(
    writer: CheckpointWriter, source: Path, replaced: set[str], dtype: torch.dtype | None
) -> None:
    """Copy every tensor that was not replaced; floats are converted to `dtype`."""
    found: set[str] = set()
    for path in weight_files(source):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118
                found.add(name)
                if name not in replaced:
                    tensor = file.get_tensor(name)
                    is_other = dtype is not None and tensor.is_floating_point()
                    writer.add({name: tensor.to(dtype) if is_other else tensor})
    missing = sorted(replaced - found)
    if missing:
        raise ConfigError(f"{source} has no tensor {missing[0]}, which was changed; please report this model")
