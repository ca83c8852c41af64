"""GPU backend for vLLM: kvq's Triton kernels, for models that request one of kvq's formats."""

from collections.abc import Callable
from typing import Any, ClassVar, ParamSpec

import torch
from torch import Tensor
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.platforms import current_platform
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
    MultipleOf,
)
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.kv_cache_layout import KVCacheLayout

from kvq.errors import ConfigError
from kvq.integrations.vllm.backend import (
    KvqImpl,
    Metadata,
    let_layers_say_their_bytes,
    metadata_of,
    wanted_format,
)
from kvq.layout import UNPADDED_TOKENS

P = ParamSpec("P")
_NAME = "CUSTOM"  # vLLM's name for a backend that isn't its own


class KvqGpuBackend(AttentionBackend):
    """Backend for models that request one of kvq's formats; other models never use it."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    forward_includes_kv_cache_update = False

    @staticmethod
    def get_name() -> str:
        """Return the backend's name in vLLM's registry."""
        return _NAME

    @staticmethod
    def get_impl_cls() -> type[AttentionImpl]:
        """Return the class of a layer's attention."""
        return KvqImpl

    @staticmethod
    def get_builder_cls() -> type[AttentionMetadataBuilder]:
        """Return the class that builds a step's metadata."""
        return _KvqGpuBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        """Return the page size as the only block size, since pages can't be divided."""
        size = kv_cache_spec.block_size if kv_cache_spec is not None else None
        return [MultipleOf(UNPADDED_TOKENS) if size is None else size]

    @classmethod
    def supports_block_size(cls, block_size: int | None) -> bool:
        """Return True for multiples of `UNPADDED_TOKENS`."""
        return block_size is None or block_size % UNPADDED_TOKENS == 0

    @classmethod
    def supports_kv_cache_dtype(cls, kv_cache_dtype: Any) -> bool:
        """Return True if a kvq format is requested."""
        return wanted_format(get_current_vllm_config()) is not None

    @classmethod
    def supports_sink(cls) -> bool:
        """Return True: the kernels support sinks."""
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        """Return True: the kernels skip tokens outside the window."""
        return True

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        """Return False: kernel launches depend on the lengths on the host."""
        return False

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        """Return the layout of separate layers and contiguous pages; vLLM groups unequal pages as on CPUs."""
        return (KVCacheLayout.LBHNC,)


class _KvqGpuBuilder(AttentionMetadataBuilder[Metadata]):
    """Builder of step metadata for kvq's kernels; owns the tensors that captured graphs read."""

    _cudagraph_support = AttentionCGSupport.UNIFORM_BATCH  # grids depend on the numbers of new tokens

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: VllmConfig, device: Any):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        most = vllm_config.scheduler_config.max_num_seqs
        self._lens = torch.zeros(3, most, dtype=torch.int32, device=device)
        self._longest = vllm_config.model_config.max_model_len

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> Metadata:
        """Return the metadata of a step, without waiting for the device."""
        known = common_attn_metadata.seq_lens_cpu_upper_bound
        if known is None:
            return self.build_for_cudagraph_capture(common_attn_metadata)
        lens = self._filled(common_attn_metadata)
        return metadata_of(common_attn_metadata, known.tolist(), lens=lens)

    # D343: only uniform batches; lengths in one place
    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> Metadata:
        """Return the metadata of a step to capture, or of a step whose contexts are unknown on the host."""
        return metadata_of(
            common_attn_metadata,
            [self._longest] * common_attn_metadata.num_reqs,
            lens=self._filled(common_attn_metadata),
            is_exact=False,
        )

    def _filled(self, common: CommonAttentionMetadata) -> Tensor:
        """Return the `lens` that graphs read in this step, int32 [3, requests]; padding has no new tokens."""
        count = common.num_reqs
        if count > self._lens.shape[1]:
            raise ConfigError(f"vLLM has {count} requests in a step, --max-num-seqs is {self._lens.shape[1]}")
        lens, starts = self._lens[:, :count], common.query_start_loc
        lens[0].copy_(starts[:count])
        torch.sub(starts[1 : count + 1], starts[:count], out=lens[1])
        lens[2].copy_(common.seq_lens[:count])
        return lens


def register() -> None:  # D342: get_attn_backend_cls is wrapped: overriding leaves "auto" open
    """Register the backend, and make vLLM use it for all layers of models that request kvq's formats."""
    path = f"{KvqGpuBackend.__module__}.{KvqGpuBackend.__qualname__}"
    register_backend(AttentionBackendEnum[_NAME], path)
    let_layers_say_their_bytes()
    platform: Any = type(current_platform)
    if not getattr(platform.get_attn_backend_cls, "is_kvqs", False):  # plug-ins may be loaded twice
        platform.get_attn_backend_cls = classmethod(_choosing(platform.get_attn_backend_cls, path))


def _choosing(chosen: Callable[P, Any], path: str) -> Any:
    """Return vLLM's selector `chosen`, wrapped to select kvq's backend if a kvq format is requested."""

    def get_attn_backend_cls(cls: Any, *args: P.args, **named: P.kwargs) -> str:
        if wanted_format(get_current_vllm_config()) is None:
            return str(chosen(*args, **named))
        given: Any = {**dict(zip(("selected_backend", "attn_selector_config"), args, strict=False)), **named}
        require_own(given["selected_backend"], given["attn_selector_config"], cls.get_device_capability())
        return path

    get_attn_backend_cls.is_kvqs = True  # type: ignore[attr-defined]
    return get_attn_backend_cls


def require_own(selected: Any, selector: Any, capability: Any) -> None:
    """Refuse layers that kvq's kernels do not support.

    Raises:
        ConfigError: vLLM finds the layer unsupported by the backend, or another backend was requested.
    """
    if selected is not None and selected.name != _NAME:
        raise ConfigError(
            f"--attention-backend {selected.name} has blocks that are not kvq's; leave it or kvq's format out"
        )
    reasons = KvqGpuBackend.validate_configuration(device_capability=capability, **selector._asdict())
    if reasons:
        raise ConfigError(f"this model can't have kvq's formats in vLLM: {', '.join(reasons)}")
