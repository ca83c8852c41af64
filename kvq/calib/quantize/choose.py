"""From what people ask for (a method, bits, a group size) to settings that go together."""

from kvq.arguments import checked
from kvq.calib.quantize.settings import Method, QuantizeSettings
from kvq.errors import ConfigError, nearest
from kvq.formats.weights import Inputs, WeightCode, WeightFormat
from kvq.weights.gptq import ActOrder, GPTQOptions, ScaleSearch

PACKAGE_METHODS = ("nf4", "int8-bnb")  # bitsandbytes' own
METHODS = (*(method.value for method in Method), *PACKAGE_METHODS)
WHOLE_ROW = -1  # as a group size, in other programs too
_CODES = {8: WeightCode.INT8, 4: WeightCode.INT4, 3: WeightCode.INT3}
_INPUTS = {"none": Inputs.FULL, "int8": Inputs.INT8, "fp8": Inputs.FP8}


@checked
def choose_settings(
    method: str,
    *,
    bits: int | None = None,
    group_size: int | None = None,
    symmetric: bool = True,
    activations: str | None = None,
    act_order: str = ActOrder.NONE.value,
    damp: float = 0.01,
    scale_search: str = ScaleSearch.WEIGHTED.value,
    alpha: float | None = None,
    samples: int = 128,
    context: int | None = None,
    seed: int = 0,
) -> QuantizeSettings:
    """Settings of a method by its name; what isn't said follows from it.

    `bits` are 8 for smoothquant and fp8, else 4. `group_size` is 128 inputs, of 8-bit codes the whole
    row (-1). `activations` are int8 for smoothquant, else none.

    Raises:
        ConfigError: an unknown method, or options that don't go with it.
    """
    chosen = _method(method)
    if chosen is not Method.GPTQ and (act_order, damp, scale_search) != ("none", 0.01, "weighted"):
        raise ConfigError(f"act-order, damp and scale search are gptq's, got method {method}; leave them out")
    if chosen is not Method.SMOOTHQUANT and alpha is not None:
        raise ConfigError(f"alpha is smoothquant's, got method {method}; leave it out")
    return QuantizeSettings(
        method=chosen,
        fmt=_format(chosen, bits, group_size, symmetric, activations),
        gptq=GPTQOptions(damping=damp, order=ActOrder(act_order), search=ScaleSearch(scale_search)),
        alpha=alpha,
        samples=samples,
        context=context,
        seed=seed,
    )


def _method(name: str) -> Method:
    try:
        return Method(name)
    except ValueError:
        raise ConfigError(
            f"unknown method {name!r}{nearest(name, list(METHODS)) or ';'} allowed: {', '.join(METHODS)}"
        ) from None


def _format(
    method: Method, bits: int | None, group_size: int | None, symmetric: bool, activations: str | None
) -> WeightFormat:
    eight = method in (Method.FP8, Method.SMOOTHQUANT)
    bits = bits or (8 if eight else 4)
    if bits not in _CODES or (eight and bits != 8):
        allowed = "8" if eight else "8, 4 or 3"
        raise ConfigError(f"bits must be {allowed} for {method.value}, got {bits}")
    if group_size is not None and group_size < 8 and group_size != WHOLE_ROW:
        raise ConfigError(f"group size must be -1 (one scale a row) or 8 and more, got {group_size}")
    size = group_size if group_size is not None else (WHOLE_ROW if bits == 8 else 128)
    named = activations or ("int8" if method is Method.SMOOTHQUANT else "none")
    if named not in _INPUTS:
        raise ConfigError(f"activations must be none, int8 or fp8, got {named!r}")
    return WeightFormat(
        code=WeightCode.FP8 if method is Method.FP8 else _CODES[bits],
        group_size=None if size == WHOLE_ROW else size,
        symmetric=symmetric,
        inputs=_INPUTS[named],
    )
