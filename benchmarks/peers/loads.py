"""Loads that are measured, and the contenders of each."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvq.bench.engine.load import Load, ServedLoad
from kvq.capacity.lengths import Lengths
from kvq.scheduler import Priority

EXACT = ("fp32", "f32")  # as kvq and others call it


@dataclass(frozen=True, kw_only=True, slots=True)
class Contender:
    """An engine with its own names of the formats of weights and KV."""

    engine: str
    weights: str
    kv: str

    @property
    def name(self) -> str:
        """Name of the load for --only."""
        return f"{self.engine}/{self.weights}/{self.kv}"

    @property
    def is_exact(self) -> bool:
        """True if nothing but the order of sums may tell its tokens from the reference's."""
        return self.weights in EXACT and self.kv in EXACT


def contenders(engine: str, *formats: tuple[str, str]) -> tuple[Contender, ...]:
    """One for each pair of formats of weights and of KV."""
    return tuple(Contender(engine=engine, weights=weights, kv=kv) for weights, kv in formats)


def output_rate(run: ServedLoad) -> float:
    """Generated tokens a second, prefill included."""
    return run.output_tokens_per_s


def decode_rate(run: ServedLoad) -> float:
    """Tokens a second after the first one."""
    (one,) = run.served
    return len(one.itl_s) / sum(one.itl_s)


def prefill_rate(run: ServedLoad) -> float:
    """Prompt tokens a second until the first one was there."""
    (one,) = run.served
    return len(one.request.prompt) / one.ttft_s


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """One load: `requests` equal ones that arrive together."""

    requests: int
    prompt: int  # tokens
    output: int
    rate: Callable[[ServedLoad], float]
    contenders: tuple[Contender, ...]

    @property
    def tokens(self) -> int:
        """Tokens of one request when it ends."""
        return self.prompt + self.output

    def load(self, vocab_size: int, max_context: int) -> Load:
        """To draw prompts from."""
        return Load(
            num_requests=self.requests,
            input_lengths=Lengths(low=self.prompt, high=self.prompt),
            output_lengths=Lengths(low=self.output, high=self.output),
            vocab_size=vocab_size,
            max_context=max_context,
            priority=Priority.BATCH,
        )

    def facts(self) -> dict[str, Any]:
        """Return the load for JSON."""
        return {
            "requests": self.requests,
            "prompt_tokens": self.prompt,
            "output_tokens": self.output,
            "tokens_per_s": (self.rate.__doc__ or "").rstrip("."),
        }


_DECODE = (
    *contenders("kvq", ("fp32", "fp32"), ("fp32", "int8"), ("fp32", "int4")),
    *contenders("kvq", ("int8", "fp32"), ("int8", "int8"), ("int4", "fp32"), ("int4", "int4")),
    *contenders("kvq", ("fp8", "fp32"), ("w8a8", "fp32")),
    *contenders("openvino", ("fp32", "f32"), ("fp32", "u8"), ("fp32", "u4"), ("int8", "f32"), ("int8", "u8")),
    *contenders("llama.cpp", ("f32", "f16"), ("f32", "q8_0"), ("f32", "q4_0")),
    *contenders("llama.cpp", ("q8_0", "f16"), ("q8_0", "q8_0"), ("q4_0", "f16"), ("q4_0", "q4_0")),
)

PARTS = {
    "batch": Part(
        requests=16,
        prompt=128,
        output=64,
        rate=output_rate,
        contenders=(
            *contenders("kvq", ("fp32", "fp32"), ("fp32", "bf16"), ("fp32", "int8"), ("fp32", "int4")),
            *contenders("kvq", ("int8", "fp32"), ("int8", "int8")),
            *contenders("openvino", ("fp32", "f32"), ("fp32", "u8"), ("fp32", "u4")),
            *contenders("openvino", ("int8", "f32"), ("int8", "u8")),
            *contenders("transformers", ("fp32", "fp32")),
        ),
    ),
    "decode-128": Part(requests=1, prompt=128, output=65, rate=decode_rate, contenders=_DECODE),
    "decode-4096": Part(requests=1, prompt=4096, output=65, rate=decode_rate, contenders=_DECODE),
    "prefill": Part(
        requests=1,
        prompt=2048,
        output=1,
        rate=prefill_rate,
        contenders=(
            *contenders("kvq", ("fp32", "fp32"), ("fp32", "int8"), ("fp32", "int4")),
            *contenders("kvq", ("int8", "int8"), ("int4", "int4")),
            *contenders("openvino", ("fp32", "f32"), ("fp32", "u8"), ("int8", "u8")),
            *contenders("llama.cpp", ("f32", "f16"), ("q8_0", "f16"), ("q4_0", "f16")),
        ),
    ),
}
