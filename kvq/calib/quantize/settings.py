"""What a quantized checkpoint is made by."""

import hashlib
import json
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any

from kvq.errors import ConfigError
from kvq.formats.weights import Inputs, WeightCode, WeightFormat
from kvq.weights.gptq import GPTQOptions

MOST_SAMPLES = 1024
FEWEST_SAMPLES = 8


class Method(Enum):
    """How codes are chosen; the value is its name."""

    RTN = "rtn"  # to nearest, no data
    GPTQ = "gptq"
    AWQ = "awq"
    SMOOTHQUANT = "smoothquant"
    FP8 = "fp8"  # to nearest, no data

    @property
    def needs_text(self) -> bool:
        """True if the model has to run over a text."""
        return self not in (Method.RTN, Method.FP8)

    @property
    def folds(self) -> bool:
        """True if inputs are scaled."""
        return self in (Method.AWQ, Method.SMOOTHQUANT)


@dataclass(frozen=True, kw_only=True, slots=True)
class QuantizeSettings:
    """A method, the format it makes, and what it is calibrated on."""

    method: Method
    fmt: WeightFormat
    gptq: GPTQOptions = field(default_factory=GPTQOptions)
    alpha: float | None = None  # SmoothQuant's; None: the best of a grid
    samples: int = 128
    context: int | None = None  # tokens of a sample; None: 2,048 or what the model takes
    seed: int = 0  # of the choice of samples

    def __post_init__(self) -> None:
        if not FEWEST_SAMPLES <= self.samples <= MOST_SAMPLES:
            raise ConfigError(f"samples must be {FEWEST_SAMPLES} to {MOST_SAMPLES}, got {self.samples}")
        if self.context is not None and self.context < 2:
            raise ConfigError(f"context must be at least 2 tokens, got {self.context}; 2048 is usual")
        if self.alpha is not None and not 0 <= self.alpha <= 1:
            raise ConfigError(f"alpha must lie between 0 and 1, got {self.alpha}; 0.5 is usual")
        self._check_format()

    def _check_format(self) -> None:
        is_fp8 = self.fmt.code is WeightCode.FP8
        if (self.method is Method.FP8) != is_fp8:
            raise ConfigError(f"method {self.method.value} doesn't make {self.fmt.name} weights")
        if self.method is Method.SMOOTHQUANT and self.fmt.inputs is not Inputs.INT8:
            raise ConfigError(
                f"smoothquant makes int8 weights for int8 inputs, got {self.fmt.name}; "
                f"for weights alone use gptq or awq"
            )

    def described(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "method": self.method.value,
            "format": self.fmt.name,
            "damping": self.gptq.damping if self.method is Method.GPTQ else None,
            "act_order": self.gptq.order.value if self.method is Method.GPTQ else None,
            "scale_search": self.gptq.search.value if self.method is Method.GPTQ else None,
            "alpha": self.alpha,
            "samples": self.samples if self.method.needs_text else None,
            "context": self.context if self.method.needs_text else None,
            "seed": self.seed if self.method.needs_text else None,
        }


def digest_of(*parts: object) -> str:
    """SHA-256 of JSON values, in hex."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=asdict).encode()).hexdigest()
