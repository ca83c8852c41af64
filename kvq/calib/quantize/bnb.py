"""Checkpoints of bitsandbytes: its own NF4 and LLM.int8, made by the package through transformers.

Source: Dettmers et al., "QLoRA", 2023, section 3 (NF4); "LLM.int8()", 2022.
"""

import json
import shutil
from pathlib import Path
from typing import Any

from kvq import fileio
from kvq.calib.quantize.output import small_files
from kvq.errors import ConfigError, ModelError, first_lines
from kvq.models.checkpoint import read_json
from kvq.models.prepared import QUANTIZED_FROM, prepare
from kvq.models.resolve import ModelSource
from kvq.weights.manifest import verify_manifest, write_manifest
from kvq.weights.writer import check_target


def write_bitsandbytes(
    model: str | Path | ModelSource,
    out: Path,
    method: str,
    *,
    device: str = "auto",
    revision: str | None = None,
    token: str | None = None,
) -> None:
    """Quantize with bitsandbytes into a folder of its own; transformers and vLLM load it.

    `method`: nf4 (4-bit normal floats, double quantization) or int8-bnb (8 bits, outliers apart).

    Raises:
        ConfigError: nothing can be written at `out`.
        ModelError: missing, damaged or refused model, or one that the package can't quantize.
    """
    check_target(out, overwrite=False)
    prepared = prepare(model, device=device, max_context=1, revision=revision, token=token)
    folder = prepared.folder
    if prepared.is_quantized:
        raise ModelError(f"{folder} is quantized already; take an unquantized copy")
    verify_manifest(folder)
    aside = out.with_name(f".{out.name}.partial")
    try:
        _quantized(folder, method, str(prepared.device)).save_pretrained(aside)
        config = read_json(aside / "config.json")
        config[QUANTIZED_FROM] = {"name": prepared.source.name, "digest": prepared.digest}
        fileio.write_text(aside / "config.json", json.dumps(config, indent=2) + "\n")
        for path in small_files(folder):
            if not (aside / path.name).exists():
                shutil.copyfile(path, aside / path.name)
        for path in aside.glob("*.safetensors"):
            fileio.as_new(path)
        write_manifest(aside)
        aside.replace(out)
    except OSError as error:
        raise ConfigError(f"can't write {out}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _quantized(folder: Path, method: str, device: str) -> Any:
    import torch
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    if method == "nf4":
        config = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.bfloat16,
        )
    else:
        config = BitsAndBytesConfig(load_in_8bit=True)
    try:
        return AutoModelForCausalLM.from_pretrained(
            folder,
            quantization_config=config,
            device_map={"": device},
            use_safetensors=True,
            trust_remote_code=False,
            local_files_only=True,
        )
    except Exception as error:  # whatever the package raises
        raise ModelError(f"bitsandbytes can't quantize {folder}: {first_lines(error)}") from error
