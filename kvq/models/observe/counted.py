"""Parameter counts of transformers' own module, by how quantizers treat them and how tokens use them.

They are for families whose config.json does not suffice: the module is built on meta and inspected.
"""

import re
from collections import Counter
from pathlib import Path
from typing import Any

from torch import nn

from kvq.models.describe.modules import build_on_meta, unquantized
from kvq.models.describe.text_part import read_config
from kvq.models.observe.support import check_supported
from kvq.sizing.parameters import Matrix, ModelShape, Parameters

_LAYER = re.compile(r"\.layers\.(\d+)\.")
_MLP = re.compile(r"\.(mlp|mlps|feed_forward|ffn|moe|block_sparse_moe|shared\w*|experts)\.")
_ROUTER = re.compile(r"\.(gate|router|wg)$")
_EXPERTS = re.compile(r"\.experts\.")
_NARROWS = re.compile(r"\.(down_proj|w2|fc2|output_linear|dense_4h_to_h|c_proj)$")  # an MLP's last layer
_CHOSEN = ("num_experts_per_tok", "moe_topk", "top_k_experts")  # the number of experts per token
_CORRECTION = "e_score_correction_bias"  # a router's, which some families keep in a buffer


def count_module(model: Any) -> Parameters:
    """Count a module's parameters; those of a mixer without attention count as attention."""
    config = model.config.get_text_config(decoder=True)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    kinds: Counter[str] = Counter()
    inner: Counter[str] = Counter()  # inner width, keyed by layer
    matrices: list[Matrix] = []
    seen = {id(embedding.weight)}
    kinds["embedding"] = embedding.weight.numel()
    if head is not None and head.weight is not embedding.weight:
        kinds["head"] = head.weight.numel()
        seen.add(id(head.weight))
    for name, module in model.named_modules():
        layer, is_mlp = _LAYER.search(f".{name}."), bool(_MLP.search(f".{name}."))
        for key, parameter in module.named_parameters(recurse=False):
            if id(parameter) in seen:
                continue
            seen.add(id(parameter))
            count = parameter.numel()
            if isinstance(module, nn.Embedding):
                kinds["tables"] += count
            elif isinstance(module, nn.Linear) and key == "weight" and not _ROUTER.search(f".{name}"):
                kinds["mlp" if is_mlp else "attention"] += count
                kinds["outputs"] += module.out_features
                matrices.append((name, count, module.out_features))
                if is_mlp and _NARROWS.search(f".{name}") and layer is not None:
                    inner[layer[1]] += module.in_features
            elif parameter.ndim == 3 and _EXPERTS.search(f".{name}."):
                real = _real(config, parameter.shape[0])
                top = next(n for name in _CHOSEN if isinstance(n := getattr(config, name, None), int))
                chosen = top * real / (real + _without_weights(config))
                kinds["experts"] += count * real // parameter.shape[0]
                kinds["active_experts"] += round(count * chosen / parameter.shape[0])
                width, narrows = _width(config, parameter.shape[1:]), bool(_NARROWS.search(f".{key}"))
                rows = real * (parameter[0].numel() // width if narrows else width)
                kinds["expert_outputs"] += rows
                matrices += _of_experts(name, key, count * real // parameter.shape[0], rows)
                if narrows and layer is not None:
                    inner[layer[1]] += round(chosen * width)
            else:
                kinds["other"] += count
    kinds["other"] += sum(b.numel() for name, b in model.named_buffers() if name.endswith(_CORRECTION))
    return Parameters(**kinds, inner=max(inner.values(), default=0), matrices=tuple(matrices))


def _of_experts(name: str, key: str, count: int, rows: int) -> list[Matrix]:
    """Return the matrices of stacked experts under the names that unstacked experts would have."""
    own = ("gate_proj", "up_proj") if key == "gate_up_proj" else (key,)
    return [(f"{name}.0.{one}", count // len(own), rows // len(own)) for one in own]


def _without_weights(config: Any) -> int:
    """Return the number of experts that pass tokens on unchanged, as in LongCat."""
    return getattr(config, "zero_expert_num", None) or 0


def _real(config: Any, stacked: int) -> int:
    """Return how many of a module's `stacked` experts are stored in checkpoints."""
    others = _without_weights(config)
    return stacked - others if others and stacked > config.n_routed_experts else stacked


def _width(config: Any, last: tuple[int, int]) -> int:
    """Return an expert's inner width: the dimension of its last matrix other than the output."""
    handed_on = {config.hidden_size, getattr(config, "moe_latent_size", None)}
    return last[0] if last[1] in handed_on else last[1]


def read_shape(folder: Path) -> ModelShape:
    """Return the layers and parameters of a folder's model, from transformers' module built on meta.

    Raises:
        ModelError: kvq does not run the model; the message says why.
    """
    config = read_config(folder)
    geometry = check_supported(config, max_context=1, folder=folder)  # RoPE need not be pinned to count bytes
    counted = count_module(build_on_meta(folder, unquantized(config)))
    return ModelShape(config=config, geometry=geometry, parameters=counted)
