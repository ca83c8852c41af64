"""vLLM in a plan, with kvq's plug-in or with its own cache: its settings, and its blocks.

Source: v1/worker/gpu_worker.py, v1/core/kv_cache_utils.py and engine/arg_utils.py of vLLM 0.32; 0.33 counts
the same.
"""

import math
from dataclasses import dataclass

from kvq.capacity.lengths import Demand
from kvq.capacity.plan.gpus import Gpu
from kvq.capacity.plan.room import EngineSettings, Pools, Room, VllmCache, does_not_fit
from kvq.capacity.plan.target import Target
from kvq.capacity.plan.users import Users
from kvq.capacity.plan.vllm_blocks import VllmBlocks
from kvq.errors import ConfigError
from kvq.formats.names import FOREIGN_NAMES, VLLM_FILE_PREFIX, VLLM_PREFIX
from kvq.geometry.families import SIZED
from kvq.layout import KVLayout
from kvq.sizes import decimal
from kvq.sizing.held import PLAIN
from kvq.sizing.memory import Term

BLOCK_SIZE, GPU_FRACTION = 16, 0.92  # vLLM's defaults on GPUs
OWN_TYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}  # of vLLM's own cache, and its names


def own_type(kv: str) -> str | None:
    """Return the type of vLLM's own cache that a format's name stands for; None for a format of kvq."""
    name = FOREIGN_NAMES.get(kv, kv)
    return name if name in OWN_TYPES else None


def cache_dtype(kv: str) -> str:
    """Return the name of a format of kvq in `--kv-cache-dtype`."""
    return (VLLM_FILE_PREFIX if kv.endswith(".json") else VLLM_PREFIX) + kv


def batch_defaults(gpu: Gpu) -> tuple[int, int]:
    """Return `vllm serve`'s most new tokens of a step and most concurrent sequences on a GPU."""
    gib = gpu.memory_bytes / 2**30
    if gib >= 160:
        return 16384, 1024
    return (8192, 1024) if gib >= 70 and "a100" not in gpu.name.lower() else (2048, 256)


@dataclass(frozen=True, kw_only=True, slots=True)
class VllmEngine(EngineSettings):
    """Settings of vLLM; `on` returns those of `vllm serve` without options."""

    block_size: int = BLOCK_SIZE
    step_tokens: int = 2048
    memory_fraction: float = GPU_FRACTION  # of all of the GPU
    kv_memory: int | None = None  # bytes of all blocks, instead of what that leaves
    steps_at_work: int = 2  # at a time, where scheduling is asynchronous; 1 on CPUs

    @classmethod
    def on(cls, gpu: Gpu) -> "VllmEngine":
        """Return the settings of `vllm serve` without options on such a GPU."""
        return cls(step_tokens=batch_defaults(gpu)[0])

    def budget(self, total_bytes: int, *, taken_bytes: int, activation_bytes: int) -> int:
        """Return the bytes left by weights, runtime and a step in vLLM's share of the GPU, or `kv_memory`."""
        if self.kv_memory is not None:
            return self.kv_memory
        return math.ceil(total_bytes * self.memory_fraction) - taken_bytes - activation_bytes

    def pools(self, target: Target, gpu: Gpu, layout: KVLayout, demand: Demand) -> Pools:
        """Plan the one pool that all layers share.

        Raises:
            ConfigError: what vLLM or the plug-in does not serve, and what doesn't fit.
        """
        _check_served(target, layout)
        blocks = VllmBlocks.of(layout, in_flight=self.steps_at_work * self.step_tokens)
        room = Room.of(target, gpu, self)
        count = room.pool_bytes // blocks.block_bytes
        if count < 1:
            raise ConfigError(does_not_fit(target, gpu, self, room, blocks.block_bytes))
        self._check_given(gpu, room)
        pool = _pool_term(blocks, count)
        return Pools(
            terms=room.with_pool(pool, self._why_free(room)),
            block_bytes=blocks.block_bytes,
            num_blocks=(count,),
            step_tokens=self.step_tokens,
            users=self._users(blocks, count, layout, demand),
            vllm=self._cache(blocks, count, target),
        )

    def _check_given(self, gpu: Gpu, room: Room) -> None:
        rest = room.free_bytes - room.activation_bytes
        if room.pool_bytes > rest:
            raise ConfigError(
                f"{decimal(room.pool_bytes)} for KV are more than the {decimal(max(0, rest))} that weights, "
                f"activations and runtime leave of {gpu.name}"
            )

    def _why_free(self, room: Room) -> str:
        if self.kv_memory is not None:
            return "not given to KV: graphs, logits, fragments"
        return f"{1 - self.memory_fraction:.3g} of {room.total_bytes:,} B, and a part of a block"

    def _users(self, blocks: VllmBlocks, count: int, layout: KVLayout, demand: Demand) -> Users:
        slots = count * blocks.block_bytes / (layout.kv_bytes_per_token * demand.slot)
        paged = blocks.users(count, demand)
        return Users(
            paged=min(paged, self.sequences or paged),
            contiguous=min(int(slots), self.sequences or int(slots)),
            bytes_per_request=blocks.request_bytes(demand),
        )

    def _cache(self, blocks: VllmBlocks, count: int, target: Target) -> VllmCache:
        """Return the figures that vLLM prints. It starts only if a request of full length fits."""
        most = self.max_context or target.geometry.max_context
        one = blocks.held(most)
        if count <= one:
            raise ConfigError(
                f"vLLM does not start: one request of {most:,} tokens takes {one:,} blocks, and there are "
                f"{count - 1:,}; give --max-model-len {blocks.longest(count, most)} or less, narrower KV, "
                f"narrower weights (--weights int4), or more GPUs (--tensor-parallel)"
            )
        return VllmCache(num_gpu_blocks=count, max_model_len=most, max_concurrency=count / one)


def _pool_term(blocks: VllmBlocks, count: int) -> Term:
    formula = f"{count:,} x {blocks.block_bytes:,} B, blocks of {blocks.block_size} tokens"
    if len(blocks.groups) > 1:
        layers = " + ".join(str(count) for _, count in blocks.groups)
        formula += f", shared by groups of {layers} layers"
    return Term(name="KV pool", nbytes=count * blocks.block_bytes, formula=formula)


def _check_served(target: Target, layout: KVLayout) -> None:
    """Raise ConfigError for what vLLM, or the plug-in in it, does not serve as it is counted here."""
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
