"""Shared code of kvq's vLLM backends: pages, metadata, and the attention of one layer."""

import functools
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, TypedDict, Unpack, cast

import torch
from torch import Tensor
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.attention.backend import AttentionImpl, AttentionType, CommonAttentionMetadata
from vllm.v1.kv_cache_interface import AttentionSpec

from kvq.cache.stores.base import PagedStore
from kvq.errors import ConfigError
from kvq.integrations.vllm.names import recipe_of, requested, say_checked
from kvq.integrations.vllm.pages import Page, with_slots
from kvq.kernels import AttentionOptions, SequenceBatch


def wanted_format(vllm_config: VllmConfig) -> str | None:
    """Return the format, pair or kvq.json to serve a model with, or None for vLLM's own formats."""
    additional = vllm_config.additional_config
    options = additional if isinstance(additional, dict) else None
    name = requested(str(vllm_config.cache_config.cache_dtype), options)
    if name is not None and vllm_config.cache_config.kv_cache_dtype_skip_layers:
        raise ConfigError(
            "--kv-cache-dtype-skip-layers is for vLLM's formats; with kvq name a kvq.json with a format for "
            "every layer, as kvq:FILE"
        )
    return name


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Metadata:
    """Metadata of one step for the layers of one group."""

    num_actual_tokens: int
    slot_mapping: Tensor  # int64 [tokens]
    batch: SequenceBatch


def metadata_of(
    common: CommonAttentionMetadata,
    context_lens: list[int],
    *,
    lens: Tensor | None = None,
    is_exact: bool = True,
) -> Metadata:
    """Return the metadata of a step; `context_lens` are upper bounds unless `is_exact` is True.

    `lens`: the batch's `lens`, int32 [3, requests], on the device, where captured graphs read them.

    Raises:
        ConfigError: the attention is not causal.
    """
    if common.causal is not True:
        raise ConfigError("kvq attends causally; this model or this way of drafting doesn't")
    requests = common.num_reqs
    starts = common.query_start_loc_cpu[: requests + 1].tolist()
    new = tuple(end - start for start, end in pairwise(starts))
    tokens = starts[-1]
    batch = SequenceBatch(
        query_lens=new,
        context_lens=tuple(context_lens[:requests]),
        tables=common.block_table_tensor[:requests],
        slots=common.slot_mapping[:tokens],
        lens=lens,
        is_captured=not is_exact,
    )
    return Metadata(num_actual_tokens=tokens, slot_mapping=common.slot_mapping, batch=batch)


def let_layers_say_their_bytes() -> None:  # D341: layers report their bytes; `customize_spec` gets no layer
    """Make kvq's layers report the bytes of their own blocks.

    By default, vLLM asks the backend, which has no access to the layer, although formats may differ by layer.
    """
    if not hasattr(Attention.get_kv_cache_spec, "__wrapped__"):  # plug-ins may be loaded twice
        Attention.get_kv_cache_spec = _with_own_bytes(Attention.get_kv_cache_spec)


def _with_own_bytes(original: Any) -> Any:
    @functools.wraps(original)
    def get_kv_cache_spec(layer: Any, vllm_config: Any) -> Any:
        spec = original(layer, vllm_config)
        if spec is None:
            return None
        if isinstance(layer.impl, KvqImpl):
            return layer.impl.spec(layer, spec)
        if wanted_format(vllm_config) is not None:
            raise ConfigError(
                f"vLLM took {layer.attn_backend.get_name()} for a layer, not kvq; if another model "
                "was loaded before in this process, start anew"
            )
        return spec

    return get_kv_cache_spec


class _ImplOptions(TypedDict, total=False):
    """Arguments of vLLM's `AttentionImpl` after `num_kv_heads`, in order."""

    alibi_slopes: list[float] | None
    sliding_window: int | None
    kv_cache_dtype: str
    logits_soft_cap: float | None
    attn_type: str
    kv_sharing_target_layer_name: str | None
    sinks: Tensor | None


_DEFAULTS = _ImplOptions(
    alibi_slopes=None,
    sliding_window=None,
    kv_cache_dtype="auto",
    logits_soft_cap=None,
    attn_type=AttentionType.DECODER,
    kv_sharing_target_layer_name=None,
    sinks=None,
)


class KvqImpl(AttentionImpl):
    """Attention of one layer over kvq's codes in vLLM's pages."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        *positional: Any,
        **named: Unpack[_ImplOptions],
    ) -> None:
        """Accept vLLM's arguments for a layer; `positional` follows the order of `_ImplOptions`.

        Raises:
            ConfigError: kvq has no kernel for the attention of this layer.
        """
        in_order = cast("_ImplOptions", dict(zip(_DEFAULTS, positional, strict=False)))
        options: _ImplOptions = {**_DEFAULTS, **in_order, **named}
        attn_type, has_alibi = options["attn_type"], options["alibi_slopes"] is not None
        if has_alibi or attn_type != AttentionType.DECODER:
            what = "ALiBi" if has_alibi else f"{attn_type} attention"
            raise ConfigError(f"kvq has no kernel for {what}; leave kvq's format out for this model")
        config = get_current_vllm_config()
        name = wanted_format(config)
        assert name is not None, "else vLLM's own was taken"
        self._name, self._num_layers = name, config.model_config.get_total_num_hidden_layers()
        self._model: str | None = str(config.model_config.model)  # None once the check result is logged
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads or num_heads
        self.head_size, self.scale = head_size, float(scale)
        self.sliding_window, self.kv_cache_dtype = options["sliding_window"], options["kv_cache_dtype"]
        self.kv_sharing_target_layer_name = options["kv_sharing_target_layer_name"]
        self.sinks = options["sinks"]
        self._softcap = options["logits_soft_cap"] or None
        self._store: tuple[Any, PagedStore] | None = None
        self._share = get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()

    def page(self, layer: Any, block_size: int) -> Page:
        """Return the layout of this layer's pages."""
        dims = self.head_size, getattr(layer, "head_size_v", None) or self.head_size
        recipe = recipe_of(self._name, dims, self._num_layers).share(*self._share)
        index = extract_layer_index(self.kv_sharing_target_layer_name or layer.layer_name)
        if index == 0 and self._model is not None:
            say_checked(self._model, self._name)
            self._model = None
        return Page.of(recipe, index, self.num_kv_heads, block_size, dims)

    def spec(self, layer: Any, spec: AttentionSpec) -> AttentionSpec:
        """Return vLLM's spec of the layer's blocks, changed to the byte size of kvq's blocks."""
        cells = self.page(layer, spec.block_size).cell_bytes
        return replace(spec, dtype=torch.uint8, state_content_bytes=cells)

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Metadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Write the attention output of the step's tokens, [tokens, heads, dim], into `output`."""
        if output_scale is not None or output_block_scale is not None:
            raise ConfigError("kvq's attention gives no quantized outputs")
        if attn_metadata is None:  # a run that only measures the memory use of a step
            return output
        count = attn_metadata.num_actual_tokens
        out, _ = self._over(layer, kv_cache).attend(query[:count], attn_metadata.batch, self._options)
        output[:count].view_as(out).copy_(out)
        return output

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Quantize the step's K and V, and write them to their slots in the cache."""
        store, count = self._over(layer, kv_cache), min(len(slot_mapping), len(key))
        k, v, slots = key[:count], value[:count], slot_mapping[:count]
        if slots.device.type == "cpu":  # on GPUs, the kernel checks the slots itself
            k, v, slots = with_slots(k, v, slots)
        store.write(k, v, slots)

    @functools.cached_property
    def _options(self) -> AttentionOptions:
        sinks = None if self.sinks is None else self.sinks.float()
        return AttentionOptions(
            scale=self.scale, window=self.sliding_window, softcap=self._softcap, sinks=sinks
        )

    def _over(self, layer: Any, pages: Tensor) -> PagedStore:
        """Return the layer's store; create a new store if vLLM passes different pages."""
        name = pages.data_ptr(), pages.shape
        if self._store is None or self._store[0] != name:
            if not hasattr(type(layer).get_kv_cache_spec, "__wrapped__"):
                raise ConfigError(
                    f"kvq has no kernel for vLLM's {type(layer).__name__}; leave kvq's format out"
                )
            pages = pages.view(torch.uint8)
            page = self.page(layer, pages.shape[2])
            self._store = name, page.store(pages, self.num_heads, self._softcap)
        return self._store[1]
