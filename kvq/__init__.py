"""kvq: quantized, block-managed KV caches for language models, and what they cost.

    import kvq

    model = kvq.load("tiny", kv="int4")
    rows = kvq.perplexity("tiny", kv=["fp32", "int8", "int4"])
    outputs = kvq.LLM("tiny", kv="int4").generate("Once upon", kvq.SamplingParams(max_tokens=64))

Importing kvq loads nothing else: torch and transformers are imported when a name that needs them is first
used.
"""

import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING

from kvq.errors import (
    BrokenFormat,
    ConfigError,
    EngineError,
    KVQError,
    ModelError,
    NumericalError,
    OutOfBlocks,
    OutOfMemory,
    Overloaded,
    RequestError,
    UnsupportedKernel,
)
from kvq.lazy import lazily
from kvq.version import __version__

if TYPE_CHECKING:
    from kvq.api import load, perplexity, quantize, tune
    from kvq.calib import calibrate
    from kvq.capacity.plan.plan import plan
    from kvq.engine import LLM, AsyncLLM, SamplingParams, StructuredOutput
    from kvq.formats import KVRecipe
    from kvq.kernels.codec.own import register_format
    from kvq.models import Model
    from kvq.models.check.hf_check import check
else:
    __getattr__ = lazily(
        __name__,
        {
            "kvq.api": ("load", "perplexity", "quantize", "tune"),
            "kvq.calib": ("calibrate",),
            "kvq.capacity.plan.plan": ("plan",),
            "kvq.engine": ("LLM", "AsyncLLM", "SamplingParams", "StructuredOutput"),
            "kvq.formats": ("KVRecipe",),
            "kvq.kernels.codec.own": ("register_format",),
            "kvq.models": ("Model",),
            "kvq.models.check.hf_check": ("check",),
        },
    )

__all__ = [
    "LLM", "AsyncLLM", "BrokenFormat", "ConfigError", "EngineError", "KVQError", "KVRecipe", "Model",
    "ModelError", "NumericalError", "OutOfBlocks", "OutOfMemory", "Overloaded", "RequestError",
    "SamplingParams", "StructuredOutput", "UnsupportedKernel", "__version__", "calibrate", "check", "load",
    "perplexity", "plan", "quantize", "register_format", "tune",
]  # fmt: skip


def __dir__() -> list[str]:
    return __all__


# D111: libgomp's team does not survive a fork
if hasattr(os, "register_at_fork"):  # a child process would wait for torch threads that it doesn't have
    os.register_at_fork(
        before=lambda: "torch" in sys.modules and import_module("kvq.kernels.other_threads").end_team()
    )
