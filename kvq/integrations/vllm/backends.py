"""Which of vLLM's backends kvq stands in for, by platform, and how layers say what their blocks take."""

import functools
from typing import Any

_OWN = "kvq.integrations.vllm."


def register() -> None:
    """Override the platform's backend, and ask kvq's layers themselves for the bytes of their blocks.

    vLLM asks a backend, which doesn't know for which layer; formats may differ from layer to layer.
    """
    from vllm.model_executor.layers.attention import Attention
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    if current_platform.is_cpu():
        register_backend(AttentionBackendEnum.CPU_ATTN, _OWN + "cpu_backend.KvqCpuBackend")
    if not hasattr(Attention.get_kv_cache_spec, "__wrapped__"):  # plug-ins may be loaded twice
        Attention.get_kv_cache_spec = _with_own_bytes(Attention.get_kv_cache_spec)


def _with_own_bytes(original: Any) -> Any:
    @functools.wraps(original)
    def get_kv_cache_spec(layer: Any, vllm_config: Any) -> Any:
        spec = original(layer, vllm_config)
        own = getattr(layer.impl, "spec", None)
        return spec if spec is None or own is None else own(layer, spec)

    return get_kv_cache_spec
