"""A tiny copy of a model, with the same code and kinds of layers, but few and random values."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from kvq.cache.transformers.attention import PACKED_NAME
from kvq.errors import ModelError, first_lines
from kvq.models.describe.modules import build_random, config_of, unquantized
from kvq.models.observe.states import StateWatch

CONTEXT = 256  # tokens
WINDOW = 16  # tokens, for windows and chunks
_LAYERS = ("num_hidden_layers", "num_layers")  # config names of the number of layers
_KINDS = ("layer_types", "layers_block_type")  # config names of the list of layer kinds
_NUMBERS = ("_idxs", "_indices", "_layer_ids")  # suffixes of lists of layer numbers
_REACHES = (  # parts of the names of fields for context reach
    *("window", "chunk", "sliding", "span", "local_", "distance", "recent", "prefix", "keep", "attn_block"),
    *("start_size", "floor_scale", "train_length", "index_topk", "index_block", "original_max_position"),
)
_READERS = "num_kv_shared_layers"  # number of the last layers, which store no K and V
_MOST_LAYERS = 12
_SPREAD = 0.15  # standard deviation of matrices, so large that attention is far from uniform
_SPREAD_OF_STATES = 0.1  # the same for models that keep states: recurrences amplify rounding errors
_ADDS = re.compile(r"post_\w*norm\b")  # norms of what layers add to the residual
_ADDED = 0.3  # factor for these norms: if layers add as much as the residual has, rounding errors grow
_DECAYS = {"A_log": (-3.5, -0.5), "dt_bias": (-4.0, -1.0)}  # slow, so that distant tokens still count
_MOST_VALUES = 50_000_000
_WIDTHS = {"hidden_size": 64, "intermediate_size": 80, "num_attention_heads": 4, "num_key_value_heads": 2}
_LATENT = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "v_head_dim": 12, "qk_head_dim": 24}
_STATE = {
    **dict.fromkeys(("linear_num_key_heads",), 2),
    **dict.fromkeys(("linear_num_value_heads", "linear_num_heads"), 4),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads", "mamba_dt_rank"), 8),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "linear_head_dim"), 16),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim", "mamba_d_state", "ssm_state_size"), 16),
    "mamba_d_ssm": 128,
}
_SIZES = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), 199),
    "hidden_size_per_layer_input": 8,
    "max_position_embeddings": CONTEXT,
    **dict.fromkeys(("intermediate_size_mlp", "ffn_hidden_size"), 80),
    **dict.fromkeys(("moe_intermediate_size", "expert_ffn_hidden_size"), 32),
    "shared_expert_intermediate_size": 32,
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "zero_expert_num", "moe_topk"), 2),
    **dict.fromkeys(("first_k_dense_replace", "n_group", "topk_group"), 1),
    **{"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
}


def build_tiny_copy(config: Mapping[str, Any], fewest: int = 2) -> Any:
    """Return a small fp32 copy of the module that `config` describes, on the CPU and with kvq's attention.

    `fewest`: minimum number of layers; there are more if the config lists more kinds of layers.

    Raises:
        ModelError: no small copy can be built.
    """
    errors = []
    try:
        for small in map(in_sections, smaller(config_of(unquantized(config)), fewest)):
            try:
                model = _made(small)
            except Exception as error:  # noqa: BLE001 - the code may raise anything for unfit sizes
                errors.append(first_lines(error))
            else:
                return model
    except Exception as error:  # noqa: BLE001 - some configurations have no single value for all layers
        errors.append(first_lines(error))
    raise ModelError(
        f"kvq does not run {config['model_type']}: no small one can be made to check it ({errors[0]})"
    )


def _made(config: Mapping[str, Any]) -> Any:
    """Return a randomly initialized model that has passed a trial run."""
    bare = build_random(config, torch.float32, torch.device("meta"))
    count = sum(parameter.numel() for parameter in bare.parameters())
    if count > _MOST_VALUES:
        raise ValueError(f"{count:,} parameters")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = build_random(config, torch.float32, torch.device("cpu")).eval()
        draw(model)
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        model(input_ids=torch.tensor([[3, 4, 5]]), use_cache=False)
    model.set_attn_implementation(PACKED_NAME)
    return model


def smaller(about: Any, fewest: int = 2) -> Iterator[dict[str, Any]]:
    """Yield configs with fewer and fewer sizes reduced, since not every family accepts every reduction."""
    config, names = about.to_dict(), about.attribute_map

    def known(sizes: Mapping[str, int]) -> dict[str, Any]:
        own = {names.get(name, name): size for name, size in sizes.items()}
        one: dict[str, Any] = {name: size for name, size in own.items() if type(config.get(name)) is int}
        one |= {name: min(one[name], config[name]) for name in one if name == "num_experts_per_tok"}
        of_layers = {name: size for name, size in own.items() if _is_sizes(short.get(name))}
        return one | {name: [size] * len(short[name]) for name, size in of_layers.items()}

    short = _shorter(about, config, [names.get(_LAYERS[0], ""), *_LAYERS], fewest)
    short |= _reaching_less(config)
    small, narrow = short | known(_SIZES), known(_WIDTHS)
    if getattr(about, "num_key_value_heads", None) == getattr(about, "num_attention_heads", 0):
        narrow |= known({"num_key_value_heads": 4})
    states = known(_STATE)
    if "kv_lora_rank" in config:
        narrow |= known(_LATENT) | known({"qk_rope_head_dim": 8, "head_dim": 8})
    else:
        heads = known({"head_dim": 16}) | _with_heads({**config, **short}, 32)
        yield {**config, **small, **narrow, **states, **heads}
    yield {**config, **small, **narrow, **states}
    yield {**config, **small, **narrow}
    yield {**config, **small}
    yield {**config, **short}


def in_sections(config: dict[str, Any]) -> dict[str, Any]:
    """Return a config with its mRoPE sections, if any, scaled to the number of rotated pairs."""
    rope = config.get("rope_parameters")
    sections = rope.get("mrope_section") if isinstance(rope, Mapping) else None
    if not isinstance(rope, Mapping) or not isinstance(sections, list):
        return config
    dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    pairs = int(dim * rope.get("partial_rotary_factor", 1.0)) // 2
    own = [max(1, pairs * section // sum(sections)) for section in sections]
    own[0] += pairs - sum(own)
    return {**config, "rope_parameters": {**rope, "mrope_section": own}}


def _with_heads(config: Mapping[str, Any], dim: int) -> dict[str, Any]:
    """Return the config's per-layer tables with head dimension `dim`."""
    return {
        key: {
            number: {**own, **({"head_dim": dim} if "head_dim" in own else {})}
            for number, own in table.items()
        }
        for key, table in config.items()
        if _is_by_layer(table)
    }


def _is_sizes(value: object) -> bool:
    """Return True if a field is a list of sizes, one per layer."""
    return isinstance(value, list) and bool(value) and all(type(size) is int for size in value)


def _reaching_less(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return reduced values of fields that limit context reach, also in objects such as rope_parameters."""
    less: dict[str, Any] = {name: WINDOW for name, value in config.items() if _is_reach(name, value)}
    for name, value in config.items():
        if isinstance(value, Mapping) and (inner := _reaching_less(value)):
            less[name] = {**value, **inner}
    return less


def _is_reach(name: object, value: object) -> bool:
    """Return True if a field limits how far a layer sees, or sets a position that changes its behaviour."""
    name = str(name)
    is_one = any(part in name for part in _REACHES) and "layer" not in name and not name.startswith("num_")
    return is_one and isinstance(value, int | float) and value > WINDOW


def _shorter(about: Any, config: Mapping[str, Any], names: list[str], fewest: int) -> dict[str, Any]:
    """Return fields that keep just enough leading layers for all kinds; `names`: layer count fields."""
    kinds = [found for name in _KINDS if isinstance(found := getattr(about, name, None), list)]
    counted = [name for name in names if name in config]
    layers = config[counted[0]] if counted else len(kinds[0])
    named = {key: value for key, value in config.items() if isinstance(value, list)}
    numbered = {key for key, value in named.items() if key.endswith(_NUMBERS) or value == list(range(layers))}
    lists = {key: value for key, value in named.items() if len(value) == layers and key not in numbered}
    shares = bool(config.get(_READERS))  # twice as many layers, of the same kinds
    of_all, of_kinds = (
        [_until_all_kinds(value) for value in found] for found in ([*lists.values(), *kinds], kinds)
    )
    least = min(max(2, fewest // (1 + shares)), layers)
    count = max([least, *(of_kinds if shares else of_all)])
    sharing = {_READERS: count} if shares else {}
    count *= 1 + shares
    if count > _MOST_LAYERS:
        return {}
    tables = {
        key: {number: own for number, own in value.items() if int(number) < count}
        for key, value in config.items()
        if _is_by_layer(value)
    }
    numbers = {key: [number for number in named[key] if number < count] for key in numbered}
    lists = {key: value[:count] for key, value in lists.items()}
    return dict.fromkeys(counted[:1], min(count, layers)) | lists | numbers | tables | sharing


def _is_by_layer(value: object) -> bool:
    """Return True if a field maps layer numbers to objects."""
    return (
        isinstance(value, Mapping)
        and bool(value)
        and all(str(key).isdigit() for key in value)
        and all(isinstance(own, Mapping) for own in value.values())
    )


def _until_all_kinds(values: list[Any]) -> int:
    """Return the length of a list's shortest prefix that contains all its distinct values."""
    kinds = [str(value) for value in values]
    return 1 + max(kinds.index(kind) for kind in set(kinds))


@torch.no_grad()
def draw(model: Any) -> None:
    """Fill all parameters with random values, so that every operation of a family affects the results."""
    spread = _SPREAD if StateWatch.of(model.config) is None else _SPREAD_OF_STATES
    for name, parameter in model.named_parameters():
        if (last := name.rpartition(".")[2]) in _DECAYS:
            parameter.uniform_(*_DECAYS[last])
        elif parameter.ndim == 1:
            parameter.add_(torch.randn_like(parameter) * (1.0 if name.endswith("sinks") else 0.2))
            if _ADDS.search(name):
                parameter.mul_(_ADDED)
        else:
            parameter.normal_(0, spread)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.add_(torch.randn_like(buffer) * 0.2)
