"""`adapter_config.json` of a PEFT folder: rank, scale and targets of a LoRA adapter."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import isfinite, sqrt
from pathlib import Path
from typing import Any

from kvq import strict_json
from kvq.errors import ModelError, first_lines

MAX_RANK = 256
_MAX_BYTES = 1 << 20
ALL_LINEAR = "all-linear"
_IGNORED = {  # matter only in training, or to PEFT's own loader
    *("task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode"),
    *("lora_dropout", "megatron_core", "qalora_group_size", "loftq_config", "eva_config", "corda_config"),
    *("lora_ga_config", "ensure_weight_tying"),
}
_KEPT_BASES = (True, False, "gaussian", "eva", "orthogonal")  # initializations that leave the base as it is
_CHOOSING = ("exclude_modules", "layers_to_transform", "layers_pattern")


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterConfig:
    """Settings of a LoRA adapter.

    `targets`: ends of the names of all layers that it changes; None: the layers whose tensors there are.
    `invocation`: token ids from whose last occurrence on the adapter acts (activated LoRA); None: everywhere.
    """

    rank: int
    alpha: float
    ranks: Mapping[str, int]  # of layers, by the ends of their names
    alphas: Mapping[str, float]
    is_rank_stabilized: bool
    targets: frozenset[str] | None
    is_partial: bool  # not all layers with these names have tensors
    invocation: tuple[int, ...] | None

    def rank_of(self, layer: str) -> int:
        """Return the rank of a layer's factors."""
        return next((rank for end, rank in self.ranks.items() if is_end(end, layer)), self.rank)

    def scale_of(self, layer: str) -> float:
        """Return alpha / rank, or alpha / sqrt(rank) if the adapter is rank-stabilized (rsLoRA)."""
        alpha = next((alpha for end, alpha in self.alphas.items() if is_end(end, layer)), self.alpha)
        rank = self.rank_of(layer)
        return alpha / (sqrt(rank) if self.is_rank_stabilized else rank)


def is_end(end: str, layer: str) -> bool:
    """Return True if `end` is a layer's name or its last parts, as in PEFT."""
    return layer == end or layer.endswith(f".{end}")


def read_config(path: Path) -> AdapterConfig:
    """Read `adapter_config.json`.

    Raises:
        ModelError: the file is missing or damaged, or kvq would run this kind of adapter incorrectly.
    """
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise ModelError(f"it may have {_MAX_BYTES} bytes")
        values = strict_json.read(path)
    except FileNotFoundError as error:
        raise ModelError(f"there is no {path.name}; is it a folder that PEFT wrote?") from error
    except OSError as error:
        raise ModelError(f"it can't be read: {error.strerror}") from error
    except ValueError as error:
        raise ModelError(f"it is not JSON ({first_lines(error)}); copy it again") from error
    if not isinstance(values, dict):
        raise ModelError(f"it must hold a JSON object, got {type(values).__name__}")
    return _parse(values)


def _parse(values: dict[str, Any]) -> AdapterConfig:
    if values.get("peft_type") != "LORA":
        raise ModelError(f"peft_type must be LORA, got {values.get('peft_type')!r}; other kinds are not run")
    targets, invocation = values.get("target_modules"), values.get("alora_invocation_tokens")
    config = AdapterConfig(
        rank=_rank(values.get("r"), "r"),
        alpha=_alpha(values.get("lora_alpha"), "lora_alpha"),
        ranks={end: _rank(x, f"rank_pattern[{end}]") for end, x in _pattern(values, "rank_pattern")},
        alphas={end: _alpha(x, f"alpha_pattern[{end}]") for end, x in _pattern(values, "alpha_pattern")},
        is_rank_stabilized=values.get("use_rslora") is True,
        targets=None if isinstance(targets, str) else _names(targets),  # D421: no pattern is run
        is_partial=any(values.get(key) for key in _CHOOSING),
        invocation=None if invocation is None else _tokens(invocation),
    )
    if (start := values.get("init_lora_weights", True)) not in _KEPT_BASES:
        raise ModelError(
            f"init_lora_weights {start!r} changes the base model's weights; convert it to plain LoRA with "
            f"PEFT's path_initial_model_for_weight_conversion"
        )
    read = {"peft_type", "target_modules", "alora_invocation_tokens", "r", "lora_alpha", "use_rslora"}
    known = read | _IGNORED | {"rank_pattern", "alpha_pattern", "init_lora_weights", *_CHOOSING}
    for key, value in values.items():
        if key not in known and value and (key, value) != ("bias", "none"):
            raise ModelError(f"{key}={value!r:.60} is not supported; train the adapter without it")
    return config


def _rank(value: object, what: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MAX_RANK:
        raise ModelError(f"{what} must be a rank of 1 to {MAX_RANK}, got {value!r:.60}")
    return value


def _alpha(value: object, what: str) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not isfinite(value):
        raise ModelError(f"{what} must be a finite number, got {value!r:.60}")
    return float(value)


def _pattern(values: dict[str, Any], key: str) -> Iterable[tuple[str, Any]]:
    found = values.get(key) or {}
    if not isinstance(found, dict):
        raise ModelError(f"{key} must be an object, got {found!r:.60}")
    for end in found:
        if not end.replace(".", "").replace("_", "").isalnum():
            raise ModelError(f"{key} holds the pattern {end!r:.60}; only names of layers are supported")
    return found.items()


def _names(value: object) -> frozenset[str]:
    if not isinstance(value, list) or not value or not all(isinstance(name, str) for name in value):
        raise ModelError(f"target_modules must be names, a pattern or {ALL_LINEAR!r}, got {value!r:.60}")
    return frozenset(value)


def _tokens(value: object) -> tuple[int, ...]:
    are_ids = isinstance(value, list) and all(isinstance(x, int) and 0 <= x < 1 << 32 for x in value)
    if not isinstance(value, list) or not are_ids or not value:
        raise ModelError(f"alora_invocation_tokens must be token ids, got {value!r:.60}")
    return tuple(value)
