"""Engine with continuous batching over quantized blocks, for offline and asyncio use."""

from typing import TYPE_CHECKING

from kvq.lazy import lazily

if TYPE_CHECKING:
    from kvq.engine.async_llm import AsyncLLM
    from kvq.engine.config import EngineConfig
    from kvq.engine.llm import LLM
    from kvq.engine.params import PrefixPin, SamplingParams, StructuredOutput
    from kvq.engine.requests.outputs import (
        CompletionOutput,
        Piece,
        Receipt,
        RequestOutput,
        Timing,
        TokenLogprobs,
    )
    from kvq.engine.steps.publisher import StepStats
    from kvq.scheduler import Priority
else:
    __getattr__ = lazily(
        __name__,
        {
            "kvq.engine.async_llm": ("AsyncLLM",),
            "kvq.engine.config": ("EngineConfig",),
            "kvq.engine.llm": ("LLM",),
            "kvq.engine.requests.outputs": (
                "CompletionOutput",
                "Piece",
                "Receipt",
                "RequestOutput",
                "Timing",
                "TokenLogprobs",
            ),
            "kvq.engine.params": ("PrefixPin", "SamplingParams", "StructuredOutput"),
            "kvq.engine.steps.publisher": ("StepStats",),
            "kvq.scheduler": ("Priority",),
        },
    )

__all__ = [
    "LLM", "AsyncLLM", "CompletionOutput", "EngineConfig", "Piece", "PrefixPin", "Priority", "Receipt",
    "RequestOutput", "SamplingParams", "StepStats", "StructuredOutput", "Timing", "TokenLogprobs",
]  # fmt: skip
