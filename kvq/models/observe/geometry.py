"""Geometry of a model from an unlisted family, observed while its code runs on the meta device.

Nothing is guessed from field names: a layer passes the same arguments to the observed attention as to kvq's.
"""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypedDict, Unpack

import torch
from torch import Tensor, nn
from torch.distributions import Distribution
from torch.utils._python_dispatch import TorchDispatchMode

from kvq.errors import ConfigError, ModelError, first_lines
from kvq.geometry import LayerGeometry, ModelGeometry, StateGeometry
from kvq.geometry.parse import CHUNK_KEY, MAX_CONTEXT
from kvq.models.describe.config_values import check_values
from kvq.models.describe.kwargs_bridge import hand_on_steps
from kvq.models.describe.modules import build_on_meta, default_config, quiet_logs, unquantized
from kvq.models.observe.latents import Product, latent_dims
from kvq.models.observe.states import StateWatch
from kvq.models.observe.tiny_copy import build_tiny_copy

_log = logging.getLogger("kvq")
_NAME = "kvq_observed"
_CHUNKED = "chunked_attention"  # a kind of layer
# D194: indexers are refused by name; small models see all keys
_SELECTS = "Indexer"  # part of the class names of modules that select keys
_TOKENS = 7
_TAKEN = {"scaling", "softcap", "s_aux", "sliding_window", "kvq_step"}  # used by kvq's attention
_HARMLESS = {"position_ids", "cache_position", "use_cache", "dropout", "output_router_logits"}


class _Passed(TypedDict, total=False):
    """Keyword arguments of attention that kvq recognizes."""

    softcap: float | None
    s_aux: Tensor | None
    sliding_window: int | None
    is_causal: bool | None
    kvq_step: "_Watch"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Call:
    """One recorded attention call."""

    layer: int
    stored: LayerGeometry  # latents, if K and V are expanded from some; its index is set later
    q_heads: int
    softcap: float | None
    has_sinks: bool
    states: tuple[Tensor, Tensor]  # K and V

    def shares_with(self, other: "_Call") -> bool:  # D204: the same tensors, compared by `is`
        """Return True if the call attends over the same K and V tensors as an earlier call."""
        return all(a is b for a, b in zip(self.states, other.states, strict=True))


@dataclass(slots=True, eq=False)
class _Watch:
    """Attention calls in order, the Linear layers' results before each, and modules that keep states."""

    about: Any  # the model's configuration
    states: StateWatch | None
    calls: list[_Call] = field(default_factory=list)
    products: list[Product] = field(default_factory=list)  # since the last call

    @contextmanager
    def modules(self) -> Iterator[None]:
        """Record the modules that run, and Linear layers' results, while the context is open."""

        def note(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
            if isinstance(module, nn.Linear) and isinstance(output, Tensor):
                self.products.append((module, inputs[0], output))

        hook = nn.modules.module.register_module_forward_hook(note)
        try:
            with nullcontext() if self.states is None else self.states.modules():
                yield
        finally:
            hook.remove()


def observed_geometry(config: Mapping[str, Any], folder: Path) -> ModelGeometry:
    """Return the geometry of the model that a config.json's dict describes, by running its code.

    Raises:
        ModelError: the model can't be built or run, or kvq doesn't support its kind of attention.
    """
    check_values(folder, config, MAX_CONTEXT)
    try:
        default_config(config)
    except (KeyError, ValueError) as error:
        why = "it is not among the families that were checked, and transformers has no code for it to check"
        raise refusal(config.get("model_type"), why) from error
    model: Any = build_on_meta(folder, unquantized(config))
    model = model.to(torch.bfloat16)  # so that states with a fixed dtype stand out
    if model._can_set_experts_implementation():
        model.set_experts_implementation("eager")  # supports all shapes
    with on_meta():
        found = observe(model)
    if any(layer.is_latent for layer in found.layers) and not _has_latents(config):
        _log.warning(
            "%s seems to multiply K and V out from latents, but a small one of it holds other numbers; K and "
            "V of every head are stored",
            found.model_type,
        )
        return found.expanded()
    return found


def _has_latents(config: Mapping[str, Any]) -> bool:
    """Return True if K and V in a tiny copy of the model equal the values that its latents expand to."""
    try:
        small = observe(build_tiny_copy(config))
    except ModelError:  # the proof will report it
        return True
    return any(layer.is_latent for layer in small.layers)


def observe(model: Any) -> ModelGeometry:
    """Run a module on its device and return its geometry.

    Raises:
        ModelError: kvq doesn't support the module's kind of attention.
    """
    from transformers import AttentionInterface

    about = model.config
    if not can_replace_attention(model):
        raise _refusal(model, "its code computes attention itself, which kvq can't replace")
    # A module that selects keys takes all keys of a short context, so a small model doesn't reveal it
    names = (type(module).__name__ for module in model.modules())
    if selector := next((name for name in names if _SELECTS in name), None):
        why = f"its layers select keys with an indexer ({selector}): sparse attention"
        raise _refusal(model, why)
    AttentionInterface.register(_NAME, _observed)
    hand_on_steps(model)
    watch = _Watch(about.get_text_config(decoder=True), StateWatch.of(about))
    device = next(model.parameters()).device
    before = about._attn_implementation
    positions = torch.arange(_TOKENS, device=device)[None]
    model.set_attn_implementation(_NAME)
    try:
        with torch.inference_mode(), quiet_logs("transformers"), device, watch.modules():
            model(
                input_ids=torch.zeros_like(positions),
                position_ids=positions,
                use_cache=False,
                kvq_step=watch,
                **({} if watch.states is None else {"past_key_values": watch.states.cache}),
            )
        states = () if watch.states is None else watch.states.states()
    except (ModelError, ConfigError) as error:
        raise _refusal(model, str(error)) from error
    except Exception as error:  # code that needs values may raise anything
        what = "run without values" if "meta" in str(error) else "run with token ids and positions alone"
        why = f"its code can't be {what} ({first_lines(error)})"
        raise _refusal(model, why) from error
    finally:
        model.set_attn_implementation(before)
    return _geometry_of(model, watch.calls, states)


def can_replace_attention(model: Any) -> bool:
    """Return True if a model's code looks up its attention function, so that it can be replaced."""
    can: bool = type(model)._can_set_attn_implementation()
    return can


def refusal(model_type: object, why: str) -> ModelError:
    """Return the error that says why a model is not supported."""
    return ModelError(f"kvq does not run {model_type or 'this model'}: {why} (by its config.json)")


def _refusal(model: Any, why: str) -> ModelError:
    return refusal(model.config.model_type, why)


def _geometry_of(model: Any, calls: list[_Call], states: tuple[StateGeometry, ...]) -> ModelGeometry:
    about = model.config.get_text_config(decoder=True)
    found = [call.layer for call in calls]
    layers = getattr(about, "num_hidden_layers", len(set(found)))
    if not found:
        raise _refusal(model, "none of its layers attends, so it has no KV cache")
    if len(set(found)) < len(found) or not (states or sorted(found) == list(range(layers))):
        calls_of = f"for {found}"
        if len(found) > _TOKENS:
            calls_of = f"{len(found)} times"
            if (most := max(map(found.count, found))) > 1:
                calls_of += f", up to {most} times a layer"
        raise _refusal(model, f"its {layers} layers call attention {calls_of}, not once each")
    if len(caps := {call.softcap for call in calls}) > 1:
        raise _refusal(model, f"its layers cap scores at different numbers: {caps}")
    context = getattr(about, "max_position_embeddings", None)
    if type(context) is not int or not 1 <= context <= MAX_CONTEXT:
        raise _refusal(model, f"its longest context is {context!r}")
    most = max(call.q_heads for call in calls)
    try:
        return ModelGeometry(
            model_type=about.model_type,
            layers=_layers_of(model, calls, most),
            q_heads=most,
            hidden_size=about.hidden_size,
            vocab_size=about.vocab_size,
            max_context=context,
            softcap=calls[0].softcap,
            has_sinks=any(call.has_sinks for call in calls),
            states=states,
        )
    except ConfigError as error:
        raise _refusal(model, str(error)) from error


def _layers_of(model: Any, calls: list[_Call], most: int) -> tuple[LayerGeometry, ...]:
    """Return the layers that store K and V, in order; `most`: the default number of query heads per layer.

    Raises:
        ModelError: layers share K and V but differ in window, query heads or sinks.
    """
    owners: dict[int, _Call] = {}  # by layer number
    for call in calls:  # in call order
        first = next((owner for owner in owners.values() if call.shares_with(owner)), call)
        owners[call.layer] = first
        own, its = ((x.stored.window, x.q_heads, x.has_sinks) for x in (call, first))
        if own != its:
            raise _refusal(
                model,
                f"layer {call.layer} shares K and V with layer {first.layer}, but has another window, other "
                f"query heads or sinks",
            )
    stored = sorted({owner.layer for owner in owners.values()})
    has_sinks = any(call.has_sinks for call in calls)
    return tuple(
        replace(
            own.stored,
            index=place,
            readers=tuple(x for x in sorted(owners) if x != number and owners[x] is own),
            q_heads=None if own.q_heads == most else own.q_heads,
            has_sinks=None if own.has_sinks == has_sinks else own.has_sinks,
        )
        for place, number in enumerate(stored)
        for own in (owners[number],)
    )


def _chunk_of(about: Any, layer: int) -> int | None:
    """Return the length of the chunks within which a layer attends, or None if the config has none.

    In the code, chunked attention is visible only in the masks.
    """
    kinds = getattr(about, "layer_types", None)
    if not isinstance(kinds, list) or layer >= len(kinds) or kinds[layer] != _CHUNKED:
        return None
    found = getattr(about, CHUNK_KEY, None)
    return found if type(found) is int else None


def _observed(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **passed: Unpack[_Passed],
) -> tuple[Tensor, None]:
    """Record an attention call, [batch, heads, tokens, dim], and return zeros, [batch, tokens, heads, dim].

    Raises:
        ModelError: the call needs something that kvq's attention would ignore.
    """
    watch, layer = passed.get("kvq_step"), getattr(module, "layer_idx", None)
    if watch is None:
        raise ModelError("its code doesn't hand keywords on to attention, so kvq's finds no blocks")
    if type(layer) is not int:
        raise ModelError(f"{type(module).__name__} has no layer_idx")
    if attention_mask is not None:
        raise ModelError(f"layer {layer} applies an attention mask of its own")
    if passed.get("is_causal") is False or getattr(module, "is_causal", True) is False:
        raise ModelError(f"layer {layer} is not causal")
    left = {name for name, given in passed.items() if given is not None and given is not False}
    if unknown := sorted(left - _TAKEN - _HARMLESS - {"is_causal"}):
        raise ModelError(f"layer {layer} calls attention with {', '.join(unknown)}, which kvq does not take")
    if watch.states is not None:
        watch.states.attended()
    window, chunk = passed.get("sliding_window"), _chunk_of(watch.about, layer)
    kv_heads, k_dim, v_dim, expansion = key.shape[1], key.shape[3], value.shape[3], None
    if (latent := latent_dims(module, watch.products, query, key, value)) is not None:
        kv_heads, (v_dim, k_dim, expansion) = 1, latent
    stored = LayerGeometry(
        index=layer,
        kv_heads=kv_heads,
        k_head_dim=k_dim,
        v_head_dim=v_dim,
        window=chunk or window or None,
        is_chunked=chunk is not None,
        is_latent=latent is not None,
        expansion=expansion,
    )
    watch.calls.append(
        _Call(
            layer=layer,
            stored=stored,
            q_heads=query.shape[1],
            softcap=passed.get("softcap"),
            has_sinks=passed.get("s_aux") is not None,
            states=(key, value),
        )
    )
    watch.products.clear()
    if key.shape[2] != query.shape[2]:
        raise ModelError(f"layer {layer} attends from {query.shape[2]} tokens to {key.shape[2]} new keys")
    return value.new_zeros((query.shape[0], query.shape[2], query.shape[1], value.shape[3])), None


@contextmanager
def on_meta() -> Iterator[None]:
    """Make `nonzero` return no rows for meta tensors, and switch off validation in distributions."""
    before = Distribution._validate_args
    Distribution.set_default_validate_args(False)
    try:
        with _NothingChosen():  # type: ignore[no-untyped-call]
            yield
    finally:
        Distribution.set_default_validate_args(before)


class _NothingChosen(TorchDispatchMode):  # D195: `nonzero` returns no rows on meta
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.nonzero.default and (x := args[0]).is_meta:
            return x.new_empty((0, x.ndim), dtype=torch.int64)
        return func(*args, **(kwargs or {}))
