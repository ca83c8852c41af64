"""A GGUF file as a folder that kvq loads: `python convert.py FILE.gguf FOLDER DTYPE`.

`fetch.py` runs it with what transformers needs for GGUF in its path. It imports nothing of the repository.
"""

import json
import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer


def convert(source: Path, folder: Path, dtype: str) -> None:
    """Write weights dequantized, config and tokenizer with its chat template; the folder appears whole.

    transformers refuses to save or cast a model that it read from GGUF, so tensors are taken one by one.
    """
    aside = folder.with_suffix(".partial")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir()
    model = AutoModelForCausalLM.from_pretrained(
        source.parent, gguf_file=source.name, dtype=getattr(torch, dtype)
    )
    tensors = {name: value.contiguous().clone() for name, value in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        tensors.pop("lm_head.weight", None)
    weights = aside / "model.safetensors"
    save_file(tensors, weights, metadata={"format": "pt"})
    weights.chmod(0o644)
    config = model.config.to_dict() | {"architectures": [type(model).__name__], "dtype": dtype}
    for name in ("quantization_config", "_name_or_path"):
        config.pop(name, None)
    (aside / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(aside)
    aside.rename(folder)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
