"""A small twin of a model: the same code and kinds of layers, with few and random numbers."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from kvq.cache.attention import PACKED_NAME
from kvq.errors import ModelError, first_lines
from kvq.models.modules import build_random, config_of, unquantized
from kvq.models.observed_states import StateWatch

CONTEXT = 256  # tokens
WINDOW = 16  # tokens, and of chunks
_LAYERS = ("num_hidden_layers", "num_layers")  # what configurations call their number
_KINDS = ("layer_types", "layers_block_type")  # and what each of them is
_NUMBERS = ("_idxs", "_indices", "_layer_ids")  # and lists of those of a kind
_MOST_LAYERS = 12
_SPREAD = 0.15  # of matrices, so large that attention is far from even
_SPREAD_OF_STATES = 0.1  # of models that keep states: recurrences amplify what is rounded
_DECAYS = (-3.5, -0.5)  # logarithms of a recurrence's, so slow that what is far back still counts
_MOST_VALUES = 50_000_000
_WIDTHS = {"hidden_size": 64, "intermediate_size": 80, "num_attention_heads": 4, "num_key_value_heads": 2}
_LATENT = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "v_head_dim": 12, "qk_head_dim": 24}
_STATE = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_head_dim": 64,
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "mamba_d_ssm": 128,
    "mamba_d_state": 16,
    "ssm_state_size": 16,
    "mamba_dt_rank": 8,
}
_SIZES = {
    "vocab_size": 199,
    "vocab_size_per_layer_input": 199,
    "hidden_size_per_layer_input": 8,
    "max_position_embeddings": CONTEXT,
    "moe_intermediate_size": 32,
    "ffn_hidden_size": 80,
    "expert_ffn_hidden_size": 32,
    "shared_expert_intermediate_size": 32,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "zero_expert_num": 2,
    "moe_topk": 2,
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
    try:
        for small in _smaller(config_of(unquantized(config))):
            try:
                model = _made(small)
            except Exception as error:  # noqa: BLE001 - whatever numbers that don't fit make the code raise
                errors.append(first_lines(error))
            else:
                return model
    except Exception as error:  # noqa: BLE001 - configurations that won't tell one number for all layers
        errors.append(first_lines(error))
    raise ModelError(
        f"kvq does not run {config['model_type']}: it is not among the families that were checked, and no "
        f"small one can be made to check it ({errors[0]})"
    )


def _made(config: Mapping[str, Any]) -> Any:
    """A model of random numbers, which was seen to run."""
    bare = build_random(config, torch.float32, torch.device("meta"))
    count = sum(parameter.numel() for parameter in bare.parameters())
    if count > _MOST_VALUES:
        raise ValueError(f"{count:,} parameters")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = build_random(config, torch.float32, torch.device("cpu")).eval()
        _draw(model)
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        model(input_ids=torch.tensor([[3, 4, 5]]), use_cache=False)
    model.set_attn_implementation(PACKED_NAME)
    return model


def _smaller(about: Any) -> Iterator[dict[str, Any]]:
    """Configs of less and less that is small, since not every family takes every size."""
    config, names = about.to_dict(), about.attribute_map

    def known(sizes: Mapping[str, int]) -> dict[str, int]:
        own = {names.get(name, name): size for name, size in sizes.items()}
        return {name: size for name, size in own.items() if type(config.get(name)) is int}

    short = _shorter(about, config, [names.get(_LAYERS[0], ""), *_LAYERS])
    short |= {name: WINDOW for name, value in config.items() if _is_reach(name, value)}
    small, narrow = short | known(_SIZES), known(_WIDTHS)
    if getattr(about, "num_key_value_heads", None) == getattr(about, "num_attention_heads", 0):
        narrow |= known({"num_key_value_heads": 4})
    states = known(_STATE)
    if "kv_lora_rank" in config:
        narrow |= known(_LATENT) | known({"qk_rope_head_dim": 8, "head_dim": 8})
    else:
        yield {**config, **small, **narrow, **states, **known({"head_dim": 16})}
    yield {**config, **small, **narrow, **states}
    yield {**config, **small, **narrow}
    yield {**config, **small}
    yield {**config, **short}


def _is_reach(name: str, value: object) -> bool:
    """Whether a field says how far a layer sees."""
    is_one = "window" in name or "chunk" in name
    return is_one and "layer" not in name and type(value) is int and value > WINDOW


def _shorter(about: Any, config: Mapping[str, Any], names: list[str]) -> dict[str, Any]:
    """The first layers, so many that all kinds of them are there. `names`: of their number, in the config."""
    kinds = [found for name in _KINDS if isinstance(found := getattr(about, name, None), list)]
    counted = [name for name in names if name in config]
    layers = config[counted[0]] if counted else len(kinds[0])
    lists = {key: value for key, value in config.items() if isinstance(value, list) and len(value) == layers}
    count = max([2, *(_until_all_kinds(value) for value in [*lists.values(), *kinds])])
    if count > _MOST_LAYERS:
        return {}
    tables = {key: _below(value, count) for key, value in config.items() if _is_by_layer(value)}
    numbers = {
        key: [number for number in value if number < count]
        for key, value in config.items()
        if key.endswith(_NUMBERS) and isinstance(value, list)
    }
    lists = {key: value[:count] for key, value in lists.items()}
    return dict.fromkeys(counted[:1], min(count, layers)) | lists | numbers | tables


def _is_by_layer(value: object) -> bool:
    """Whether a field names layers by their numbers."""
    return (
        isinstance(value, Mapping)
        and bool(value)
        and all(str(key).isdigit() for key in value)
        and all(isinstance(own, Mapping) for own in value.values())
    )


def _below(table: Mapping[Any, Any], count: int) -> dict[Any, Any]:
    return {key: value for key, value in table.items() if int(key) < count}


def _until_all_kinds(values: list[Any]) -> int:
    """How many of a list hold all values of it."""
    kinds = [str(value) for value in values]
    return 1 + max(kinds.index(kind) for kind in set(kinds))


@torch.no_grad()
def _draw(model: Any) -> None:
    """Random numbers for all parameters, so that nothing that a family does stays unnoticed."""
    spread = _SPREAD if StateWatch.of(model.config) is None else _SPREAD_OF_STATES
    for name, parameter in model.named_parameters():
        if name.endswith("A_log"):
            parameter.uniform_(*_DECAYS)
        elif parameter.ndim == 1:
            parameter.add_(torch.randn_like(parameter) * (1.0 if name.endswith("sinks") else 0.2))
        else:
            parameter.normal_(0, spread)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.add_(torch.randn_like(buffer) * 0.2)
