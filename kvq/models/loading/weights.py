"""A loaded model: transformers' own module with kvq's attention, adapted to its device."""

import logging
from functools import cache, cached_property
from typing import Any

import torch
from torch import nn

from kvq.cache.memory import held_bytes
from kvq.errors import ModelError
from kvq.geometry import ModelGeometry
from kvq.models.describe.kwargs_bridge import hand_on_steps, pass_positions
from kvq.models.describe.modules import import_class, load_module, pin_rope
from kvq.models.describe.resolve import ModelSource, hub_name
from kvq.models.describe.text_part import is_whole
from kvq.models.loading.fused_layers import FusedPass, is_fused
from kvq.models.loading.prepared import PreparedModel
from kvq.models.loading.quantized import load_quantized, load_rounded
from kvq.models.loading.skeleton import build_skeleton, check_runs, fill
from kvq.models.parts.device import pick_dtype
from kvq.models.parts.latents import attach_expansions
from kvq.models.parts.linear import has_own_products, invariant_rows, pack_linears, padded_rows
from kvq.models.parts.norms import fuse_norms
from kvq.models.parts.states import cut_states
from kvq.sizes import decimal
from kvq.weights.manifest import manifest_path, read_manifest, verify_manifest

_log = logging.getLogger("kvq")


class LoadedWeights:
    """The weights of one model on one device, returned by `load_weights`."""

    def __init__(self, prepared: PreparedModel, model: Any, *, held_bytes: int = 0):
        self.prepared = prepared
        self.model = model
        self.held_bytes = held_bytes  # growth of the device's used memory during loading

    @property
    def geometry(self) -> ModelGeometry:
        return self.prepared.geometry

    @property
    def device(self) -> torch.device:
        return self.prepared.device

    @property
    def max_context(self) -> int:
        return self.prepared.max_context

    @property
    def digest(self) -> str:
        return self.prepared.digest

    def step_rows(self, count: int) -> int:
        """Return the number of rows to pad `count` tokens to, so that results don't depend on the batch."""
        return padded_rows(max(count, self._fewest_rows[0])) if self._fewest_rows[0] else count

    def logit_rows(self, count: int) -> int:
        """Return the number of rows to pad `count` rows of logits to."""
        return padded_rows(max(count, self._fewest_rows[1])) if self._fewest_rows[1] else count

    def forget_rows(self) -> None:
        """Discard the cached padding and fused pass after layers have been replaced."""
        self.__dict__.pop("_fewest_rows", None)
        self.__dict__.pop("fused_pass", None)

    @cached_property
    def fused_pass(self) -> FusedPass | None:
        """Fused pass through the model on a CPU; None if no fused pass gives the same results."""
        return FusedPass.of(self.model) if self.device.type == "cpu" else None

    @cached_property
    def _fewest_rows(self) -> tuple[int, int]:
        """Return the minimum numbers of rows of a step and of its logits; 0 means no padding."""
        if self.device.type != "cpu":
            return 0, 0
        body, head = invariant_rows(self.model, self.model.get_output_embeddings())
        return (0 if is_fused(self.model) else body), head


def load_weights(prepared: PreparedModel) -> LoadedWeights:
    """Load a prepared model from safetensors only, without code from its folder, checking every tensor.

    Raises:
        ModelError: the model is damaged, incomplete or unsupported; the message says which and why.
        ConfigError: the weight format's groups don't divide a layer's inputs.
    """
    folder, where, backend = prepared.folder, prepared.device, prepared.backend
    is_listed = read_manifest(folder) if prepared.is_gguf else verify_manifest(folder)  # `prepare` read GGUF
    if not is_listed and prepared.is_quantized:
        _say_unverified(prepared.source)
    skeleton = build_skeleton(prepared)
    import_class(prepared.config)
    _log.info("loading weights, %s", decimal(prepared.stored_bytes))
    prepared.begin_digest()
    before = held_bytes(where)
    is_own = where.type == "cpu" and has_own_products(prepared.dtype, backend)
    if prepared.is_quantized and not prepared.is_gguf:
        model = load_quantized(folder, prepared.config, prepared.dtype, where, backend=backend)
    elif prepared.rounded_to is not None:
        model = load_rounded(folder, prepared.dtype, prepared.rounded_to, where, backend=backend)
    else:
        fills = is_own or prepared.is_gguf
        model = fill(*skeleton, prepared, packs=is_own) if fills and skeleton is not None else None
        model = load_module(folder, prepared.dtype) if model is None else model
    return settle(prepared, model, before)


def settle(prepared: PreparedModel, model: Any, before: int) -> LoadedWeights:
    """Move a module to its device and adapt it to kvq; `before`: bytes used on the device before loading.

    Raises:
        ModelError: kvq would run the model incorrectly.
    """
    where = prepared.device
    check_runs(model, prepared)
    model = place(model, prepared)
    return LoadedWeights(prepared, model, held_bytes=held_bytes(where) - before)


def place(model: Any, prepared: PreparedModel) -> Any:
    """Move a model to its device, prepare it for running, and return it."""
    model = adapt(model, prepared)
    if prepared.device.type == "cpu":
        _log.info("packing weights")
        pack_linears(model, backend=prepared.backend)
        fuse_norms(model)
        unmap(model)
    return model


def adapt(model: Any, prepared: PreparedModel) -> Any:
    """Adapt a model to kvq and move it to its device; it still computes with its own modules."""
    pin_rope(model, prepared.max_context)
    pass_positions(model)
    hand_on_steps(model)
    cut_states(model, prepared.geometry)
    model = model.to(prepared.device).eval()
    packed = prepared.device.type == "cpu" and has_own_products(prepared.dtype, prepared.backend)
    attach_expansions(model, prepared.geometry, prepared.dtype, packed=packed)
    return model


@cache  # once per process
def _say_unverified(source: ModelSource) -> None:
    """Warn that a flipped bit in the codes would go unnoticed."""
    remedy = f"`kvq manifest {source.folder}` writes one"
    if (name := hub_name(source.folder)) is not None:
        remedy = f"`hf cache verify {name}` compares its files with the hub's"
    manifest = manifest_path(source.folder).name
    _log.warning(
        "%s has quantized weights and no %s, so flipped bits can't be found; %s", source, manifest, remedy
    )


def load_plain(prepared: PreparedModel, *, dtype: str = "auto") -> Any:
    """Return the unchanged transformers model on the CPU, with its own attention and plain Linear layers.

    It is meant for code that changes weights, such as quantizers, not for serving. `dtype="auto"` means the
    checkpoint's dtype. The checks are the same as in `load_weights`.

    Raises:
        ModelError: the model is damaged, incomplete or unsupported; the message says which and why.
        ConfigError: the dtype is unknown.
    """
    if prepared.is_quantized:
        raise ModelError(f"{prepared.folder} is quantized already; take an unquantized copy")
    if is_whole(prepared.folder):
        raise ModelError(
            f"{prepared.folder} reads images or sound too; weights of text models can be changed"
        )
    geometry = prepared.geometry
    verify_manifest(prepared.folder)
    build_skeleton(prepared)
    exact = geometry.softcap is not None or geometry.has_sinks  # torch's SDPA ignores both
    picked = "auto" if dtype == "auto" else pick_dtype(dtype, torch.device("cpu"), prepared.config)
    return load_module(prepared.folder, picked, attention="eager" if exact else "sdpa").eval()


def unmap(model: nn.Module) -> None:
    """Copy parameters that still map the checkpoint: a small tensor would keep an entire file resident."""
    for parameter in model.parameters():
        if not parameter.is_mkldnn and parameter.untyped_storage().nbytes() > parameter.nbytes:
            parameter.data = parameter.data.clone()
