"""One forward pass over a packed batch, as seen by the attention of each layer."""

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

from torch import Tensor
from torch.nn import functional

from kvq.cache.backend import CacheBackend
from kvq.cache.stores.expansion import LatentExpansion
from kvq.cache.stores.latent import attend_latents
from kvq.geometry import ModelGeometry
from kvq.kernels import AttentionOptions, SequenceBatch
from kvq.kernels.adapters.cpu import CpuStepAdapters
from kvq.kernels.rope_write.reference import LayerHeads, turned_heads
from kvq.models.parts.adapters import StepAdapters
from kvq.models.parts.states import StepStates

Observer = Callable[[int, Tensor, Tensor], None]  # (layer, K, V), both [tokens, kv_heads, dim]
# Inputs of layers, [rows, hidden] each, and the first layer to run; if that is 0, inputs are recorded.
SharedInputs = tuple[list[Tensor], int]


@dataclass(kw_only=True, slots=True, eq=False)
class PackedStep:
    """A step over a packed batch, passed through the model to attention as the keyword `kvq_step`."""

    cache: CacheBackend
    geometry: ModelGeometry
    batches: tuple[SequenceBatch, ...]  # per layer group
    bad_tokens: Tensor  # bool [tokens]; True where K or V was not finite
    window_limit: int | None = None  # shortens every layer's window, to measure the value of context
    observer: Observer | None = None
    shared: SharedInputs | None = None  # for steps over caches that differ in later layers only
    states: StepStates | None = None  # for models with layers that keep states
    positions: Tensor | None = None  # int64 [rows], each token's position in its sequence
    keeps_hidden: bool = False  # `hidden` is needed
    hidden: Tensor | None = None  # [rows, hidden_size], after the model's final norm
    adapters: StepAdapters | None = None  # None: all rows are the base model's
    attention_s: float = 0.0  # time in `attend` so far; on a GPU the time to launch it

    @property
    def is_plain(self) -> bool:
        """True if layers only write K and V and attend, without any optional features."""
        extras = self.observer, self.window_limit, self.states, self.shared
        return all(extra is None for extra in extras)

    def compiled_adapters(self, rows: int, wanted: Tensor | None = None) -> CpuStepAdapters | None:
        """Return the adapters for layers that run in C++; `wanted`: rows whose logits are wanted."""
        return None if self.adapters is None else self.adapters.compiled(rows, wanted)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Tensor:
        """Write one layer's K and V of the new tokens, then attend from these tokens.

        `q`: [rows, q_heads, k_head_dim]; `k`, `v`: [rows, kv_heads, dim]. Rows past the step's tokens
        are padding; they are not written, and are zero in the result, [rows, q_heads, v_head_dim].
        """
        self._write(layer, k, v)
        return self.attend_over(layer, q, options)

    def attend_latents(
        self,
        layer: int,
        q: Tensor,
        rotary: Tensor,
        latents: Tensor,
        expansion: LatentExpansion,
        options: AttentionOptions,
    ) -> Tensor:
        """Write and attend in a layer that stores latents as V and keys' rotary parts as K, [rows, 1, dim].

        `q`: queries of all heads, [rows, q_heads, dim]. Returns [rows, q_heads, v_head_dim].
        """
        self._write(layer, rotary, latents)
        return self.attend_over(layer, q, options, expansion)

    def _write(self, layer: int, k: Tensor, v: Tensor) -> None:
        began = perf_counter()
        tokens = self.bad_tokens.shape[0]
        k, v = k[:tokens], v[:tokens]
        if self.observer is not None:
            self.observer(layer, k, v)
        store = self.cache.stores[layer]
        self.bad_tokens |= store.write(k, v, store.batch_of(self.batches).slots)
        self.attention_s += perf_counter() - began

    def attend_over(
        self, layer: int, q: Tensor, options: AttentionOptions, expansion: LatentExpansion | None = None
    ) -> Tensor:
        """Attend from a layer's tokens over K and V written by this layer or by the one it shares them with.

        `expansion`: required for a layer that stores latents.
        """
        began = perf_counter()
        rows, tokens = q.shape[0], self.bad_tokens.shape[0]
        store, own = self.cache.stores[layer], self.options_of(layer, options)
        if expansion is None:
            out, _ = store.attend(q[:tokens], store.batch_of(self.batches), own)
        else:
            out = attend_latents(store, q[:tokens], self.batches, own, expansion)
        if rows > tokens:
            out = functional.pad(out, (0, 0, 0, 0, 0, rows - tokens))
        self.attention_s += perf_counter() - began
        return out

    def attend_joined(
        self,
        layer: int,
        joined: Tensor,
        angles: tuple[Tensor, Tensor] | None,
        heads: LayerHeads,
        options: AttentionOptions,
    ) -> Tensor:
        """Rotate the queries and keys in a fused QKV tensor, [tokens, heads.width], then write and attend.

        `angles`: every token's cos and sin; None if nothing is rotated. `joined` is overwritten: it then
        contains the rotated queries and arbitrary values.
        """
        if self.observer is not None:
            return self.attend(layer, *turned_heads(joined, angles, heads), options)
        began = perf_counter()
        store = self.cache.stores[layer]
        batch = store.batch_of(self.batches)
        q = store.write_joined(joined, angles, heads, batch.slots, self.bad_tokens)
        out, _ = store.attend(q, batch, self.options_of(layer, options))
        self.attention_s += perf_counter() - began
        return out

    def options_of(self, layer: int, options: AttentionOptions) -> AttentionOptions:
        """Return a layer's options with its window or chunk length and the step's window limit applied."""
        own = self.geometry.layers[layer]
        return options.reaching(own.window, is_chunked=own.is_chunked).within(self.window_limit)
