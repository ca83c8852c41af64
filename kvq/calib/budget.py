"""What `kvq tune` is asked for: a budget in bytes per token, formats that meet it, text to try them on."""

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from kvq.calib.candidates import grouped_formats, halves, has_fast_kernel, stored_in
from kvq.calib.observe import spread_windows
from kvq.errors import ConfigError, RequestError
from kvq.evals.text import EvalText
from kvq.evals.windows import token_windows
from kvq.formats import Code, KVFormat, KVRecipe, PerTokenHead
from kvq.geometry import ModelGeometry
from kvq.models.prepared import PreparedModel
from kvq.sizes import parse_bytes

ALL_CODES = (Code.INT8, Code.INT4, Code.INT2)
_LEAST_WINDOW = 32  # tokens
_BITS = re.compile(r"([0-9]*\.?[0-9]+)\s*(bits?|b/el)?", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True, slots=True)
class TunePlan:
    """What is searched for, among which formats, and on how much text.

    Exactly one of `budget_bytes` (per token, without block padding) and `max_kl` (nats per token) is given.
    """

    budget_bytes: int | None = None
    max_kl: float | None = None
    codes: Sequence[Code] = ALL_CODES
    context: int | None = None  # tokens per window; None: 1,024 or what the model takes
    max_windows: int = 8  # to search on
    verify_windows: int = 16  # to measure on

    def __post_init__(self) -> None:
        if (self.budget_bytes is None) == (self.max_kl is None):
            raise ConfigError("give either a budget in bytes or the largest KL divergence, not both")

    def check(self, model: PreparedModel, text: EvalText, held_out: EvalText) -> int:
        """Tokens of a window, if this can be done on these texts; asked before the weights are loaded.

        Raises:
            ConfigError: a budget below the smallest formats searched.
            RequestError: a text or context that can't be used.
        """
        least, budget = smallest_bytes(model.geometry, self.codes), self.budget_bytes
        if budget is not None and budget < least:
            raise ConfigError(
                f"the budget is {budget} bytes per token; the smallest formats searched take {least}"
            )
        windows = spread_windows(model, text.text, context=self.context, max_windows=self.max_windows)
        window = len(windows[0])
        if window < _LEAST_WINDOW:
            raise RequestError(
                f"windows of {window} tokens say little of what a recipe costs; give --text (and --context) "
                f"of at least {_LEAST_WINDOW} tokens"
            )
        token_windows(model.tokenizer, held_out.text, context=window)
        return window


def parse_budget(model: PreparedModel, text: str) -> int:
    """Bytes per token of a budget: bits per element (`4.5bits`), bytes per token (`900B`) or a format.

    Raises:
        ConfigError: none of these.
    """
    text = text.strip()
    if match := _BITS.fullmatch(text):
        bits = float(match[1])
        if not 0 < bits <= 32:
            raise ConfigError(
                f"--budget is {bits:g} bits per element; give 2 to 32, or a format such as int4"
            )
        return bytes_of_bits(model.geometry, bits)
    with suppress(ConfigError):
        return parse_bytes(text, "--budget")
    try:
        return recipe_bytes(model.geometry, model.recipe(text))
    except ConfigError as error:
        raise ConfigError(
            f"--budget takes bits per element (4.5bits), bytes per token (900B) or a format (int4), "
            f"got {text!r}: {error}"
        ) from error


def recipe_bytes(geometry: ModelGeometry, recipe: KVRecipe) -> int:
    """Bytes per token of a recipe's rows, scales included, block padding not."""
    return sum(half.nbytes(stored_in(recipe, half).fmt) for half in halves(geometry))


def bytes_of_bits(geometry: ModelGeometry, bits: float) -> int:
    """Bytes per token of so many bits per element."""
    return int(bits * sum(half.kv_heads * half.head_dim for half in halves(geometry)) / 8 + 1e-6)


def default_codes(model: PreparedModel, budget_bytes: int | None) -> tuple[Code, ...]:
    """Codes whose attention has a compiled kernel here; all, where the budget can't be met with those."""
    slow = slow_codes(model, ALL_CODES)
    fast = tuple(code for code in ALL_CODES if code not in slow)
    if not fast or (budget_bytes is not None and budget_bytes < smallest_bytes(model.geometry, fast)):
        return ALL_CODES
    return fast


def slow_codes(model: PreparedModel, codes: Sequence[Code]) -> list[Code]:
    """Those of which some layer's rows would be read by the reference kernel here."""
    return [
        code
        for code in codes
        if not all(
            has_fast_kernel(model.geometry, half, smallest_format(half.head_dim, code), model.device)
            for half in halves(model.geometry)
        )
    ]


def smallest_bytes(geometry: ModelGeometry, codes: Sequence[Code]) -> int:
    """Bytes per token where every half takes the smallest format of these codes."""
    return sum(
        min(half.nbytes(smallest_format(half.head_dim, code)) for code in codes) for half in halves(geometry)
    )


def smallest_format(head_dim: int, code: Code) -> KVFormat:
    """The format of a code that takes the fewest bytes."""
    if code is Code.INT8:
        return KVFormat(code=code, scale=PerTokenHead())
    return grouped_formats(head_dim, code, rotated=True)[0]
