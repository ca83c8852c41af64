"""State shared by the layers of one KvqCache: rows, scratch memory and the current step."""

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from kvq.cache.transformers.config import CacheConfig, read_recipe
from kvq.cache.transformers.rows import BatchRows
from kvq.errors import ConfigError, RequestError
from kvq.formats import KVRecipe
from kvq.layout import BlockOrder, KVLayout, plan_layout

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(kw_only=True, eq=False)
class CacheState:
    """State shared by all layers: the user's options, the rows (created by the first update), the step."""

    config: CacheConfig
    kv: str | Path | KVRecipe
    scales: str | Path | None
    block_size: int  # tokens
    max_tokens: int | None  # per row
    order: BlockOrder
    backend: str
    residual_length: int  # tokens per row
    rows: BatchRows | None = None
    records_past: bool = False
    layers_done: int = 0  # of the current forward pass
    _dtypes: tuple[torch.dtype, torch.dtype] | None = None

    @property
    def length(self) -> int:
        """Number of tokens per row, including padding."""
        return 0 if self.rows is None else self.rows.length

    def plan(self) -> KVLayout:
        """Return the layout of the blocks for the attention function that the config currently names.

        Raises:
            ConfigError: the options don't fit the model.
        """
        recipe = read_recipe(self.kv, self.scales, self.config)
        if recipe.exact.sinks:
            raise ConfigError(
                f"{recipe.name} keeps first tokens unquantized, which KvqCache can't do; leave out +sinks="
            )
        if recipe.exact.recent and self.residual_length:
            raise ConfigError(
                f"residual_length={self.residual_length} and {recipe.name} both say how many recent "
                f"tokens stay unquantized; leave one out"
            )
        if self.residual_length:
            recipe = replace(recipe, exact=replace(recipe.exact, recent=self.residual_length))
        size, order = self.block_size, self.order
        return plan_layout(self.config.stored, recipe, block_size=size, order=order, staging=False)

    def open(self, layer: int, k: Tensor, v: Tensor) -> BatchRows:
        """Check new rows [batch, heads, tokens, dim] of one layer. Allocate memory on the first call.

        Raises:
            RequestError: shapes, dtype, device or batch size don't match the model or earlier rows.
            OutOfMemory: the pools don't fit in memory.
        """
        shape = self.config.received.layers[layer]
        for name, x, dim in (("K", k, shape.k_head_dim), ("V", v, shape.v_head_dim)):
            expected = (k.shape[0], shape.kv_heads, k.shape[2], dim)
            if x.shape != expected or x.dtype not in _DTYPES:
                raise RequestError(
                    f"layer {layer}: {name} must be fp32, bf16 or fp16 [batch, {shape.kv_heads} heads, "
                    f"tokens, {dim}], got {x.dtype} {list(x.shape)}; is the cache made from this "
                    f"model's config?"
                )
        if not self.length:
            self._reopen(k, v)
        assert self.rows is not None, "opened above"
        self._check_as_before(self.rows, layer, k, v)
        return self.rows

    def begin(self, rows: BatchRows, seen: int, count: int, padding: list[int] | None) -> None:
        """At a step's first layer, allocate slots for `count` tokens. `seen`: number of tokens in this layer.

        Raises:
            RequestError: the layer is out of step with the others.
        """
        if seen == rows.length:
            self.check_whole()
            rows.append(count, padding)
        elif seen + count != rows.length:
            raise RequestError(
                f"a layer got {count} tokens after {seen}, while others hold {rows.length}; "
                f"every layer must be updated once per forward pass"
            )

    def layer_done(self, rows: BatchRows) -> None:
        """Count a finished layer of the step. After the last layer, commit the step and check for NaN.

        Raises:
            RequestError: K or V contained NaN or infinity.
        """
        self.layers_done += 1
        if self.layers_done == len(self.config.geometry.layers):
            self.layers_done = 0
            if not self.records_past:
                rows.commit()
            rows.check_finite()

    def check_whole(self) -> None:
        """Raise RequestError if the last forward pass was interrupted between two layers."""
        if self.layers_done:
            raise RequestError(
                f"the last forward pass ended after {self.layers_done} of "
                f"{len(self.config.geometry.layers)} layers; reset() the cache and run the prompt again"
            )

    def _reopen(self, k: Tensor, v: Tensor) -> None:
        """Prepare rows for an empty cache, in the old pools if they are compatible, or else in new pools."""
        batch, rows = k.shape[0], self.rows
        self._dtypes = (k.dtype, v.dtype)
        if rows is None or rows.layout.geometry is not self.config.stored or rows.device != k.device:
            layout = self.plan()
            self.rows = None  # the old memory is freed before the new is allocated
            self.rows = BatchRows(
                layout, batch=batch, max_tokens=self.max_tokens, device=k.device, backend=self.backend
            )
        elif rows.batch != batch:
            rows.start(batch)

    def _check_as_before(self, rows: BatchRows, layer: int, k: Tensor, v: Tensor) -> None:
        if rows.layout.geometry is not self.config.stored:
            raise RequestError(
                "the attention implementation was changed while the cache held tokens; reset() the cache "
                "first: this family stores other rows for each"
            )
        if k.shape[0] != rows.batch:
            raise RequestError(
                f"the cache holds {rows.batch} rows, got a batch of {k.shape[0]}; reset() the cache, or "
                f"use batch_select_indices or batch_repeat_interleave"
            )
        if (k.dtype, v.dtype) != self._dtypes or k.device != rows.device or v.device != rows.device:
            raise RequestError(
                f"layer {layer}: K and V are {k.dtype} and {v.dtype} on {k.device}, the cache began with "
                f"{self._dtypes} on {rows.device}; keep one dtype and one device"
            )
