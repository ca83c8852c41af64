"""Decoder layers in C++: an entire step in one call, or two calls and an attention call per layer."""

from collections.abc import Sequence
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from kvq.cache.stores.base import LayerStore
from kvq.kernels.decoder.cpu import CpuDecoder
from kvq.kernels.decoder.parts import DecoderParts
from kvq.kernels.decoder.stack import CpuStack
from kvq.kernels.decoder.whole import CpuPass, ReadyPass
from kvq.models.parts.angles import Angles
from kvq.models.parts.step import PackedStep


class CpuLayers:
    """All decoder layers of a model and its final norm."""

    def __init__(self, layers: Sequence[DecoderParts], norm: nn.Module) -> None:
        self._layers = [CpuDecoder(parts) for parts in layers]
        self._kinds = sorted({parts.angles for parts in layers})
        self._norm = norm
        self._stacks: WeakKeyDictionary[LayerStore, CpuStack] = WeakKeyDictionary()  # by first store

    def __call__(self, x: Tensor, angles: dict[str, tuple[Tensor, Tensor]], step: PackedStep) -> Tensor:
        """Run all layers and the final norm: [rows, hidden] -> [rows, hidden]."""
        stack = self._stack_of(step) if len(x) == len(step.bad_tokens) else None
        if stack is not None:
            turned = [angles[kind] for kind in self._kinds]
            x, seconds = stack(x, turned, step.batches, step.bad_tokens, step.compiled_adapters(len(x)))
            step.attention_s += seconds
        else:
            x = self._one_by_one(x, angles, step)
        normed: Tensor = self._norm(x)
        return normed

    def whole(
        self,
        make: CpuPass,
        angles: Angles,
        tokens: Tensor,
        positions: Tensor,
        wanted: Tensor,
        step: PackedStep,
    ) -> ReadyPass | None:
        """Return an entire step as one call, bit-identical to several calls; None if it requires several."""
        if len(tokens) != len(step.bad_tokens) or (stack := self._stack_of(step)) is None:
            return None
        tables = angles.tables(make.dtype, int(positions.max()) + 1)
        if tables is None or len(stack.dims) > 1:
            return None
        adapters = step.compiled_adapters(len(tokens), wanted)
        return make(stack, tables, tokens, positions, wanted, step.batches, step.bad_tokens, adapters)

    def _one_by_one(self, x: Tensor, angles: dict[str, tuple[Tensor, Tensor]], step: PackedStep) -> Tensor:
        inputs, first = step.shared or ([], 0)
        adapters = step.compiled_adapters(len(x))
        if first:
            x = inputs[first]
        else:
            inputs.clear()
        for layer in self._layers[first:]:
            if step.shared is not None and not first:
                inputs.append(x)
            parts = layer.parts
            heads = layer.before(x, *angles[parts.angles], adapters)
            q, k, v = heads.split(parts.heads.counts, 1)
            attended = step.attend(parts.index, q, k, v, parts.options)
            x = layer.after(x, attended.flatten(1), adapters)
        return x

    def _stack_of(self, step: PackedStep) -> CpuStack | None:
        """Return all layers for the step's cache, or None unless the step's attention runs in C++ alone."""
        if not step.is_plain:
            return None
        first = step.cache.stores[self._layers[0].parts.index]  # a different store after pools have grown
        stack = self._stacks.get(first)
        if stack is None and (stack := self._make_stack(step)) is not None:
            self._stacks[first] = stack
        return stack

    def _make_stack(self, step: PackedStep) -> CpuStack | None:
        layers = []
        for decoder in self._layers:
            parts = decoder.parts
            store, options = step.cache.stores[parts.index], step.options_of(parts.index, parts.options)
            layer = store.stack_layer(decoder, options, self._kinds.index(parts.angles))
            if layer is None:
                return None
            layers.append(layer)
        return CpuStack(layers)
