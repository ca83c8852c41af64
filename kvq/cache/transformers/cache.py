"""KvqCache: a transformers cache whose memory is kvq's quantized blocks."""

import copy
import logging
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache
from transformers.utils.logging import warning_once

from kvq.cache.transformers.attention import register_attention
from kvq.cache.transformers.config import read_config
from kvq.cache.transformers.layer import KvqLayer
from kvq.cache.transformers.rows import BatchRows
from kvq.cache.transformers.state import CacheState
from kvq.errors import ConfigError, RequestError
from kvq.formats import KVRecipe
from kvq.kernels import check_backend
from kvq.layout import BLOCK_SIZE, BlockOrder

_log = logging.getLogger("kvq")


class KvqCache(Cache):  # type: ignore[misc]
    """Cache for `model.generate(past_key_values=...)` and for plain `model(...)` loops.

        model.generate(**inputs, past_key_values=KvqCache(model.config, kv="int4"))

    With transformers' own attention functions, each layer's rows are dequantized in every step into scratch
    memory that all layers share. With `model.set_attn_implementation("kvq")`, attention reads the blocks
    instead, which is faster if compiled kernels are available (see `kvq doctor`).

    For inference only: no gradients flow through the cache. Padding must be on the left. With "kvq", padding
    takes no blocks; otherwise, it is stored like other tokens. A sliding-window layer's pool holds its window
    and the longest prefill chunk; for long prompts, pass `prefill_chunk_size` to `generate`. `copy.deepcopy`
    copies the blocks, so that one prompt can be continued in several ways.

    NaN or infinity in K or V raises RequestError after a step's last layer (one synchronization per step on a
    GPU), and again in each later step until those rows are dropped or `reset` is called.
    """

    def __init__(
        self,
        config: Any,
        kv: str | Path | KVRecipe = "int4",
        *,
        block_size: int = BLOCK_SIZE,
        max_tokens: int | None = None,
        scales: str | Path | None = None,
        residual_length: int = 0,  # D224: recent tokens of the dense tail; off by default
        order: BlockOrder = BlockOrder.LAYER_MAJOR,
        backend: str = "auto",
    ) -> None:
        """Check all options. Memory is allocated by the first forward pass, once the batch size is known.

        `config`: `model.config` itself, not a copy. `kv`: a format name, a pair, a kvq.json or a KVRecipe.
        `max_tokens`: maximum number of tokens per batch row, allocated in advance; by default, the pools grow
        as needed. `scales`: a kvq.json with static scales made from exactly this model, since the config
        alone can't distinguish models with the same number of heads. `residual_length`: number of last tokens
        per row that attention sees unquantized, like `+recent=N` of a format. These tokens, and tokens in
        incomplete blocks, take a quarter more memory than without quantization.

        Raises:
            ConfigError: the family or format is unknown, the model is an encoder-decoder, static scales
                are missing, or an option is out of range.
        """
        if max_tokens is not None and (type(max_tokens) is not int or max_tokens < 1):
            raise ConfigError(f"max_tokens must be a positive number of tokens per row, got {max_tokens!r}")
        if type(residual_length) is not int or residual_length < 0:
            raise ConfigError(f"residual_length must be a number of tokens per row, got {residual_length!r}")
        check_backend(backend)
        register_attention()
        self._state = CacheState(
            config=read_config(config),
            kv=kv,
            scales=scales,
            block_size=block_size,
            max_tokens=max_tokens,
            order=order,
            backend=backend,
            residual_length=residual_length,
        )
        if self._state.plan().recipe.is_quantized:
            warning_once(_log, "kvq.check(model, kv) measures what this KV format costs in quality")
        super().__init__(layers=[KvqLayer(self._state, x) for x in self._state.config.geometry.layers])

    @property
    def nbytes(self) -> int:
        """Bytes used for K and V: the block pools, and unquantized recent tokens."""
        return 0 if self._state.rows is None else self._state.rows.nbytes

    @property
    def scratch_bytes(self) -> int:
        """Bytes of the scratch memory for one layer's dequantized rows."""
        return 0 if self._state.rows is None else self._state.rows.scratch.nbytes

    @property
    def rows(self) -> BatchRows | None:
        """The batch's sequences and blocks, or None before the first forward pass."""
        return self._state.rows

    @property
    def batch_size(self) -> int:
        """Number of rows, or -1 before the first forward pass."""
        return -1 if self._state.rows is None or not self._state.length else self._state.rows.batch

    def reset(self) -> None:
        """Drop all tokens. The pools stay allocated for the next batch, of any size."""
        if self._state.rows is not None:
            self._state.rows.start(self._state.rows.batch)
        self._state.layers_done = 0
        for layer in self.layers:
            layer.cumulative_length = 0

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the last `-tokens_to_remove` tokens of every row. 0 only releases memory that is not needed.

        Raises:
            RequestError: the number is positive or exceeds the cached tokens, or a window has moved on
                without `activate_past_recording`.
        """
        length, rows = self._state.length, self._state.rows
        count = -tokens_to_remove if isinstance(tokens_to_remove, int) else -1
        if count < 0 or count > length:
            raise RequestError(
                f"crop takes 0 to minus the {length} cached tokens, got {tokens_to_remove}; a negative "
                f"number is how many tokens to drop"
            )
        if rows is None or not length:
            return
        self._state.check_whole()
        slid = [x.window for x in self._state.config.geometry.layers if x.window and length >= x.window]
        if count and slid and not self._state.records_past:
            raise RequestError(
                f"the window of {min(slid)} tokens has slid on, what it left is gone; call "
                f"activate_past_recording() before the forward passes that crop() may undo"
            )
        rows.truncate(count)
        rows.commit()
        for layer in self.layers:
            layer.cumulative_length -= count

    def activate_past_recording(self) -> None:
        """Keep tokens that leave a window until the next `crop`, so that `crop` can undo a step."""
        self._state.records_past = True

    def is_recording_past(self, layer_idx: int) -> bool:
        """Return True if a layer keeps tokens that leave its window until the next `crop`."""
        return bool(self.layers[layer_idx].record_past)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Make row `beam_idx[i]` the new row i, for beam search. Rows share blocks until they write."""
        self._select(beam_idx.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row `repeats` times. The copies share the row's blocks."""
        rows = self._state.rows
        if rows is not None:
            self._select([row for row in range(rows.batch) for _ in range(repeats)])

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep only the specified rows. `indices`: row indices, or one bool per row."""
        picked = indices.nonzero().flatten() if indices.dtype is torch.bool else indices
        self._select(picked.tolist())

    def check_integrity(self) -> None:
        """Raise AssertionError if block references and tables disagree."""
        if self._state.rows is not None:
            self._state.rows.manager.check_integrity()

    @torch.inference_mode(False)
    def __deepcopy__(self, memo: dict[int, Any]) -> "KvqCache":
        """Return a copy with separate blocks and scratch memory. The model's config stays shared."""
        state = self._state
        for shared in (state.config, state.config.geometry, state.config.latent):
            memo[id(shared)] = shared
        other: KvqCache = type(self).__new__(type(self))
        memo[id(self)] = other
        for name, value in self.__dict__.items():
            setattr(other, name, copy.deepcopy(value, memo))
        return other

    def _select(self, indices: list[int]) -> None:
        rows = self._state.rows
        if rows is None or not rows.length:
            return
        self._state.check_whole()
        if not indices or min(indices) < -rows.batch or max(indices) >= rows.batch:
            raise RequestError(f"rows {indices} were asked for; the cache holds rows 0 to {rows.batch - 1}")
        rows.select([index % rows.batch for index in indices])
