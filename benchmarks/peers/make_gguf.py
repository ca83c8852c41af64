"""Write the bench model as llama.cpp reads it: f32.gguf, q8_0.gguf and q4_0.gguf.

    PYTHON -m benchmarks.peers.make_gguf --model bench-model --out FOLDER

PYTHON: an interpreter with llama-cpp-python, gguf and safetensors. The files have no vocabulary: benchmarks
give and take token ids.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import gguf
import llama_cpp
import numpy as np
from safetensors.numpy import load_file

_QUANTIZED = {
    "q8_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0,
    "q4_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0,
}


def interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a Q or K projection in llama.cpp's order: the two that RoPE turns together are neighbours."""
    rows, columns = weight.shape
    halves = weight.reshape(heads, 2, rows // heads // 2, columns)  # [heads, half, pair, in_features]
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(rows, columns))


def write(model: Path, path: Path) -> None:
    """A Llama of fp32 safetensors, as it is."""
    config: dict[str, Any] = json.loads((model / "config.json").read_text(encoding="utf-8"))
    if config["model_type"] != "llama":
        raise SystemExit(f"this writes Llamas, and {model} is a {config['model_type']}")
    layers, heads, kv_heads = (
        config[key] for key in ("num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    )
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(layers)
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_tokenizer_model("none")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, layers)
    for name, weight in load_file(model / "model.safetensors").items():
        theirs = names.get_name(name, try_suffixes=(".weight",))
        if theirs is None:
            raise SystemExit(f"llama.cpp knows no tensor like {name}")
        for part, count in (("q_proj", heads), ("k_proj", kv_heads)):
            if part in name:
                weight = interleaved(weight, count)
        writer.add_tensor(theirs, weight.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    """Write, then quantize as llama.cpp does."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True, help="what tools/make_bench_model.py wrote")
    parser.add_argument("--out", type=Path, required=True, help="folder of the files")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    whole = options.out / "f32.gguf"
    write(options.model, whole)
    for kind, file_type in _QUANTIZED.items():
        parameters = llama_cpp.llama_model_quantize_default_params()
        parameters.ftype = file_type
        out = options.out / f"{kind}.gguf"
        if llama_cpp.llama_model_quantize(str(whole).encode(), str(out).encode(), parameters):
            raise SystemExit(f"llama.cpp could not write {out}")


if __name__ == "__main__":
    main()
