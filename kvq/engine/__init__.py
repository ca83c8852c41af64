"""The engine: continuous batching over quantized blocks, offline and for asyncio."""

from kvq.engine.async_llm import AsyncLLM
from kvq.engine.config import EngineConfig
from kvq.engine.llm import LLM
from kvq.engine.outputs import CompletionOutput, Piece, Receipt, RequestOutput, Timing
from kvq.engine.params import PrefixPin, SamplingParams, StructuredOutput
from kvq.engine.publisher import StepStats
from kvq.engine.sampling import TokenLogprobs
from kvq.scheduler import Priority

__all__ = [
    "LLM",
    "AsyncLLM",
    "CompletionOutput",
    "EngineConfig",
    "Piece",
    "PrefixPin",
    "Priority",
    "Receipt",
    "RequestOutput",
    "SamplingParams",
    "StepStats",
    "StructuredOutput",
    "Timing",
    "TokenLogprobs",
]
