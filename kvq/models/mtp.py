"""Multi-token-prediction layer of a checkpoint, run by transformers' own code with kvq's attention.

This decoder layer takes the model's hidden state of one token together with the next token, and predicts the
token after that.

It uses the model's embedding, head and rotary angles. Sources: DeepSeek-AI 2024, "DeepSeek-V3 Technical
Report", section 2.2; Gloeckle et al. 2024, "Better & Faster Large Language Models via Multi-token
Prediction".
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from kvq.errors import ConfigError, KVQError, ModelError, first_lines
from kvq.formats import KVRecipe
from kvq.geometry import LayerGeometry, ModelGeometry
from kvq.layout import KVLayout, plan_layout
from kvq.models.describe.kwargs_bridge import hand_on_steps, pass_positions
from kvq.models.describe.modules import build_random, config_of, loading
from kvq.models.describe.text_part import is_whole, read_tensors
from kvq.models.loading.prepared import PreparedModel
from kvq.models.loading.weights import unmap
from kvq.models.model import Model
from kvq.models.parts.device import DTYPE_NAMES
from kvq.models.parts.latents import attach_expansions
from kvq.models.parts.linear import has_own_products, pack_linears
from kvq.models.parts.step import PackedStep

_REMEDY = "take the method ngram, self or draft"
_TOLD = re.compile(r"(^|\.)mtp[._]|(^|\.)layers\.\d+\.(eh_proj|enorm|hnorm)\.")  # tensor names of MTP layers


class MtpHead:  # D261: transformers' class, kvq's attention and blocks
    """A multi-token-prediction layer on its model's device, with its attention's geometry. See `load_mtp`."""

    def __init__(self, mtp: Any, prepared: PreparedModel, geometry: ModelGeometry) -> None:
        self.prepared = prepared  # the model's
        self.geometry = geometry
        self._mtp = mtp

    @cached_property
    def layout(self) -> KVLayout:
        """Block layout for this layer's K and V, in the model's dtype."""
        recipe = KVRecipe.named(DTYPE_NAMES[self.prepared.dtype], self.geometry.head_dims)
        return plan_layout(
            self.geometry, recipe, block_size=self.prepared.block_size, order=self.prepared.order
        )

    def hidden(self, tokens: Tensor, positions: Tensor, states: Tensor, step: PackedStep) -> Tensor:
        """Return the layer's hidden states after its final norm, [rows, hidden_size].

        `states`: hidden states of the tokens before `tokens`, after the final norm of the model or of this
        layer; `tokens`: int64 [rows], at `positions`.
        """
        made: Tensor = self._mtp.forward_layer(
            0, states[None], positions[None], None, input_ids=tokens[None], kvq_step=step
        )
        return made[0]

    def logits(self, states: Tensor) -> Tensor:
        """Return the model head's logits, [rows, vocab], for the token after each row of `states`."""
        logits: Tensor = self._mtp._project_to_logits(states[None])
        return logits[0]


@torch.inference_mode()
def load_mtp(model: Model) -> MtpHead:
    """Return the first multi-token-prediction layer of a loaded model's folder.

    Raises:
        ConfigError: the folder has no such layer, or none that transformers can build and kvq can run.
        ModelError: tensors of the layer are missing, unexpected, misshapen or damaged.
    """
    prepared = model.prepared
    count = check_mtp(prepared)
    config = model.weights.model.config.get_text_config()
    try:
        skeleton: Any = build_random(prepared.config, prepared.dtype, torch.device("meta"))
        mtp = _load(prepared, skeleton, count)
        mtp.tie_with_main_model(model.weights.model)
        del mtp.layers[1:]
        geometry = _geometry(model.geometry, config, mtp.config)
    except KVQError:
        raise
    except Exception as error:  # transformers may raise anything for an unfamiliar layer
        raise _not_made(prepared, first_lines(error)) from error
    _place(mtp.layers, prepared, geometry)
    return MtpHead(mtp.eval(), prepared, geometry)


def check_mtp(prepared: PreparedModel) -> int:
    """Return the number of multi-token-prediction layers in a model, 1 or more, without reading its weights.

    Raises:
        ConfigError: the model has no such layers, or stores them in a form that kvq can't read.
    """
    if prepared.is_quantized:
        raise ConfigError(
            f"speculation by heads reads multi-token-prediction layers as plain numbers, but "
            f"{prepared.folder} holds quantized weights; serve the unquantized model, or take the method "
            f"ngram or draft"
        )
    if is_whole(prepared.folder):
        raise ConfigError(
            f"speculation by heads is for text models, but {prepared.folder} reads images or sound too; "
            f"{_REMEDY}"
        )
    count = getattr(config_of(prepared.config), "num_mtp_layers", None)
    if type(count) is not int or count < 1:
        raise _has_none(prepared, count)
    return count


def _load(prepared: PreparedModel, skeleton: Any, count: int) -> Any:
    """Return transformers' module, loaded from the folder but not yet tied to the embedding and head."""
    from transformers.core_model_loading import convert_and_load_state_dict_in_model
    from transformers.modeling_layers import MtpModel
    from transformers.modeling_utils import LoadStateDictConfig
    from transformers.utils.generic import ContextManagers

    if not skeleton._keys_to_ignore_on_load_unexpected:
        raise _not_made(prepared, "it knows no names of theirs")
    theirs, stored = MtpModel.get_mtp_weights_regex(skeleton), read_tensors(prepared.folder)
    tensors = {name: stored[name] for name in stored if theirs.search(name)}
    if not tensors:
        raise _has_none(prepared, count)
    with loading():
        with ContextManagers(MtpModel.get_init_context(prepared.dtype, False, False, None)):
            mtp = MtpModel(skeleton, count)
        told = LoadStateDictConfig(
            weight_mapping=mtp.get_weight_conversions(skeleton),
            device_map={"": prepared.device},
            dtype=prepared.dtype,
            ignore_mismatched_sizes=True,
        )
        info, _ = convert_and_load_state_dict_in_model(model=mtp, state_dict=tensors, load_config=told)
        mtp._adjust_missing_and_unexpected_keys(info)
    _check_whole(prepared, info)
    return mtp


def _check_whole(prepared: PreparedModel, info: Any) -> None:
    folder, layers = prepared.folder, "multi-token-prediction layers"
    apart = f"config and weights don't belong together: correct them, or {_REMEDY}"
    if names := info.missing_keys:
        raise ModelError(
            f"{folder} lacks {len(names)} tensors of its {layers}, first {min(names)}; download it again, or "
            f"{_REMEDY}"
        )
    if names := info.unexpected_keys:
        raise ModelError(
            f"{folder} holds {len(names)} tensors that its {layers} have no place for, first {min(names)}; "
            f"{apart}"
        )
    if info.mismatched_keys:
        name, has, wanted = min(info.mismatched_keys)
        raise ModelError(
            f"{folder}/config.json gives {name} of its {layers} the shape {list(wanted)}, the weights "
            f"{list(has)}; {apart}"
        )
    if wrong := [*info.error_msgs, *info.conversion_errors]:
        raise ModelError(f"{layers} of {folder} can't be read: {wrong[0]}")


def _geometry(model: ModelGeometry, config: Any, own: Any) -> ModelGeometry:
    """Return the geometry of the layer's attention, copied from a main-model layer of the same kind."""
    kinds, mine = getattr(config, "layer_types", None), getattr(own, "layer_types", None)
    found = model.layers[-1]
    if kinds is not None and mine is not None:
        alike = [layer for layer in model.layers if kinds[layer.number] == mine[0]]
        found = alike[-1] if alike else replace(found, window=_window(mine[0], own))
    layer: LayerGeometry = replace(found, index=0, number=0, readers=())
    return replace(model, layers=(layer,), states=())


def _window(kind: str, config: Any) -> int | None:
    """Return the attention window, in tokens, for a kind of layer that the main model does not contain."""
    windows: Mapping[str, int | None] = {"full_attention": None, "sliding_attention": config.sliding_window}
    if kind not in windows:
        raise ConfigError(f"kvq runs no multi-token-prediction layer of the kind {kind!r}; {_REMEDY}")
    return windows[kind]


def _place(layers: nn.Module, prepared: PreparedModel, geometry: ModelGeometry) -> None:
    pass_positions(layers)
    hand_on_steps(layers)
    is_cpu = prepared.device.type == "cpu"
    packed = is_cpu and has_own_products(prepared.dtype, prepared.backend)
    attach_expansions(layers, geometry, prepared.dtype, packed=packed)
    if is_cpu:
        pack_linears(layers, backend=prepared.backend)
        unmap(layers)


def _has_none(prepared: PreparedModel, count: object) -> ConfigError:
    told = [entry.name for entry in prepared.entries if _TOLD.search(entry.name)]
    if told:
        return _not_made(prepared, f"the folder holds {len(told)} of their tensors, first {min(told)}")
    says = "says nothing of any" if count is None else f"says {count}"
    return ConfigError(
        f"speculation by heads needs the multi-token-prediction layers of a checkpoint, but "
        f"{prepared.folder} holds no tensors of such layers, and its config.json {says}; {_REMEDY}"
    )


def _not_made(prepared: PreparedModel, why: str) -> ConfigError:
    from transformers import __version__

    return ConfigError(
        f"transformers {__version__} makes no multi-token-prediction layers for "
        f"{prepared.geometry.model_type}, which speculation by heads needs: {why}; {_REMEDY}"
    )
