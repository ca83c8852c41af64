"""One layer of a KvqCache, as transformers sees it, and its attention over blocks."""

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from kvq.cache.attention import hand_over
from kvq.cache.hf_state import CacheState
from kvq.errors import ConfigError, RequestError
from kvq.geometry import LayerGeometry, ModelGeometry
from kvq.kernels import AttentionOptions


class KvqLayer(CacheLayerMixin):  # type: ignore[misc]
    """Full or sliding attention; batch operations and `crop` belong to the whole cache."""

    is_croppable = True

    def __init__(self, state: CacheState, geometry: LayerGeometry) -> None:
        super().__init__()
        self.state = state
        self.index = geometry.index
        self.window = geometry.window  # tokens, the query's own included
        self.cumulative_length = 0  # tokens per row, padding included

    @property
    def is_sliding(self) -> bool:
        """True if the layer has a window."""
        return self.window is not None

    @property
    def record_past(self) -> bool:
        """True if what slides out of the window is kept until the next `crop`."""
        return self.is_sliding and self.state.records_past

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate by the shapes of the first K and V, [batch, kv_heads, any, dim]."""
        self.state.open(self.index, key_states, value_states)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Store new rows [batch, kv_heads, tokens, dim]; return all that `get_mask_sizes` names.

        What comes back lies in scratch memory that the next layer overwrites. With the "kvq"
        attention the new rows come back, and are stored when attention gets them.

        Raises:
            RequestError: shapes, dtype, batch size or padding don't fit, or NaN was stored.
            OutOfMemory: the pools can't grow.
        """
        with torch.no_grad():
            rows = self.state.open(self.index, key_states, value_states)
            self.is_initialized = True
            if self.state.config.attends_from_blocks:
                step = _BlockStep(self, key_states.detach())
                hand_over(step)
                return step.new_key, value_states
            seen = self.cumulative_length
            self.state.begin(rows, seen, key_states.shape[2], None)
            rows.write(self.index, key_states, value_states)
            k, v = rows.dense(self.index, self._oldest(seen), (key_states, value_states))
            self.cumulative_length = rows.length
            self.state.layer_done(rows)
        return k, v

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(rows that `update` will return, position of the first)."""
        oldest = self._oldest(self.cumulative_length)
        return self.cumulative_length - oldest + query_length, oldest

    def get_seq_length(self) -> int:
        """Tokens per row, padding included."""
        return self.cumulative_length

    def get_max_length(self) -> int:
        """The window, or the cache's max_tokens, or -1 for no limit."""
        return self.window or self.state.options.max_tokens or -1

    def crop(self, tokens_to_remove: int) -> None:
        """Refused: rows of all layers lie in the same blocks."""
        raise _whole("crop")

    def reset(self) -> None:
        """Refused: rows of all layers lie in the same blocks."""
        raise _whole("reset")

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Refused: rows of all layers lie in the same blocks."""
        raise _whole("reorder_cache")

    def offload(self) -> None:
        """Refused: rows of all layers lie in the same blocks."""
        raise _whole("offload")

    def prefetch(self) -> None:
        """Refused: rows of all layers lie in the same blocks."""
        raise _whole("prefetch")

    def _oldest(self, seen: int) -> int:
        """The first position that a token at position `seen` still sees."""
        return 0 if self.window is None else max(0, seen - self.window + 1)


class _BlockStep:
    """New rows of one layer on their way from `update` to the attention function."""

    def __init__(self, layer: KvqLayer, new_key: Tensor) -> None:
        config = layer.state.config
        self.layer = layer.index
        self.new_key = new_key
        self.key = None if config.latent is not None else new_key  # latents are expanded in between
        self.geometry: ModelGeometry = config.geometry
        self._of = layer

    @torch.no_grad()
    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        padding: Tensor | None,
        options: AttentionOptions,
    ) -> Tensor:
        """Write, then attend from blocks; see `kvq.cache.attention.BatchAttention`."""
        state, seen = self._of.state, self._of.cumulative_length
        rows = state.rows
        assert rows is not None, "opened by update"
        count = key.shape[2]
        state.begin(
            rows,
            seen,
            count,
            _left_padding(padding, rows.batch, seen + count) if seen == rows.length else None,
        )
        rows.write(self.layer, key, value)
        out = rows.attend(self.layer, query, (key, value), options)
        self._of.cumulative_length = rows.length
        state.layer_done(rows)
        return out


def _left_padding(mask: Tensor | None, batch: int, total: int) -> list[int]:
    """Padded tokens before each row. Synchronizes the device, once per step.

    Raises:
        RequestError: not a mask of the whole context, or padding elsewhere than on the left.
    """
    if mask is None:
        return [0] * batch
    if mask.shape != (batch, total):
        raise RequestError(
            f"with attn_implementation='kvq' attention_mask must be [batch, tokens so far] = "
            f"{[batch, total]}, got {list(mask.shape)}; use 'sdpa' for masks of your own"
        )
    seen = mask.bool()
    before = (seen.cumsum(dim=1) == 0).sum(dim=1)
    padding, kept = torch.stack((before, seen.sum(dim=1))).tolist()
    if any(pad + some != total for pad, some in zip(padding, kept, strict=True)):
        raise RequestError(
            "with attn_implementation='kvq' padding must be on the left, and attention_mask hides tokens "
            "after a row's first; set tokenizer.padding_side='left', or use 'sdpa'"
        )
    return [int(pad) for pad in padding]


def _whole(method: str) -> ConfigError:
    return ConfigError(f"KvqCache can't {method} a single layer; call cache.{method} instead")
