"""kvq's C++ kernels in the place of vLLM's attention on CPUs."""

from typing import Any

from vllm.config import VllmConfig, get_current_vllm_config
from vllm.v1.attention.backend import AttentionImpl, AttentionMetadataBuilder, CommonAttentionMetadata
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionMetadataBuilder
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from kvq.integrations.vllm.backend import KvqImpl, Metadata, asked, let_layers_say_their_bytes, metadata_of


class KvqCpuBackend(CPUAttentionBackend):
    """vLLM's own, but for models that ask for one of kvq's formats."""

    @classmethod
    def supports_kv_cache_dtype(cls, kv_cache_dtype: Any) -> bool:
        """vLLM's, and kvq's."""
        return asked(get_current_vllm_config()) is not None or super().supports_kv_cache_dtype(kv_cache_dtype)

    @classmethod
    def supports_sink(cls) -> bool:
        """Both have a kernel for sinks."""
        return True

    @staticmethod
    def get_impl_cls() -> type[AttentionImpl]:
        """By what the model that is being built asks for."""
        is_own = asked(get_current_vllm_config()) is not None
        return KvqImpl if is_own else CPUAttentionBackend.get_impl_cls()

    @staticmethod
    def get_builder_cls() -> type[AttentionMetadataBuilder]:
        """One that is vLLM's own where nothing of kvq is asked for."""
        return KvqCpuBuilder


class KvqCpuBuilder(AttentionMetadataBuilder[Metadata]):
    """Steps as kvq's kernels take them."""

    def __new__(cls, spec: Any, names: list[str], vllm_config: VllmConfig, *rest: Any) -> Any:
        """vLLM's own builder for models that don't ask for kvq."""
        if asked(vllm_config) is None:
            return CPUAttentionMetadataBuilder(spec, names, vllm_config, *rest)
        return super().__new__(cls)

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: VllmConfig, device: Any
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> Metadata:
        """The step's requests; a CPU's tensors are the host's."""
        return metadata_of(common_attn_metadata, common_attn_metadata.seq_lens.tolist())


def register() -> None:
    """Override vLLM's backend for CPUs."""
    register_backend(AttentionBackendEnum.CPU_ATTN)(KvqCpuBackend)
    let_layers_say_their_bytes()
