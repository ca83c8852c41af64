"""Checkpoints in the NF4 and LLM.int8 formats, written by bitsandbytes through transformers.

Source: Dettmers et al., "QLoRA", 2023, section 3 (NF4); "LLM.int8()", 2022.
"""

import json
import shutil
from pathlib import Path
from typing import Any

from kvq import fileio
from kvq.calib.quantize.output import small_files
from kvq.calib.quantize.settings import Quantizing
from kvq.errors import ConfigError, ModelError, first_lines
from kvq.models.describe.checkpoint import read_json
from kvq.models.loading.prepared import QUANTIZED_FROM
from kvq.weights.manifest import verify_manifest, write_manifest
from kvq.weights.writer import check_target


def write_bitsandbytes(work: Quantizing, method: str) -> None:
    """Quantize a model with bitsandbytes into a new folder, which transformers and vLLM can load.

    `method`: nf4 (4-bit normal floats, double quantization) or int8-bnb (8 bits, separate outliers).

    Raises:
        ConfigError: the folder can't be written.
        ModelError: the model is missing, damaged or unsupported, or bitsandbytes can't quantize it.
    """
    out = work.out
    check_target(out, overwrite=False)
    prepared = work.prepared()
    folder = prepared.folder
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

    nf4 = {
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": True,
        "bnb_4bit_compute_dtype": torch.bfloat16,
    }
    try:
        return AutoModelForCausalLM.from_pretrained(
            folder,
            quantization_config=BitsAndBytesConfig(**(nf4 if method == "nf4" else {"load_in_8bit": True})),
            device_map={"": device},
            use_safetensors=True,
            trust_remote_code=False,
            local_files_only=True,
        )
    except Exception as error:  # the package may raise anything
        raise ModelError(f"bitsandbytes can't quantize {folder}: {first_lines(error)}") from error
