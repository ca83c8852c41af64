"""vLLM plug-in, which runs in every process that loads vLLM's plug-ins."""

import logging
import os
from importlib import import_module
from typing import Any

from kvq.errors import KVQError
from kvq.extras import vllm_version
from kvq.integrations.vllm.names import NAMES, is_own, without_prefix

SUPPORTED = ("0.32", "0.33")  # 0.32 runs in the tests; Python code of 0.33 ran on a GPU (docs/scale.md)
_ASKED = "KVQ_VLLM_KV_CACHE_DTYPE"  # environment variable
_log = logging.getLogger("vllm.kvq")


def register() -> None:
    """Replace the platform's attention with kvq's for models that request kvq's formats.

    With an unsupported version of vLLM, change nothing and log a warning.
    """
    found = vllm_version()
    if not found.startswith(SUPPORTED):
        _log.warning(
            "kvq's formats are not registered: vLLM %s is installed, kvq runs inside %s",
            found,
            " and ".join(f"{x}.x" for x in SUPPORTED),
        )
        return
    from vllm.platforms import current_platform

    if not (current_platform.is_cpu() or current_platform.is_cuda()):
        _log.warning("kvq's formats are not registered: inside vLLM kvq runs on CPUs and NVIDIA's GPUs")
        return
    register_names()
    name = "cpu_backend" if current_platform.is_cpu() else "gpu_backend"
    import_module(f"kvq.integrations.vllm.{name}").register()


def register_names() -> None:
    """Make `--kv-cache-dtype` accept kvq's names if vLLM lets plug-ins add names (from 0.33 on).

    File names, and formats with other group sizes, are added when requested.
    """
    from vllm.config import cache

    if not hasattr(cache, "register_kv_cache_dtype"):
        return
    inherited = os.environ.get(_ASKED)
    for name in (*NAMES, *([inherited] if inherited else [])):
        _register_name(cache, name)
    known = cache.is_known_kv_cache_dtype

    def is_known(name: str) -> bool:
        if is_own(name) and not known(name) and _is_right(name):
            _register_name(cache, name)
            os.environ[_ASKED] = name  # inherited by the processes that vLLM starts
        return bool(known(name))

    if not getattr(known, "is_kvqs", False):
        is_known.is_kvqs = True  # type: ignore[attr-defined]  # plug-ins may be loaded twice
        cache.is_known_kv_cache_dtype = is_known


def _is_right(name: str) -> bool:
    from kvq.formats import KVRecipe

    try:
        KVRecipe.named(without_prefix(name), [(128, 128)])
    except KVQError as error:
        _log.error("%s: %s", name, error)
        return False
    return True


def _register_name(cache: Any, name: str) -> None:
    import torch
    from vllm.v1.kv_cache_interface import KVQuantMode

    class _Handler:
        def torch_dtype(self) -> torch.dtype:
            return torch.uint8

        def quant_mode(self) -> Any:
            return KVQuantMode.CUSTOM

    _Handler.name = name  # type: ignore[attr-defined]
    if not cache.is_known_kv_cache_dtype(name):
        cache.register_kv_cache_dtype(name)(_Handler)
