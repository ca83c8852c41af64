"""CPU backend for vLLM: kvq's C++ kernels replace vLLM's attention on CPUs."""

from typing import Any

from vllm.config import VllmConfig, get_current_vllm_config
from vllm.v1.attention.backend import AttentionImpl, AttentionMetadataBuilder, CommonAttentionMetadata
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionMetadataBuilder
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from kvq.integrations.vllm.backend import KvqImpl, let_layers_say_their_bytes, metadata_of, wanted_format


class KvqCpuBackend(CPUAttentionBackend):
    """vLLM's CPU backend, except for models that request one of kvq's formats."""

    @classmethod
    def supports_kv_cache_dtype(cls, kv_cache_dtype: Any) -> bool:
        """Return True for vLLM's and kvq's formats."""
        return wanted_format(get_current_vllm_config()) is not None or super().supports_kv_cache_dtype(
            kv_cache_dtype
        )

    @classmethod
    def supports_sink(cls) -> bool:
        """Return True: both vLLM and kvq have a kernel with support for sinks."""
        return True

    @staticmethod
    def get_impl_cls() -> type[AttentionImpl]:
        """Return kvq's implementation if the model being built requests a kvq format, else vLLM's."""
        is_own = wanted_format(get_current_vllm_config()) is not None
        return KvqImpl if is_own else CPUAttentionBackend.get_impl_cls()

    @staticmethod
    def get_builder_cls() -> type[AttentionMetadataBuilder]:
        """Return a builder that acts like vLLM's own unless a kvq format is requested."""
        return _CpuBuilder


class _CpuBuilder(CPUAttentionMetadataBuilder):
    """Builder of step metadata for kvq's kernels if a kvq format is requested, else for vLLM's kernels.

    One class handles both, because vLLM derives other builders from it (encoder, chunked, cross attention).
    """

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: VllmConfig, device: Any
    ) -> None:
        self._is_own = wanted_format(vllm_config) is not None
        begin = AttentionMetadataBuilder if self._is_own else CPUAttentionMetadataBuilder
        begin.__init__(self, kv_cache_spec, layer_names, vllm_config, device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> Any:
        """Return the metadata of a step. On a CPU, all tensors are on the host."""
        if not self._is_own:
            return super().build(common_prefix_len, common_attn_metadata, fast_build)
        return metadata_of(common_attn_metadata, common_attn_metadata.seq_lens.tolist())


def register() -> None:
    """Override vLLM's CPU backend."""
    register_backend(AttentionBackendEnum.CPU_ATTN)(KvqCpuBackend)
    let_layers_say_their_bytes()
