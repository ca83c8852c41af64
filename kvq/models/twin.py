"""A small twin of a model: the same code and kinds of layers, with few and random numbers."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from kvq.errors import ModelError, first_lines
from kvq.models.modules import build_random, config_of

CONTEXT = 256  # tokens
WINDOW = 16  # tokens, and of chunks
_MOST_LAYERS = 12
_SPREAD = 0.15  # of matrices, so large that attention is far from even
_WIDTHS = {"hidden_size": 64, "intermediate_size": 80, "num_attention_heads": 4, "num_key_value_heads": 2}
_SIZES = {
    "vocab_size": 199,
    "max_position_embeddings": CONTEXT,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def build_twin(config: Mapping[str, Any]) -> Any:
    """A module in fp32 on the CPU, with kvq's attention, like the one that a config.json's dict describes.

    Raises:
        ModelError: none can be made.
    """
    errors = []
    for small in _smaller(config_of(config)):
        try:
            torch.manual_seed(0)
            model = build_random(small, torch.float32, torch.device("cpu")).eval()
        except Exception as error:  # noqa: BLE001 - whatever numbers that don't fit make the code raise
            errors.append(first_lines(error))
        else:
            _draw(model)
            return model
    raise ModelError(
        f"kvq does not run {config['model_type']}: it is not among the families that were checked, and no "
        f"small one can be made to check it ({errors[0]})"
    )


def _smaller(about: Any) -> Iterator[dict[str, Any]]:
    """Changes of a config.json's dict, first those that make most of it small; not every family takes them."""
    config, names = about.to_dict(), about.attribute_map

    def known(sizes: Mapping[str, int]) -> dict[str, int]:
        own = {names.get(name, name): size for name, size in sizes.items()}
        return {name: size for name, size in own.items() if type(config.get(name)) is int}

    short = _shorter(config, names.get("num_hidden_layers", "num_hidden_layers"))
    short |= {name: WINDOW for name, value in config.items() if _is_reach(name, value)}
    small, narrow = short | known(_SIZES), known(_WIDTHS)
    if getattr(about, "num_key_value_heads", None) == about.num_attention_heads:
        narrow |= known({"num_key_value_heads": 4})
    yield {**config, **small, **narrow, **known({"head_dim": 16})}
    yield {**config, **small, **narrow}
    yield {**config, **small}
    yield {**config, **short}


def _is_reach(name: str, value: object) -> bool:
    """Whether a field says how far a layer sees."""
    is_one = "window" in name or "chunk" in name
    return is_one and "layer" not in name and type(value) is int and value > WINDOW


def _shorter(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The first layers, so many that all kinds of them are there."""
    layers = config[name]
    lists = {key: value for key, value in config.items() if isinstance(value, list) and len(value) == layers}
    count = max([2, *(_until_all_kinds(value) for value in lists.values())])
    if count > _MOST_LAYERS:
        return {}
    return {name: min(count, layers)} | {key: value[:count] for key, value in lists.items()}


def _until_all_kinds(values: list[Any]) -> int:
    """How many of a list hold all values of it."""
    kinds = [str(value) for value in values]
    return 1 + max(kinds.index(kind) for kind in set(kinds))


@torch.no_grad()
def _draw(model: nn.Module) -> None:
    """Random numbers for all parameters, so that nothing that a family does stays unnoticed."""
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            parameter.add_(torch.randn_like(parameter) * (1.0 if name.endswith("sinks") else 0.2))
        else:
            parameter.normal_(0, _SPREAD)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.add_(torch.randn_like(buffer) * 0.2)
