"""Settings of `kvq.quantize`: the method with its options, the model, and the output folder."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from kvq.errors import ConfigError, ModelError, nearest
from kvq.evals import EvalText
from kvq.formats.weights import INTEGER_CODES, Inputs, WeightCode, WeightFormat
from kvq.models.describe.resolve import ModelSource
from kvq.models.loading.prepared import PreparedModel, prepare
from kvq.weights.gptq import ActOrder, GPTQOptions, ScaleSearch

Progress = Callable[[int, int], None]  # (layers done, layers in all)

MOST_SAMPLES = 1024
FEWEST_SAMPLES = 8
WHOLE_ROW = -1  # a group size; other programs use the same value
_OWN_METHODS = ("rtn", "gptq", "awq", "smoothquant", "fp8")  # rtn and fp8 round to nearest, without data
METHODS = (*_OWN_METHODS, "nf4", "int8-bnb")  # the last two are bitsandbytes' own
_INPUTS = {"none": Inputs.FULL, "int8": Inputs.INT8, "fp8": Inputs.FP8}


@dataclass(frozen=True, kw_only=True)
class QuantizeSettings:
    """A method, its weight format and its calibration samples; defaults depend on the method."""

    method: str  # one of kvq's own
    bits: int | None = None  # None: 8 for smoothquant and fp8, else 4
    group_size: int | None = None  # None: 128 inputs, or the whole row (-1) for 8-bit codes
    symmetric: bool = True
    activations: str | None = None  # None: int8 for smoothquant, else none
    act_order: ActOrder = "none"
    damp: float = 0.01
    scale_search: ScaleSearch = "weighted"
    alpha: float | None = None  # SmoothQuant's; None: the best of a grid
    samples: int = 128
    context: int | None = None  # tokens of a sample; None: 2,048 or the model's maximum
    seed: int = 0  # for the choice of samples

    def __post_init__(self) -> None:
        """Raise ConfigError if options are invalid or incompatible."""
        name = self.method
        if name not in _OWN_METHODS:
            hint = nearest(name, list(METHODS)) or ";"
            raise ConfigError(f"unknown method {name!r}{hint} allowed: {', '.join(METHODS)}")
        own_of_gptq = (self.act_order, self.damp, self.scale_search)
        if name != "gptq" and own_of_gptq != ("none", 0.01, "weighted"):
            raise ConfigError(
                f"act-order, damp and scale search are gptq's, got method {name}; leave them out"
            )
        if name != "smoothquant" and self.alpha is not None:
            raise ConfigError(f"alpha is smoothquant's, got method {name}; leave it out")
        if not FEWEST_SAMPLES <= self.samples <= MOST_SAMPLES:
            raise ConfigError(f"samples must be {FEWEST_SAMPLES} to {MOST_SAMPLES}, got {self.samples}")
        if self.context is not None and self.context < 2:
            raise ConfigError(f"context must be at least 2 tokens, got {self.context}; 2048 is usual")
        if self.alpha is not None and not 0 <= self.alpha <= 1:
            raise ConfigError(f"alpha must lie between 0 and 1, got {self.alpha}; 0.5 is usual")
        _ = self.gptq, self.fmt  # checks them

    @property
    def needs_text(self) -> bool:
        """True if the model must run over a text."""
        return self.method not in ("rtn", "fp8")

    @property
    def folds(self) -> bool:
        """True if the method scales inputs."""
        return self.method in ("awq", "smoothquant")

    @cached_property
    def gptq(self) -> GPTQOptions:
        """Options of GPTQ."""
        return GPTQOptions(damping=self.damp, order=self.act_order, search=self.scale_search)

    @cached_property
    def fmt(self) -> WeightFormat:
        """Format of the quantized weights.

        Raises:
            ConfigError: no such format exists, or the method doesn't support it.
        """
        is_smooth, is_fp8 = self.method == "smoothquant", self.method == "fp8"
        eight = is_smooth or is_fp8
        bits, size = self.bits or (8 if eight else 4), self.group_size
        if bits not in INTEGER_CODES or (eight and bits != 8):
            allowed = "8" if eight else "8, 4 or 3"
            raise ConfigError(f"bits must be {allowed} for {self.method}, got {bits}")
        if size is not None and size < 8 and size != WHOLE_ROW:
            raise ConfigError(f"group size must be -1 (one scale a row) or 8 and more, got {size}")
        if size is None:
            size = WHOLE_ROW if bits == 8 else 128
        named = self.activations or ("int8" if is_smooth else "none")
        if named not in _INPUTS:
            raise ConfigError(f"activations must be none, int8 or fp8, got {named!r}")
        fmt = WeightFormat(
            code=WeightCode.FP8 if is_fp8 else INTEGER_CODES[bits],
            group_size=None if size == WHOLE_ROW else size,
            symmetric=self.symmetric,
            inputs=_INPUTS[named],
        )
        if is_smooth and fmt.inputs is not Inputs.INT8:
            raise ConfigError(
                f"smoothquant makes int8 weights for int8 inputs, got {fmt.name}; "
                f"for weights alone use gptq or awq"
            )
        return fmt

    def described(self) -> dict[str, Any]:
        """Return the settings as JSON."""
        is_gptq, has_samples = self.method == "gptq", self.needs_text
        return {
            "method": self.method,
            "format": self.fmt.name,
            "damping": self.damp if is_gptq else None,
            "act_order": self.act_order if is_gptq else None,
            "scale_search": self.scale_search if is_gptq else None,
            "alpha": self.alpha,
            "samples": self.samples if has_samples else None,
            "context": self.context if has_samples else None,
            "seed": self.seed if has_samples else None,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Quantizing:
    """Source and destination of a quantized checkpoint, and options for its creation."""

    model: str | Path | ModelSource | PreparedModel
    out: Path
    file_format: str = "compressed-tensors"
    gguf_type: str | None = None  # as llama.cpp names types of files; None: Q4_K_M, or no GGUF
    text: EvalText | None = None  # None: CPython's help topics
    device: str = "auto"
    dtype: str = "auto"
    kv_scales: bool = False
    overwrite: bool = False
    restart: bool = False
    revision: str | None = None
    token: str | None = None
    progress: Callable[[str], Progress] = field(default=lambda what: lambda done, total: None)
    on_resumed: Callable[[int], object] = field(default=lambda layers: None)  # called with finished layers

    def stored_dtype(self) -> str:
        """Return the dtype of scales and unquantized tensors, which is fp16 in GPTQ and AWQ files.

        Raises:
            ConfigError: another dtype was requested, but the file format supports only fp16.
        """
        if self.file_format == "compressed-tensors":
            return self.dtype
        if self.dtype not in ("auto", "fp16"):
            raise ConfigError(
                f"{self.file_format} keeps fp16, got dtype {self.dtype!r}; leave --dtype out, or write "
                f"compressed-tensors"
            )
        return "fp16"

    def prepared(self) -> PreparedModel:
        """Return the source model, checked without reading its weights.

        Raises:
            ModelError: the model is missing, damaged, unsupported or already quantized.
        """
        if isinstance(self.model, PreparedModel):
            return self.model
        model = prepare(
            self.model,
            device=self.device,
            max_context=1,  # irrelevant, as the model is not served
            revision=self.revision,
            token=self.token,
        )
        if model.is_gguf:
            raise ModelError(f"{model.folder} is a GGUF file; take the model's safetensors, unquantized")
        if model.is_quantized:
            raise ModelError(f"{model.folder} is quantized already; take an unquantized copy")
        return model
