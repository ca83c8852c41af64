"""Modules and shapes of a model's recurrent states, observed while its code runs on the meta device."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from inspect import signature
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn

from kvq.errors import ModelError
from kvq.geometry import StateGeometry, StateTensor
from kvq.models.parts.states import CACHE_NAMES

P = ParamSpec("P")
R = TypeVar("R")
_NAMES = {"conv_states": "conv", "recurrent_states": "recurrent"}  # transformers' and kvq's


class StateWatch:  # D197: modules with states are observed through transformers' cache
    """A cache passed to a model, and the modules that used it for their states."""

    def __init__(self, cache: Any) -> None:
        self.cache = cache
        self._open: list[nn.Module] = []  # running modules, the innermost last
        self._keepers: dict[int, dict[nn.Module, None]] = {}  # by layer
        self._attending: set[nn.Module] = set()  # modules in which attention was called
        self._linear: dict[int, Tensor] = {}  # states of MiniMax's layers

    @classmethod
    def of(cls, config: Any) -> "StateWatch | None":
        """Return a watch for a transformers model, or None if its configuration implies no states."""
        from transformers import DynamicCache
        from transformers.cache_utils import LinearAttentionCacheLayerMixin

        try:
            cache = DynamicCache(config=config)
        except Exception:  # noqa: BLE001 - some configurations allow no cache
            return None
        if not any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in cache.layers):
            return None
        watch = cls(cache)
        for name in ("get_conv_state", "get_recurrent_state", "update_conv_state", "update_recurrent_state"):
            setattr(cache, name, watch._noting(getattr(cache, name), is_update=name.startswith("update")))
        cache.set_linear_cache = watch._noting(watch._linear.__setitem__, is_update=False)
        cache.get_linear_cache = lambda layer: None
        cache.update = lambda key, value, *_, **__: (key, value)
        return watch

    def _noting(self, method: Callable[P, R], *, is_update: bool) -> Callable[P, R]:
        def noted(*args: P.args, **kwargs: P.kwargs) -> R:
            layer: Any = kwargs["layer_idx"] if "layer_idx" in kwargs else args[1 if is_update else 0]
            self._keepers.setdefault(layer, {})[self._open[-1]] = None
            return method(*args, **kwargs)

        return noted

    @contextmanager
    def modules(self) -> Iterator[None]:
        """Record which modules are running while the context is open."""
        before = nn.modules.module.register_module_forward_pre_hook(
            lambda module, _: self._open.append(module)
        )
        after = nn.modules.module.register_module_forward_hook(self._close, always_call=True)
        try:
            yield
        finally:
            before.remove()
            after.remove()

    def _close(self, *_: object) -> None:
        self._open.pop()

    def attended(self) -> None:
        """Record that the running modules called attention."""
        self._attending.update(self._open)

    def states(self) -> tuple[StateGeometry, ...]:
        """Return the recurrent states of all layers, in layer order.

        Raises:
            ModelError: the way that states are kept doesn't allow splitting steps by sequence.
        """
        found = []
        for layer, modules in sorted(self._keepers.items()):
            for module in modules:
                self._check(layer, module)
            kinds = sorted({type(module).__name__ for module in modules})
            if len(kinds) > 1:
                raise ModelError(
                    f"layer {layer} keeps states in modules of several kinds, {', '.join(kinds)}"
                )
            found.append(StateGeometry(number=layer, kind=kinds[0], tensors=self._tensors(layer)))
        return tuple(found)

    def _check(self, layer: int, module: nn.Module) -> None:
        name = type(module).__name__
        if getattr(module, "layer_idx", None) != layer:
            raise ModelError(f"layer {layer} keeps a state in {name}, which doesn't know its layer")
        if module in self._attending:
            raise ModelError(f"layer {layer} keeps a state in {name}, which attends too, so it can't be cut")
        if not any(cache in signature(module.forward).parameters for cache in CACHE_NAMES):
            raise ModelError(f"layer {layer} keeps a state in {name}, which takes no cache")

    def _tensors(self, layer: int) -> tuple[StateTensor, ...]:
        kept = {
            (own, index): tensor
            for name, own in _NAMES.items()
            for index, tensor in sorted(getattr(self.cache.layers[layer], name).items())
            if tensor is not None
        }
        if layer in self._linear:
            kept["linear", 0] = self._linear[layer]
        found = []
        for (name, index), tensor in kept.items():
            dtype = None if tensor.dtype is torch.bfloat16 else str(tensor.dtype).removeprefix("torch.")
            found.append(StateTensor(name=name, index=index, shape=tuple(tensor.shape[1:]), dtype=dtype))
        return tuple(found)
