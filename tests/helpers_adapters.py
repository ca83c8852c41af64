"""LoRA adapters as PEFT saves them, random, and transformers' models with their updates merged in."""

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

PREFIX, WEIGHTS, CONFIG = "base_model.model.", "adapter_model.safetensors", "adapter_config.json"


def linears(model: Any) -> dict[str, tuple[int, int]]:
    """Inputs and outputs of all Linear layers of transformers' model except its head."""
    head = model.get_output_embeddings()
    found = {
        name: own for name, own in model.named_modules() if isinstance(own, nn.Linear) and own is not head
    }
    return {name: (own.in_features, own.out_features) for name, own in found.items()}


def save_adapter(
    folder: Path, shapes: Mapping[str, tuple[int, int]], *, seed: int = 0, rank: int = 4, **config: Any
) -> Path:
    """Save a random adapter of the layers in `shapes`; `config`: more of its adapter_config.json."""
    generator = torch.Generator().manual_seed(seed)
    ranks, tensors = config.get("rank_pattern", {}), {}
    for name, (inputs, outputs) in shapes.items():
        own = next((r for end, r in ranks.items() if name.endswith(end)), rank)
        tensors[f"{PREFIX}{name}.lora_A.weight"] = torch.randn(own, inputs, generator=generator) / inputs**0.5
        tensors[f"{PREFIX}{name}.lora_B.weight"] = torch.randn(outputs, own, generator=generator) * 0.3
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / WEIGHTS)
    targets = sorted({name.rpartition(".")[2] for name in shapes})
    given = {"peft_type": "LORA", "r": rank, "lora_alpha": 6, "target_modules": targets, "bias": "none"}
    (folder / CONFIG).write_text(json.dumps(given | config))
    return folder


def ending(shapes: Mapping[str, tuple[int, int]], ends: Iterable[str]) -> dict[str, tuple[int, int]]:
    """Those of the layers whose names end so."""
    return {name: shape for name, shape in shapes.items() if name.rpartition(".")[2] in ends}


@torch.no_grad()
def merge(model: Any, folder: Path) -> Any:
    """Add an adapter's updates to the weights of transformers' model, as PEFT merges them; return it."""
    config = json.loads((folder / CONFIG).read_text())
    tensors = load_file(folder / WEIGHTS)
    for key in sorted(tensors):
        name = key.removeprefix(PREFIX).removesuffix(".lora_A.weight")
        if not key.endswith("lora_A.weight"):
            continue
        a: Tensor = tensors[key]
        b: Tensor = tensors[f"{PREFIX}{name}.lora_B.weight"]
        patterns = config.get("alpha_pattern", {})
        alpha = next((x for end, x in patterns.items() if name.endswith(end)), config["lora_alpha"])
        scale = alpha / (math.sqrt(len(a)) if config.get("use_rslora") else len(a))
        model.get_submodule(name).weight += scale * b.float() @ a.float()
    return model
