"""Configuration of a model in GGUF files, as the dict that transformers' config.json would hold."""

import math
from collections.abc import Mapping
from struct import unpack
from typing import Any

from kvq.errors import ModelError
from kvq.formats.tensor_entry import TensorEntry
from kvq.models.gguf.architectures import Architecture, architecture_of
from kvq.models.gguf.vocabulary import CONTROL, ENDS

Tensors = Mapping[str, TensorEntry]
ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
SIZES = {
    "block_count": "num_hidden_layers", "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size", "attention.head_count": "num_attention_heads",
}  # fmt: skip
_THETA = 10_000.0  # of files that don't state it
# Keys that change results, with the values that don't; refused in architectures that don't read them
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attention.causal": (True,), "attention.clamp_kqv": (0,), "attention.max_alibi_bias": (0,),
    "attention.scale": (0,), "attention.sliding_window": (0,), "attention.temperature_scale": (0,),
    "attn_logit_softcapping": (0,), "embedding_scale": (0, 1), "expert_count": (0,),
    "final_logit_softcapping": (0,), "logit_scale": (0, 1), "residual_scale": (0, 1),
    "leading_dense_block_count": (0,), "nextn_predict_layers": (0,),
}  # fmt: skip
_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
_ORIGINAL = "rope.scaling.original_context_length"
_LOW, _HIGH = 1.0, 4.0  # factors of Llama 3's scaling; all models have these
_ORIGINS = tuple(1 << n for n in range(10, 21))  # context lengths before scaling
_CLOSE = 1e-4
_MOST_LAYERS = 10_000


def gguf_config(metadata: Mapping[str, Any], tensors: Tensors, where: str) -> dict[str, Any]:
    """Return the dict of a config.json; `tensors`: by their names in GGUF; `where`: the file, for messages.

    Raises:
        ModelError: kvq doesn't read the architecture, or a key is missing, unfit or not supported.
    """
    return _Config(metadata, tensors, where).whole()


class _Config:
    """Metadata of one file on the way to a config.json."""

    def __init__(self, metadata: Mapping[str, Any], tensors: Tensors, where: str) -> None:
        self.metadata, self.tensors, self.where = metadata, tensors, where
        self.own: Architecture = architecture_of(metadata, where)
        self.name = metadata["general.architecture"]

    def whole(self) -> dict[str, Any]:
        own, sizes = self.own, {field: self.count(key) for key, field in SIZES.items()}
        layers, _, hidden, heads = sizes.values()
        if layers > _MOST_LAYERS:
            raise self.unfit("block_count", f"may be up to {_MOST_LAYERS}, got {layers}")
        head_dim = self.count("attention.key_length", max(1, hidden // heads))
        self._check_understood(head_dim)
        is_fp32 = all(tensor.dtype == "F32" for tensor in self.tensors.values())
        config = {
            "model_type": own.model_type,
            **sizes,
            "intermediate_size": self.count("feed_forward_length", 0)
            or self.count("expert_feed_forward_length"),
            "num_key_value_heads": self.count("attention.head_count_kv", heads),
            "head_dim": head_dim,
            "vocab_size": self._tensor("token_embd.weight").shape[0],
            "tie_word_embeddings": "output.weight" not in self.tensors,
            "dtype": "float32" if is_fp32 else "bfloat16",
            **{field: self.number(key) for key, field in own.keys.items() if self.get(key) is not None},
            **{field: f"blk.0.{part}.bias" in self.tensors for part, field in own.biases.items()},
            **own.fixed,
            **self._tokens(),
            **self._windows(layers),
            **self._rope(head_dim),
        }
        if own.layers_of_largest:
            config["query_pre_attn_scalar"] = hidden // heads if layers == own.layers_of_largest else head_dim
        if own.model_type == "cohere":
            config["use_qk_norm"] = "blk.0.attn_q_norm.weight" in self.tensors
        return config

    def get(self, key: str) -> Any:
        """Return the value of a key of this architecture, or None."""
        return self.metadata.get(f"{self.name}.{key}")

    def unfit(self, key: str, why: str) -> ModelError:
        return ModelError(
            f"{self.where}: the key '{self.name}.{key}' {why}; take another copy, or the model as safetensors"
        )

    def count(self, key: str, default: int | None = None) -> int:
        """Return a whole number, also if it is listed for every layer."""
        value = self.get(key)
        if isinstance(value, list) and len(set(map(str, value))) == 1:
            value = value[0]
        if value is None and default is None:
            raise self.unfit(key, "is missing")
        value = default if value is None else value
        if type(value) is not int or value < 0 or (value == 0 and default != 0):
            raise self.unfit(
                key, f"must be a whole number above 0, the same for all layers, got {value!r:.80}"
            )
        return value

    def number(self, key: str) -> Any:
        value = self.get(key)
        if type(value) not in (int, float) or not math.isfinite(value):
            raise self.unfit(key, f"must be a number, got {value!r:.80}")
        return value

    def _tensor(self, name: str) -> TensorEntry:
        if name not in self.tensors:
            raise ModelError(f"{self.where} lacks tensor {name}; download it again, or take another copy")
        return self.tensors[name]

    def _check_understood(self, head_dim: int) -> None:
        """Raise ModelError if a key asks for something that the family's code would not do."""
        for key, neutral in _NEUTRAL.items():
            is_read = key in self.own.keys or (key == "attention.sliding_window" and self.own.has_windows)
            if not is_read and (value := self.get(key)) is not None and value not in neutral:
                raise self.unfit(
                    key, f"is {value!r:.80}, which kvq doesn't support in GGUF files of {self.name}"
                )
        if self.count("attention.value_length", head_dim) != head_dim:
            raise self.unfit("attention.value_length", f"must be attention.key_length, {head_dim}")

    def _windows(self, layers: int) -> dict[str, Any]:
        """Return the fields about sliding windows, with the layers that have one."""
        if not self.own.has_windows:
            return {}
        window = self.count("attention.sliding_window", 0) or None
        if self.own.model_type == "phi3":
            return {"sliding_window": window}
        pattern = self.get("attention.sliding_window_pattern") or self.own.pattern
        if type(pattern) is int and pattern > 0:
            pattern = [(i + 1) % pattern != 0 for i in range(layers)]
        if not isinstance(pattern, list) or len(pattern) < layers:
            raise self.unfit(
                "attention.sliding_window_pattern", f"must be a number or list all {layers} layers"
            )
        kinds = [
            "sliding_attention" if window and slides else "full_attention" for slides in pattern[:layers]
        ]
        return {"sliding_window": window, "layer_types": kinds}

    def _tokens(self) -> dict[str, Any]:
        """Return the ids of tokens that begin, end and pad texts."""
        keys = (*_END_KEYS, "bos_token_id", "padding_token_id")
        ids = {key: self.metadata.get(f"tokenizer.ggml.{key}") for key in keys}
        for key, i in ids.items():
            if i is not None and type(i) is not int:
                raise ModelError(f"{self.where}: 'tokenizer.ggml.{key}' must be a token's id, got {i!r:.80}")
        tokens = self.metadata.get("tokenizer.ggml.tokens") or []
        types = self.metadata.get("tokenizer.ggml.token_type") or []
        ends = [ids[key] for key in _END_KEYS if ids[key] is not None]
        if isinstance(tokens, list) and isinstance(types, list):
            both = enumerate(zip(tokens, types, strict=False))
            ends += [number for number, (text, kind) in both if kind == CONTROL and text in ENDS]
        return {
            "bos_token_id": ids["bos_token_id"],
            "eos_token_id": list(dict.fromkeys(ends)) or None,
            "pad_token_id": ids["padding_token_id"],
        }

    def _rope(self, head_dim: int) -> dict[str, Any]:
        """Return the fields about rotary positions."""
        dims = self.count("rope.dimension_count", head_dim)
        theta = self.number("rope.freq_base") if self.get("rope.freq_base") is not None else _THETA
        if theta <= 0:
            raise self.unfit("rope.freq_base", f"must be above 0, got {theta}")
        if dims > head_dim or (dims < head_dim and not self.own.is_partly_rotated):
            raise self.unfit("rope.dimension_count", f"is {dims}, and heads have {head_dim} numbers")
        rope: dict[str, Any] = {"rope_theta": theta, **self._scaling(theta, dims)}
        if self.own.is_partly_rotated:
            rope["partial_rotary_factor"] = dims / head_dim
        fields: dict[str, Any] = {"rope_parameters": rope}
        if self.own.model_type == "phi3" and self.get(_ORIGINAL) is not None:
            fields["original_max_position_embeddings"] = self.count(_ORIGINAL)
        if self.own.model_type in ("gemma3_text", "olmo3"):  # windows have their own, unscaled
            local = self.get("rope.freq_base_swa") or self.own.local_theta or theta
            sliding = {"rope_type": "default", "rope_theta": local}
            fields = {"rope_parameters": {"full_attention": rope, "sliding_attention": sliding}}
        return fields

    def _scaling(self, theta: float, dims: int) -> dict[str, Any]:
        kind, factor = self.get("rope.scaling.type") or "none", self.get("rope.scaling.factor")
        if (linear := self.get("rope.scale_linear")) is not None:  # in old files
            kind, factor = ("none" if linear == 1 else "linear"), linear
        if kind not in ("none", "linear", "yarn", "longrope"):
            raise self.unfit("rope.scaling.type", f"must be none, linear, yarn or longrope, got {kind!r:.80}")
        if "rope_factors_long.weight" in self.tensors:
            pairs = {name: self._floats(f"rope_factors_{name}.weight", dims) for name in ("long", "short")}
            return {"rope_type": "longrope", **{f"{name}_factor": values for name, values in pairs.items()}}
        if "rope_freqs.weight" in self.tensors:
            return self._llama3(self._floats("rope_freqs.weight", dims), theta, dims)
        if kind in ("none", "longrope"):
            return {"rope_type": "default"}
        if type(factor) not in (int, float):
            raise self.unfit("rope.scaling.factor", f"must be a number, got {factor!r:.80}")
        scaling: dict[str, Any] = {"rope_type": kind, "factor": float(factor)}
        if kind == "yarn":
            scaling["original_max_position_embeddings"] = self.count(_ORIGINAL)
            for key in ("attn_factor", "yarn_beta_fast", "yarn_beta_slow", "yarn_attn_factor"):
                if self.get(f"rope.scaling.{key}") is not None:
                    field = key.removeprefix("yarn_").replace("attn", "attention")
                    scaling[field] = float(self.number(f"rope.scaling.{key}"))
        return scaling

    def _floats(self, name: str, dims: int) -> list[float]:
        """Return the values of a small tensor, one for each pair of rotated dimensions."""
        tensor = self._tensor(name)
        if tensor.dtype != "F32" or tensor.shape != (dims // 2,):
            raise ModelError(
                f"{self.where}: {name} must be F32 of shape [{dims // 2}], got {tensor.dtype} of "
                f"{list(tensor.shape)}; take another copy"
            )
        with tensor.path.open("rb") as file:
            file.seek(tensor.begin)
            return list(unpack(f"<{dims // 2}f", file.read(tensor.end - tensor.begin)))

    def _llama3(self, factors: list[float], theta: float, dims: int) -> dict[str, Any]:
        """Return the parameters of Llama 3's scaling that lead to these factors of wavelengths."""
        if all(abs(one - 1) < _CLOSE for one in factors):
            return {"rope_type": "default"}
        waves = [2 * math.pi * theta ** (2 * i / dims) for i in range(dims // 2)]
        factor = round(max(factors), 4)
        for original in _ORIGINS if 1 <= factor < math.inf else ():
            made = (llama3_factor(wave, factor, original) for wave in waves)
            if all(abs(one - own) <= _CLOSE * own for one, own in zip(made, factors, strict=True)):
                return {
                    "rope_type": "llama3", "factor": factor, "original_max_position_embeddings": original,
                    "low_freq_factor": _LOW, "high_freq_factor": _HIGH,
                }  # fmt: skip
        raise ModelError(
            f"{self.where}: rope_freqs.weight scales RoPE in a way that kvq doesn't know; take the model as "
            f"safetensors"
        )


def llama3_factor(wave: float, factor: float, original: int) -> float:
    """Return by what Llama 3's scaling divides a frequency, given its wavelength in tokens."""
    smooth = min(max((original / wave - _LOW) / (_HIGH - _LOW), 0.0), 1.0)
    return 1 / ((1 - smooth) / factor + smooth)
