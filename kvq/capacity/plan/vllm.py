"""vLLM in a capacity plan, with kvq's plug-in or vLLM's own cache: its settings and its blocks.

A page is one layer's part of a block, as large as in kvq's own blocks. If all layers have full attention or
the same window, they form one group. Otherwise, layers are sorted by kind, and each kind is split into groups
of about equal numbers of layers. All groups allocate from one pool: a block is as large as the pages of the
largest group, and a request needs blocks for every group. Pages are therefore made equally large, with more
tokens per page if the sizes divide evenly, otherwise with padding.

Source: v1/worker/gpu_worker.py, v1/core/kv_cache_utils.py, v1/kv_cache_interface.py and engine/arg_utils.py
of vLLM 0.32; 0.33 counts the same.
"""

import math
from bisect import bisect_right
from collections import Counter
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from kvq.capacity.lengths import Demand
from kvq.capacity.plan.gpus import Gpu
from kvq.capacity.plan.memory import Engine, Users, does_not_fit
from kvq.capacity.plan.target import Target
from kvq.errors import ConfigError
from kvq.formats.names import FOREIGN_NAMES, VLLM_FILE_PREFIX, VLLM_PREFIX
from kvq.geometry.families import SIZED
from kvq.layout import UNPADDED_TOKENS, KVLayout, LayerLayout
from kvq.sizes import decimal
from kvq.sizing.held import PLAIN
from kvq.sizing.memory import Term

BLOCK_SIZE, GPU_FRACTION = 16, 0.92  # vLLM's defaults on GPUs
_FEW_MORE = 1.5  # below this ratio of the largest to the smallest kind, groups are as large as the largest
OWN_TYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}  # dtypes of vLLM's own cache


def own_type(kv: str) -> str | None:
    """Return the name of a dtype of vLLM's own cache, or None if `kv` is a kvq format."""
    name = FOREIGN_NAMES.get(kv, kv)
    return name if name in OWN_TYPES else None


def cache_dtype(kv: str) -> str:
    """Return the value of vLLM's `--kv-cache-dtype` for a kvq format."""
    return (VLLM_FILE_PREFIX if kv.endswith(".json") else VLLM_PREFIX) + kv


def batch_defaults(gpu: Gpu) -> tuple[int, int]:
    """Return the default maximum numbers of new tokens per step and concurrent sequences in `vllm serve`."""
    gib = gpu.memory_bytes / 2**30
    if gib >= 160:
        return 16384, 1024
    return (8192, 1024) if gib >= 70 and "a100" not in gpu.name.lower() else (2048, 256)


@dataclass(frozen=True, kw_only=True, slots=True)
class _LayerKind:
    """Properties common to all layers of a group."""

    window: int | None  # tokens; None: full attention
    block_size: int  # tokens
    head_dims: tuple[int, int] = (0, 0)  # of K and V
    page_bytes: int = 0  # without padding

    @classmethod
    def of(cls, layer: LayerLayout, block_size: int, largest: int) -> "_LayerKind":
        """Return the kind of a layer in a model with pages up to `largest` bytes."""
        times = 1 if largest % layer.nbytes else largest // layer.nbytes
        return cls(
            window=layer.geometry.window,
            block_size=times * block_size,
            head_dims=(layer.geometry.k_head_dim, layer.geometry.v_head_dim),
            page_bytes=times * layer.nbytes,
        )

    def held(self, tokens: int, in_flight: int) -> int:
        """Return the number of blocks of a request; a window that begins inside a block needs one more."""
        if self.window is None:
            return -(-tokens // self.block_size)
        return -(-min(self.window - 1 + in_flight, tokens) // self.block_size) + 1


@dataclass(frozen=True, kw_only=True, slots=True)
class _VllmBlocks:
    """vLLM's blocks of one model in one format."""

    groups: tuple[tuple[_LayerKind, int], ...]  # each with its number of layers
    block_size: int  # tokens
    block_bytes: int
    in_flight: int  # new tokens of all steps in flight; their blocks are kept even outside windows

    @classmethod
    def of(cls, layout: KVLayout, *, in_flight: int) -> "_VllmBlocks":
        """Return the blocks of a layout's layers.

        Raises:
            ConfigError: the block size is not a multiple of `UNPADDED_TOKENS`.
        """
        size = layout.block_size
        if size % UNPADDED_TOKENS:
            raise ConfigError(f"vLLM's blocks are of a multiple of {UNPADDED_TOKENS} tokens, got {size}")
        layers = [layer for group in layout.groups for layer in group.layers]
        if len(layout.groups) == 1:
            kind = _LayerKind(window=layout.groups[0].group.window, block_size=size)
            groups, block_bytes = [(kind, len(layers))], sum(layer.nbytes for layer in layers)
        else:
            largest = max(layer.nbytes for layer in layers)
            groups = group_layers(Counter(_LayerKind.of(layer, size, largest) for layer in layers))
            block_bytes = largest * max(count for _, count in groups)
        return cls(groups=tuple(groups), block_size=size, block_bytes=block_bytes, in_flight=in_flight)

    def held(self, tokens: int) -> int:
        """Return the number of blocks in all groups that vLLM reserves for a request of `tokens` tokens."""
        return sum(kind.held(tokens, self.in_flight) for kind, _ in self.groups)

    def longest(self, num_blocks: int, most: int) -> int:
        """Return the largest maximum length, up to `most`, with which vLLM starts; one block stays free."""
        return bisect_right(range(1, most + 1), num_blocks - 1, key=self.held)

    def users(self, num_blocks: int, demand: Demand) -> int:
        """Return the number of requests that fit; full-attention layers store a shared prefix once."""
        held = [self.held(length.total) for length in demand.lengths]
        whole = [kind.block_size for kind, _ in self.groups if kind.window is None]  # tokens of a block
        prefixes = [int(length.prompt * demand.prefix_share) for length in demand.lengths]
        shared = [sum(tokens // size for size in whole) for tokens in prefixes]
        common = max(shared)
        each = fmean([blocks - (common and own) for blocks, own in zip(held, shared, strict=True)])
        return max(0, int((num_blocks - 1 - common) / each))

    def request_bytes(self, demand: Demand) -> float:
        """Return the mean number of bytes of a request's blocks."""
        return self.block_bytes * fmean([self.held(length.total) for length in demand.lengths])


@dataclass(frozen=True, kw_only=True, slots=True)
class VllmEngine(Engine):
    """Settings of vLLM; `on` returns the defaults of `vllm serve`."""

    block_size: int = BLOCK_SIZE
    step_tokens: int = 2048
    memory_fraction: float = GPU_FRACTION  # of the GPU's total memory
    kv_memory: int | None = None  # bytes of all blocks; overrides `memory_fraction`
    steps_at_work: int = 2  # number of steps in flight with asynchronous scheduling; 1 on CPUs

    @classmethod
    def on(cls, gpu: Gpu) -> "VllmEngine":
        """Return the default settings of `vllm serve` on a GPU."""
        return cls(step_tokens=batch_defaults(gpu)[0])

    def budget(self, total_bytes: int, *, taken_bytes: int, activation_bytes: int) -> int:
        """Return `kv_memory`, or what weights, runtime and activations leave of vLLM's share of the GPU."""
        if self.kv_memory is not None:
            return self.kv_memory
        return math.ceil(total_bytes * self.memory_fraction) - taken_bytes - activation_bytes

    def pools(self, target: Target, gpu: Gpu, layout: KVLayout, demand: Demand) -> dict[str, Any]:
        """Plan the pool that all layers share; return fields of `CapacityPlan`.

        Raises:
            ConfigError: the model or format is not supported by vLLM or the plug-in, or doesn't fit.
        """
        _check_served(target, layout)
        blocks = _VllmBlocks.of(layout, in_flight=self.steps_at_work * self.step_tokens)
        room = self.room(target, gpu)
        count = room.pool_bytes // blocks.block_bytes
        if count < 1:
            raise ConfigError(does_not_fit(target, gpu, self, room, blocks.block_bytes))
        rest = room.free_bytes - room.activation_bytes
        if room.pool_bytes > rest:
            raise ConfigError(
                f"{decimal(room.pool_bytes)} for KV are more than the {decimal(max(0, rest))} that weights, "
                f"activations and runtime leave of {gpu.name}"
            )
        why_free = f"{1 - self.memory_fraction:.3g} of {gpu.memory_bytes:,} B, and a part of a block"
        if self.kv_memory is not None:
            why_free = "not given to KV: graphs, logits, fragments"
        return {
            "terms": room.with_pool(_pool_term(blocks, count), why_free),
            "block_bytes": blocks.block_bytes,
            "num_blocks": (count,),
            "step_tokens": self.step_tokens,
            "users": self._users(blocks, count, layout, demand),
            "vllm": self._cache(blocks, count, target),
        }

    def _users(self, blocks: _VllmBlocks, count: int, layout: KVLayout, demand: Demand) -> Users:
        slots = count * blocks.block_bytes / (layout.kv_bytes_per_token * demand.slot)
        paged = blocks.users(count, demand)
        return Users(
            paged=min(paged, self.sequences or paged),
            contiguous=min(int(slots), self.sequences or int(slots)),
            bytes_per_request=blocks.request_bytes(demand),
        )

    def _cache(self, blocks: _VllmBlocks, count: int, target: Target) -> dict[str, Any]:
        """Return the figures that vLLM prints; raise ConfigError if a full-length request doesn't fit."""
        most = self.max_context or target.geometry.max_context
        one = blocks.held(most)
        if count <= one:
            raise ConfigError(
                f"vLLM does not start: one request of {most:,} tokens takes {one:,} blocks, and there are "
                f"{count - 1:,}; give --max-model-len {blocks.longest(count, most)} or less, narrower KV, "
                f"narrower weights (--weights int4), or more GPUs (--tensor-parallel)"
            )
        return {
            "num_gpu_blocks": count,
            "kv_cache_tokens": int(count / one * most),  # vLLM's "GPU KV cache size"
            "max_model_len": most,
            "max_concurrency": count / one,  # requests of that length
        }


def _pool_term(blocks: _VllmBlocks, count: int) -> Term:
    formula = f"{count:,} x {blocks.block_bytes:,} B, blocks of {blocks.block_size} tokens"
    if len(blocks.groups) > 1:
        layers = " + ".join(str(count) for _, count in blocks.groups)
        formula += f", shared by groups of {layers} layers"
    return Term(name="KV pool", nbytes=count * blocks.block_bytes, formula=formula)


def _check_served(target: Target, layout: KVLayout) -> None:
    """Raise ConfigError for models and formats that vLLM or the plug-in does not serve as planned here."""
    geometry, split, recipe = target.geometry, target.split, layout.recipe
    if geometry.states:
        raise ConfigError(
            f"blocks that vLLM shares with the recurrent states of {target.name} are not planned"
        )
    if any(layer.is_latent for layer in geometry.layers):
        raise ConfigError(f"vLLM keeps latent vectors of {target.name}, for which kvq has no format there")
    if geometry.model_type in SIZED:
        raise ConfigError(f"vLLM attends in chunks in {target.name}, which kvq's plug-in does not")
    if split.pipeline > 1 and any(layer.window is not None for layer in geometry.layers):
        raise ConfigError("vLLM's groups of sliding layers are planned for --pipeline-parallel 1 only")
    for heads in {layer.kv_heads for layer in geometry.layers}:
        if heads % split.tensor and split.tensor % heads:
            raise ConfigError(
                f"vLLM shares or copies {heads} KV heads evenly, which {split.tensor} GPUs can't; take a "
                f"divisor or a multiple"
            )
    recipe.require_scales()
    recipe.check_unstaged("vLLM's cache")
    plain = own_type(recipe.label)
    if plain and PLAIN[plain].weight_bytes != target.held.other.weight_bytes:
        raise ConfigError(
            f"vLLM keeps its own cache in the model's type, {target.held.other.name}; for KV in {plain} give "
            f"--weights {plain}"
        )


def group_layers(kinds: Counter[_LayerKind]) -> list[tuple[_LayerKind, int]]:  # D278
    """Return groups with their numbers of layers; `kinds` maps each kind to its number of layers.

    A group is as large as the least frequent kind, or as the most frequent one if the two are similar.
    """
    size = min(kinds.values())
    if max(kinds.values()) < _FEW_MORE * size:
        size = max(kinds.values())
    groups = []
    for kind, count in kinds.items():
        num_groups = -(-count // size)
        groups += [(kind, len(range(i, count, num_groups))) for i in range(num_groups)]
    return groups
