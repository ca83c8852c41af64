"""Plan of `kvq tune`: a budget in bytes per token, the formats to try, and the text to try them on."""

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from fractions import Fraction
from math import ceil

from kvq.calib.candidates import ALL_CODES, Trial, candidates, format_in, halves
from kvq.calib.observe import spread_windows
from kvq.errors import ConfigError, RequestError
from kvq.evals.exact_tail import check_exact
from kvq.evals.side_by_side import Marked
from kvq.evals.text import EvalText, spread, token_windows
from kvq.formats import Code, ExactTokens, KVRecipe, LayerFormats
from kvq.geometry import ModelGeometry
from kvq.kernels import Device, KernelSpec, select
from kvq.layout import BLOCK_SIZE
from kvq.models.loading.prepared import PreparedModel
from kvq.sizes import parse_bytes

_ENOUGH = 4.0  # bits per element; with this budget or more, 2-bit codes are not tried
_CONTEXT = 512  # tokens per window, by default
_LEAST_WINDOW = 32  # tokens
_BITS = re.compile(r"([0-9]*\.?[0-9]+)\s*(bits?|b/el)?", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True, slots=True)
class TunePlan:
    """Goal of a search, the formats to try, and the windows of text to use.

    Exactly one of `budget_bytes` (per token, without block padding) and `max_kl` (nats per token) is set.
    The last `recent` and the first `sinks` tokens of every sequence stay unquantized.
    """

    budget_bytes: int | None = None
    max_kl: float | None = None
    codes: Sequence[Code] = ALL_CODES
    recent: int = 0  # tokens
    sinks: int = 0
    context: int | None = None  # tokens per window; None: 512 or the model's maximum
    max_windows: int = 3  # for the search
    verify_windows: int = 8  # for the verification
    known: Sequence[Trial] = ()  # from an earlier search on the text, with this context
    marked: Sequence[Marked] = ()  # search on these windows, not on text
    unseen: Sequence[Marked] = ()  # and measure on these, too

    def __post_init__(self) -> None:
        if (self.budget_bytes is None) == (self.max_kl is None):
            raise ConfigError(
                "budget and max_kl (--budget, --max-kl) are two ends of one trade; give one of them"
            )
        _ = self.exact  # checks both

    @property
    def exact(self) -> ExactTokens:
        """Tokens that stay unquantized."""
        return ExactTokens(recent=self.recent, sinks=self.sinks)

    def windows(self, model: PreparedModel, text: str, count: int) -> list[list[int]]:
        """Return the token ids of `count` windows spread over a text, or over the marked windows.

        Raises:
            RequestError: the text or the context can't be used.
        """
        if self.marked:
            return spread([one.ids for one in self.marked], count)
        return spread_windows(model, text, context=self.tokens_per_window(model), max_windows=count)

    def tokens_per_window(self, model: PreparedModel) -> int:
        return min(_CONTEXT, model.max_context) if self.context is None else self.context

    def weighed(self, windows: Sequence[list[int]]) -> list[list[int] | Marked]:
        """Return windows with their weights, if they are marked ones."""
        known = {tuple(one.ids): one for one in self.marked}
        return [known.get(tuple(ids), ids) for ids in windows]

    def check(self, model: PreparedModel, text: EvalText, held_out: EvalText) -> int:
        """Check the plan with these texts, before the weights are loaded; return the tokens per window.

        Raises:
            ConfigError: the budget is below the smallest formats, or windows would stay unquantized.
            RequestError: a text or the context can't be used.
        """
        least, budget = smallest_bytes(model, self.codes), self.budget_bytes
        if budget is not None and budget < least:
            raise ConfigError(
                f"the budget is {budget} bytes per token; the smallest formats searched take {float(least):g}"
            )
        window = len(self.windows(model, text.text, self.max_windows)[0])
        if window < _LEAST_WINDOW:
            raise RequestError(
                f"windows of {window} tokens say little of what a recipe costs; give --text (and --context) "
                f"of at least {_LEAST_WINDOW} tokens"
            )
        self.check_exact(model, window)
        token_windows(model.tokenizer, held_out.text, context=window)
        return window

    def check_exact(self, model: PreparedModel, window: int) -> list[str]:
        """Return a warning if most of a window of `window` tokens stays unquantized.

        Raises:
            ConfigError: the entire window stays unquantized, so every recipe would look lossless.
        """
        given = [f"--{name} {n}" for name, n in (("recent", self.recent), ("sinks", self.sinks)) if n]
        recipe = replace(model.recipe(self.codes[-1].name), exact=self.exact)
        recipe = replace(recipe, label=" ".join(given) or recipe.label)
        advice = "give a longer --context, or a smaller --recent or --sinks"
        return check_exact(model, [recipe], [range(window - 1)], advice=advice)


def parse_budget(model: PreparedModel, text: str) -> int:
    """Return a budget's bytes per token; `text`: bits per element (`4.5bits`), bytes (`900B`) or a format.

    Raises:
        ConfigError: the text is none of these.
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
        recipe = model.recipe(text)
    except ConfigError as error:
        raise ConfigError(
            f"--budget takes bits per element (4.5bits), bytes per token (900B) or a format (int4), "
            f"got {text!r}: {error}"
        ) from error
    if recipe.exact.recent or recipe.exact.sinks:
        raise ConfigError(
            f"--budget {text} counts bytes per token, which tokens that stay unquantized don't change; name "
            f"the format without them, and give --recent and --sinks"
        )
    return ceil(recipe_bytes(model.geometry, recipe, model.block_size))


def recipe_bytes(geometry: ModelGeometry, recipe: KVRecipe, block_size: int = BLOCK_SIZE) -> Fraction:
    """Return the bytes per token of a recipe, including scales but not block padding."""
    units = halves(geometry, block_size)
    return sum((half.nbytes(format_in(recipe, half)) for half in units), Fraction(0))


def bytes_of_bits(geometry: ModelGeometry, bits: float) -> int:
    """Return the bytes per token for `bits` bits per element."""
    return int(bits * sum(half.kv_heads * half.head_dim for half in halves(geometry)) / 8 + 1e-6)


def default_codes(model: PreparedModel, plan: TunePlan) -> tuple[Code, ...]:  # D33
    """Return the plan's codes that fit the model, suit the budget, and have compiled attention.

    Codes without compiled attention on this device are left out unless the others can't meet the budget.
    """
    dims, budget = {half.head_dim for half in halves(model.geometry)}, plan.budget_bytes
    is_much = budget is not None and budget >= bytes_of_bits(model.geometry, _ENOUGH)
    codes = [code for code in plan.codes if code.bits > 2 or not is_much]
    fitting = tuple(code for code in codes if not any(dim % code.multiple for dim in dims))
    slow = slow_codes(model, fitting)
    fast = tuple(code for code in fitting if code not in slow)
    if not fast or (budget is not None and budget < smallest_bytes(model, fast)):
        return fitting
    return fast


def slow_codes(model: PreparedModel, codes: Sequence[Code]) -> list[Code]:
    """Return the codes for which some layer would use the reference kernel on this device."""
    return [code for code in codes if not has_fast_kernel(model, code)]


def has_fast_kernel(model: PreparedModel, code: Code) -> bool:
    """Return True if every layer has a kernel other than the reference for `code` on this device."""
    formats = [found[0] for found in candidates(model, [code]).values()]  # alternately K and V
    layers = zip(model.geometry.layers, formats[::2], formats[1::2], strict=True)
    specs = {
        KernelSpec(
            formats=LayerFormats(k=k, v=v, k_head_dim=layer.k_head_dim, v_head_dim=layer.v_head_dim),
            q_heads=model.geometry.q_heads,
            kv_heads=layer.kv_heads,
            block_size=model.block_size,
            is_staged=k.needs_whole_blocks,
        )
        for layer, k, v in layers
    }
    device = Device.of(model.device)
    return all(select("attend", spec, device).backend != "reference" for spec in specs)


def smallest_bytes(model: PreparedModel, codes: Sequence[Code]) -> Fraction:
    """Return the bytes per token if every half is stored in the smallest format of these codes."""
    found = candidates(model, codes).items()
    return sum((min(map(half.nbytes, formats)) for half, formats in found), Fraction(0))
