"""Export of every layer's per-tensor FP8 scales, in the file formats that other engines read."""

import json
from pathlib import Path

import torch
from safetensors.torch import save

from kvq import fileio
from kvq.calib.observe import Observations
from kvq.errors import ConfigError
from kvq.geometry import ModelGeometry

SUFFIXES = (".safetensors", ".json")


def check_export_path(path: str | Path) -> None:
    """Raise ConfigError if FP8 scales can't be written to `path`."""
    if Path(path).suffix not in SUFFIXES:
        raise ConfigError(
            f"FP8 scales go into {' or '.join(SUFFIXES)} files, got {path}: .safetensors holds k_scale "
            f"and v_scale of every layer as checkpoints do, .json one factor per layer, for "
            f"--quantization-param-path"
        )
    fileio.check_writable(path)


def write_fp8_scales(path: str | Path, observations: Observations, geometry: ModelGeometry) -> None:
    """Write per-tensor FP8 scales, where value = code * scale.

    `.safetensors`: `model.layers.N.self_attn.k_scale` and `v_scale`, fp32 [1], named as in
    compressed-tensors checkpoints with a static kv_cache_scheme. `.json`: the schema of KV-cache
    scaling factors that vLLM introduced and SGLang reads, with one factor for both K and V.
    """
    if Path(path).suffix == ".json":
        scales = _fp8_per_tensor(observations)
        factors = {str(index): max(layer.values()) for index, layer in enumerate(scales)}
        data = {
            "model_type": geometry.model_type,
            "kv_cache": {"dtype": "float8_e4m3fn", "scaling_factor": {"0": factors}},
        }
        fileio.write_text(path, json.dumps(data, indent=1) + "\n")
        return
    fileio.write_bytes(path, save(fp8_scale_tensors(observations)))


def fp8_scale_tensors(observations: Observations) -> dict[str, torch.Tensor]:
    """Return `model.layers.N.self_attn.k_scale` and `v_scale`, fp32 [1]: value = code * scale."""
    return {
        f"model.layers.{index}.self_attn.{part}_scale": torch.tensor([scale], dtype=torch.float32)
        for index, layer in enumerate(_fp8_per_tensor(observations))
        for part, scale in layer.items()
    }


def _fp8_per_tensor(observations: Observations) -> list[dict[str, float]]:
    """Return every layer's per-tensor FP8 scales, as in other engines: absmax over all heads / 448."""
    return [
        {part: max(float(layer[part].magnitudes.absmax.max()), 2.0**-100) / 448.0 for part in ("k", "v")}
        for layer in observations.layers
    ]
