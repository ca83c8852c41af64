"""kvq: quantized, block-managed KV caches for language models, and what they cost.

    import kvq

    model = kvq.load("tiny", kv="int4")
    rows = kvq.perplexity("tiny", kv=["fp32", "int8", "int4"])
    outputs = kvq.LLM("tiny", kv="int4").generate("Once upon", kvq.SamplingParams(max_tokens=64))

Importing kvq loads nothing else: torch and transformers come with the first name that needs them.
"""

from typing import TYPE_CHECKING, Any

from kvq.errors import (
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
from kvq.version import __version__

if TYPE_CHECKING:
    from kvq.api import load, perplexity, quantize, tune
    from kvq.calib import calibrate
    from kvq.capacity.plan.plan import plan
    from kvq.engine import LLM, AsyncLLM, SamplingParams, StructuredOutput
    from kvq.formats import KVRecipe
    from kvq.models import Model

_HOMES = {
    "AsyncLLM": "kvq.engine",
    "KVRecipe": "kvq.formats",
    "LLM": "kvq.engine",
    "Model": "kvq.models",
    "SamplingParams": "kvq.engine",
    "StructuredOutput": "kvq.engine",
    "calibrate": "kvq.calib",
    "load": "kvq.api",
    "perplexity": "kvq.api",
    "plan": "kvq.capacity.plan.plan",
    "quantize": "kvq.api",
    "tune": "kvq.api",
}

__all__ = [
    "LLM",
    "AsyncLLM",
    "ConfigError",
    "EngineError",
    "KVQError",
    "KVRecipe",
    "Model",
    "ModelError",
    "NumericalError",
    "OutOfBlocks",
    "OutOfMemory",
    "Overloaded",
    "RequestError",
    "SamplingParams",
    "StructuredOutput",
    "UnsupportedKernel",
    "__version__",
    "calibrate",
    "load",
    "perplexity",
    "plan",
    "quantize",
    "tune",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'kvq' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
