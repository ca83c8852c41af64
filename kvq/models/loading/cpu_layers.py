"""Decoder layers in C++: all of a step in one call, or two calls and attention each."""

from collections.abc import Sequence
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from kvq.cache.kv_cache import KVCache
from kvq.kernels.decoder.cpu import CpuDecoder
from kvq.kernels.decoder.parts import DecoderParts
from kvq.kernels.decoder.stack import CpuStack, StackLayer
from kvq.kernels.decoder.whole import CpuPass, PassParts, ReadyPass
from kvq.kernels.paged import PagedKV
from kvq.models.parts.angles import Angles
from kvq.models.parts.step import PackedStep


class CpuLayers:
    """All layers of a model and its last norm."""

    def __init__(self, layers: Sequence[DecoderParts], norm: nn.Module) -> None:
        self._layers = [CpuDecoder(parts) for parts in layers]
        self._kinds = sorted({parts.angles for parts in layers})
        self._norm = norm
        self._stacks: WeakKeyDictionary[KVCache, tuple[int, CpuStack]] = WeakKeyDictionary()

    def __call__(self, x: Tensor, angles: dict[str, tuple[Tensor, Tensor]], step: PackedStep) -> Tensor:
        """[rows, hidden] -> the same, normed."""
        stack = self._stack_of(step) if len(x) == len(step.bad_tokens) else None
        if stack is not None:
            turned = [angles[kind] for kind in self._kinds]
            x, seconds = stack(x, turned, step.batches, step.bad_tokens)
            step.attention_s += seconds
        else:
            x = self._one_by_one(x, angles, step)
        normed: Tensor = self._norm(x)
        return normed

    def whole(
        self,
        parts: PassParts,
        angles: Angles,
        tokens: Tensor,
        positions: Tensor,
        wanted: Tensor,
        step: PackedStep,
    ) -> ReadyPass | None:
        """A step in one call, with the bits of several; None where one isn't enough."""
        if len(tokens) != len(step.bad_tokens) or (stack := self._stack_of(step)) is None:
            return None
        tables = angles.tables(parts.dtype, int(positions.max()) + 1)
        if tables is None or len(stack.dims) > 1:
            return None
        if stack.whole is None or stack.whole.parts is not parts:
            stack.whole = CpuPass(parts)
        make: CpuPass = stack.whole
        return make(stack, tables, tokens, positions, wanted, step.batches, step.bad_tokens)

    def _one_by_one(self, x: Tensor, angles: dict[str, tuple[Tensor, Tensor]], step: PackedStep) -> Tensor:
        inputs, first = step.shared or ([], 0)
        if first:
            x = inputs[first]
        else:
            inputs.clear()
        for layer in self._layers[first:]:
            if step.shared is not None and not first:
                inputs.append(x)
            parts = layer.parts
            heads = layer.before(x, *angles[parts.angles])
            q, k, v = heads.split(parts.heads.counts, 1)
            attended = step.attend(parts.index, q, k, v, parts.options)
            x = layer.after(x, attended.flatten(1))
        return x

    def _stack_of(self, step: PackedStep) -> CpuStack | None:
        """All layers over the step's cache, if nothing but C++ has a part in its attention."""
        cache = step.cache
        if not step.is_plain or not isinstance(cache, KVCache):
            return None
        version, stack = self._stacks.get(cache, (-1, None))
        if version != cache.version:  # the first over it, or its pools have grown
            stack = self._make_stack(step, cache)
            if stack is not None:
                self._stacks[cache] = cache.version, stack
        return stack

    def _make_stack(self, step: PackedStep, cache: KVCache) -> CpuStack | None:
        layers = []
        for decoder in self._layers:
            parts = decoder.parts
            if (blocks := cache.in_cpp(parts.index)) is None:
                return None
            kv, exact = blocks
            layers.append(
                StackLayer(
                    decoder=decoder,
                    kv=kv,
                    options=step.options_of(parts.index, parts.options),
                    exact=exact,
                    group=cache.group_of[parts.index],
                    angles=self._kinds.index(parts.angles),
                    sees_old=isinstance(kv, PagedKV) or cache.sees_old(parts.index),
                    num_kinds=len(cache.layout.sealed),
                )
            )
        return CpuStack(layers)
