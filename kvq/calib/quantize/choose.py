"""From what people ask for (a method, bits, a group size) to settings that go together."""

from dataclasses import dataclass

from kvq.calib.quantize.settings import Method, QuantizeSettings
from kvq.errors import ConfigError, nearest
from kvq.formats.weights import INTEGER_CODES, Inputs, WeightCode, WeightFormat
from kvq.weights.gptq import ActOrder, GPTQOptions, ScaleSearch

PACKAGE_METHODS = ("nf4", "int8-bnb")  # bitsandbytes' own
METHODS = (*(method.value for method in Method), *PACKAGE_METHODS)
WHOLE_ROW = -1  # as a group size, in other programs too
_INPUTS = {"none": Inputs.FULL, "int8": Inputs.INT8, "fp8": Inputs.FP8}


@dataclass(frozen=True, kw_only=True, slots=True)
class QuantizeOptions:
    """What people ask for: a method by its name; what isn't said follows from it."""

    method: str
    bits: int | None = None  # 8 for smoothquant and fp8, else 4
    group_size: int | None = None  # 128 inputs; of 8-bit codes the whole row (-1)
    symmetric: bool = True
    activations: str | None = None  # int8 for smoothquant, else none
    act_order: str = ActOrder.NONE.value
    damp: float = 0.01
    scale_search: str = ScaleSearch.WEIGHTED.value
    alpha: float | None = None
    samples: int = 128
    context: int | None = None
    seed: int = 0

    def settings(self) -> QuantizeSettings:
        """Settings that go together.

        Raises:
            ConfigError: an unknown method, or options that don't go with it.
        """
        method = _method(self.method)
        own_of_gptq = (self.act_order, self.damp, self.scale_search)
        if method is not Method.GPTQ and own_of_gptq != ("none", 0.01, "weighted"):
            raise ConfigError(
                f"act-order, damp and scale search are gptq's, got method {self.method}; leave them out"
            )
        if method is not Method.SMOOTHQUANT and self.alpha is not None:
            raise ConfigError(f"alpha is smoothquant's, got method {self.method}; leave it out")
        order, search = ActOrder(self.act_order), ScaleSearch(self.scale_search)
        return QuantizeSettings(
            method=method,
            fmt=_format(method, self),
            gptq=GPTQOptions(damping=self.damp, order=order, search=search),
            alpha=self.alpha,
            samples=self.samples,
            context=self.context,
            seed=self.seed,
        )


def _method(name: str) -> Method:
    try:
        return Method(name)
    except ValueError:
        raise ConfigError(
            f"unknown method {name!r}{nearest(name, list(METHODS)) or ';'} allowed: {', '.join(METHODS)}"
        ) from None


def _format(method: Method, asked: QuantizeOptions) -> WeightFormat:
    eight = method in (Method.FP8, Method.SMOOTHQUANT)
    bits, group_size = asked.bits or (8 if eight else 4), asked.group_size
    if bits not in INTEGER_CODES or (eight and bits != 8):
        allowed = "8" if eight else "8, 4 or 3"
        raise ConfigError(f"bits must be {allowed} for {method.value}, got {bits}")
    if group_size is not None and group_size < 8 and group_size != WHOLE_ROW:
        raise ConfigError(f"group size must be -1 (one scale a row) or 8 and more, got {group_size}")
    size = group_size if group_size is not None else (WHOLE_ROW if bits == 8 else 128)
    named = asked.activations or ("int8" if method is Method.SMOOTHQUANT else "none")
    if named not in _INPUTS:
        raise ConfigError(f"activations must be none, int8 or fp8, got {named!r}")
    return WeightFormat(
        code=WeightCode.FP8 if method is Method.FP8 else INTEGER_CODES[bits],
        group_size=None if size == WHOLE_ROW else size,
        symmetric=asked.symmetric,
        inputs=_INPUTS[named],
    )
