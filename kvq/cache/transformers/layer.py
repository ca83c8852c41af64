"""Layer of a KvqCache, with the interface of transformers and attention over blocks."""

from collections.abc import Callable
from typing import Any, NoReturn, TypedDict, Unpack

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from kvq.cache.transformers.attention import eager, hand_over
from kvq.cache.transformers.rows import BatchRows
from kvq.cache.transformers.state import CacheState
from kvq.errors import ConfigError, RequestError
from kvq.geometry import LayerGeometry, ModelGeometry
from kvq.kernels import AttentionOptions


class _Unused(TypedDict, total=False):
    """Keywords that model code passes to `update` in addition to K and V, for other caches."""

    layer_idx: int
    cache_kwargs: dict[str, Any]


def _refused(method: str) -> Callable[..., NoReturn]:
    """Return a method that raises an error, because layers share their blocks and can't change alone."""

    def refuse(*_: object) -> NoReturn:
        raise ConfigError(f"KvqCache can't {method} a single layer; call cache.{method} instead")

    return refuse


class KvqLayer(CacheLayerMixin):  # type: ignore[misc]
    """Layer with full or sliding attention. Batch operations and `crop` belong to the entire cache."""

    is_croppable = True
    crop, reset, reorder_cache, offload, prefetch = map(
        _refused, ("crop", "reset", "reorder_cache", "offload", "prefetch")
    )

    def __init__(self, state: CacheState, geometry: LayerGeometry) -> None:
        super().__init__()
        self.state = state
        self.index = geometry.index
        self.window = geometry.window  # tokens, including the query's own
        self.is_sliding = self.window is not None
        self.cumulative_length = 0  # tokens per row, including padding
        self.handed: Tensor | None = None  # see `attention._BatchAttention`

    @property
    def geometry(self) -> ModelGeometry:
        """Geometry of the model's K and V as attention sees them."""
        return self.state.config.geometry

    @property
    def record_past(self) -> bool:
        """True if tokens that leave the window are kept until the next `crop`."""
        return self.is_sliding and self.state.records_past

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> BatchRows:
        """Check K and V, [batch, kv_heads, any, dim]; on the first call, allocate memory for their shapes."""
        rows = self.state.open(self.index, key_states, value_states)
        self.is_initialized = True
        return rows

    @eager
    @torch.no_grad()
    def update(  # D225: one C++ call per layer and operation
        self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Unpack[_Unused]
    ) -> tuple[Tensor, Tensor]:
        """Store new rows [batch, kv_heads, tokens, dim], and return the rows that `get_mask_sizes` describes.

        The result is in scratch memory that the next layer overwrites. With the "kvq" attention, the new rows
        are returned unchanged, and stored when attention receives them. Further arguments from transformers
        are meant for other caches and are ignored.

        Raises:
            RequestError: shapes, dtype, batch size or padding don't fit, or NaN or infinity was stored.
            OutOfMemory: there is too little memory to grow the pools.
        """
        rows, config = self.lazy_initialization(key_states, value_states), self.state.config
        if config.attends_from_blocks:
            key = key_states.detach()
            self.handed = key if config.latent is None else None  # latents are expanded in between
            hand_over(self)
            return key, value_states
        oldest = self._oldest
        self._write(rows, key_states, value_states, None)
        k, v = rows.dense(self.index, oldest, (key_states, value_states))
        self._done(rows)
        return k, v

    @torch.no_grad()
    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, padding: Tensor | None, options: AttentionOptions
    ) -> Tensor:
        """Write the new rows, then attend over the blocks; see `attention._BatchAttention`."""
        self.handed = None
        rows, seen = self.state.rows, self.cumulative_length
        assert rows is not None, "opened by update"
        total = seen + key.shape[2]
        left = _left_padding(padding, rows.batch, total) if seen == rows.length else None
        self._write(rows, key, value, left)
        out = rows.attend(self.index, query, (key, value), options)
        self._done(rows)
        return out

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the number of rows that `update` will return, and the position of the first."""
        return self.cumulative_length - self._oldest + query_length, self._oldest

    def get_seq_length(self) -> int:
        """Return the number of tokens per row, including padding."""
        return self.cumulative_length

    def get_max_length(self) -> int:
        """Return the window size or the cache's max_tokens, or -1 if there is no limit."""
        return self.window or self.state.max_tokens or -1

    @property
    def _oldest(self) -> int:
        """First position that is still visible to the next token."""
        return 0 if self.window is None else max(0, self.cumulative_length - self.window + 1)

    def _write(self, rows: BatchRows, key: Tensor, value: Tensor, padding: list[int] | None) -> None:
        self.state.begin(rows, self.cumulative_length, key.shape[2], padding)
        rows.write(self.index, key, value)

    def _done(self, rows: BatchRows) -> None:
        self.cumulative_length = rows.length
        self.state.layer_done(rows)


def _left_padding(mask: Tensor | None, batch: int, total: int) -> list[int]:
    """Return each row's number of leading padding tokens. Synchronizes the device, once per step.

    Raises:
        RequestError: the mask doesn't cover the entire context, or padding isn't on the left.
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
