"""Sampling parameters: how tokens are chosen, when a request ends, and what it returns."""

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from kvq.errors import RequestError, unknown

# Limits for all fields that cost memory or time, checked before any work is done.
MAX_SAMPLES = 128
MAX_LOGPROBS = 64
MAX_SESSION = 256  # characters
HintAction = Literal["retain", "demote", "prefetch", "release"]  # for a session's KV
MAX_SALT = 1024  # characters
MAX_STOPS = 64
MAX_STOP_CHARACTERS = 1024
MAX_BIASES = 1024
MAX_PINS = 16
MAX_PIN_S = 86_400.0
MAX_COUNT = 1 << 30  # tokens

# D238: limits are declared with their fields
Check = Callable[[Any, str], None]  # of an object and a field's name; raises RequestError


def param(default: Any, check: Check, *, with_beams: bool = True) -> Any:
    """Declare a sampling parameter; `check` applies to all values except the default.

    `with_beams`: whether the parameter can be combined with beam search.
    """
    return field(default=default, metadata={"check": check, "with_beams": with_beams})


def whole(low: int | str, high: int | str) -> Check:
    """Return a check for a whole number from `low` to `high`; a string bound names another parameter."""

    def check(params: object, name: str) -> None:
        value = getattr(params, name)
        least = getattr(params, low) if isinstance(low, str) else low
        most = getattr(params, high) if isinstance(high, str) else high
        most = MAX_COUNT if most is None else most
        if not _is_whole(value) or not least <= operator.index(value) <= most:
            raise RequestError(f"{name} must be a whole number of {least} to {most}, got {value!r}")

    return check


def real(low: float, high: float, *, above: bool = False) -> Check:
    """Return a check for a finite number from `low` to `high`; with `above`, `low` itself is excluded."""

    def check(params: object, name: str) -> None:
        value = getattr(params, name)
        if not _is_real(value) or not low <= value <= high or (above and value == low):
            raise RequestError(
                f"{name} must be a number {'above' if above else 'of'} {low} "
                f"{'and at most' if above else 'to'} {high}, got {value!r}"
            )

    return check


def optional(check: Check) -> Check:
    """Return a check that also accepts None."""
    return lambda params, name: None if getattr(params, name) is None else check(params, name)


def flag(params: object, name: str) -> None:
    """Raise RequestError unless the parameter `name` is True or False."""
    if not isinstance(getattr(params, name), bool):
        raise RequestError(f"{name} must be True or False, got {getattr(params, name)!r}")


def _list_of(what: str, is_one: Callable[[Any], bool], noun: str = "") -> Check:
    """Return a check for a list of at most MAX_STOPS items; a single string counts as a list of one."""

    def check(params: object, name: str) -> None:
        given = getattr(params, name)
        if not isinstance(given, Sequence):
            raise RequestError(f"{name} must be a list, empty for none, got {given!r:.200}")
        items = (given,) if isinstance(given, str) else given
        if len(items) > MAX_STOPS:
            raise RequestError(f"at most {MAX_STOPS} {name}{noun}, got {len(items)}")
        if not all(map(is_one, items)):
            raise RequestError(f"{name} must be {what}, got {given!r:.200}")

    return check


def _biases(params: object, name: str) -> None:
    bias = getattr(params, name) or {}
    if not isinstance(bias, Mapping):
        raise RequestError(f"{name} maps token ids to numbers, got {bias!r:.200}")
    if len(bias) > MAX_BIASES:
        raise RequestError(f"{name} may name {MAX_BIASES} tokens at most, got {len(bias)}")
    for token, value in bias.items():
        if not _is_whole(token) or token < 0 or not _is_real(value) or not -100 <= value <= 100:
            raise RequestError(f"{name} maps token ids to numbers of -100 to 100, got {token!r}: {value!r}")


_texts = _list_of(
    f"strings of 1 to {MAX_STOP_CHARACTERS} characters",
    lambda given: isinstance(given, str) and 0 < len(given) <= MAX_STOP_CHARACTERS,
    noun=" strings",
)
_token_ids = _list_of("token ids", lambda given: _is_whole(given) and given >= 0)


def _structured(params: object, name: str) -> None:
    given = getattr(params, name)
    if not isinstance(given, StructuredOutput):
        raise RequestError(f"{name} must be a kvq.StructuredOutput, got {given!r:.200}")


@dataclass(frozen=True, kw_only=True, slots=True)
class StructuredOutput:
    """Constraint on the generated text, specified by exactly one of the first four fields.

    `json_schema`: a schema as a dict or JSON text. `regex`: a regular expression that must match the entire
    text. `choice`: the allowed strings. `lark`: a grammar in llguidance's Lark dialect or in llama.cpp's
    GBNF. `before`: Lark with a rule `before` for text that precedes the constrained text, such as a model's
    reasoning.
    """

    json_schema: Mapping[str, Any] | str | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    lark: str | None = None
    before: str = ""

    def __post_init__(self) -> None:
        given = [f.name for f in fields(self)[:4] if getattr(self, f.name) is not None]
        if len(given) != 1:
            raise RequestError(
                f"structured output takes exactly one of json_schema, regex, choice and lark, got "
                f"{' and '.join(given) or 'none'}"
            )
        if self.choice is not None and (
            isinstance(self.choice, str)
            or not self.choice
            or not all(isinstance(c, str) for c in self.choice)
        ):
            raise RequestError(f"choice must be a list of at least one string, got {self.choice!r}")


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """Parameters for choosing tokens and ending a request. Temperature 0 selects the most likely token.

    `n`: number of results returned; `best_of`: number of results generated, of which the most likely n are
    returned.
    `beam_width`: beam search with this many beams, of which the best n are returned; deterministic.
    `max_tokens`: None generates as much as the context and the block pool allow, or up to `most_tokens`.
    `top_k`: None keeps all tokens. `seed`: makes tokens independent of the batch in which the request runs.
    `stop`: strings that end the text and are removed from it unless `include_stop` is set.
    `logprobs`: number of most likely tokens whose log-probabilities are returned in addition to the chosen
    token's. `prompt_logprobs`: the same for every prompt token from `prompt_logprobs_start` on; earlier
    tokens may come from the prefix cache. Log-probabilities are from the model's distribution, before
    temperature, penalties and filters. `echo`: whether the text starts with the prompt. `kept_special_ids`:
    special tokens that are shown even if `skip_special_tokens` hides the others. `watermark`: whether to mark
    the text, if the engine leaves this to requests; None for the engine's default.
    """

    n: int = param(1, whole(1, MAX_SAMPLES))
    best_of: int | None = param(None, whole("n", MAX_SAMPLES), with_beams=False)
    beam_width: int | None = param(None, whole("n", MAX_SAMPLES))
    length_penalty: float = param(1.0, real(-100, 100))  # for beams: score / length ** length_penalty
    early_stopping: bool = param(False, flag)  # for beams: end once beam_width are finished
    max_tokens: int | None = param(64, optional(whole(1, MAX_COUNT)))
    most_tokens: int | None = param(None, optional(whole(1, MAX_COUNT)))  # limit without max_tokens
    min_tokens: int = param(0, whole(0, "max_tokens"))
    temperature: float = param(0.0, real(0, 10), with_beams=False)
    top_k: int | None = param(None, whole(1, MAX_COUNT), with_beams=False)
    top_p: float = param(1.0, real(0, 1, above=True), with_beams=False)
    min_p: float = param(0.0, real(0, 1), with_beams=False)
    repetition_penalty: float = param(1.0, real(0.01, 100), with_beams=False)
    presence_penalty: float = param(0.0, real(-100, 100), with_beams=False)
    frequency_penalty: float = param(0.0, real(-100, 100), with_beams=False)
    logit_bias: Mapping[int, float] | None = param(None, _biases, with_beams=False)
    seed: int | None = param(None, whole(-(1 << 63), (1 << 64) - 1), with_beams=False)  # 64 bits
    stop: str | Sequence[str] = param((), _texts, with_beams=False)
    stop_token_ids: Sequence[int] = param((), _token_ids)
    include_stop: bool = param(False, flag)
    ignore_eos: bool = param(False, flag)
    logprobs: int | None = param(None, whole(0, MAX_LOGPROBS), with_beams=False)
    prompt_logprobs: int | None = param(None, whole(0, MAX_LOGPROBS), with_beams=False)
    prompt_logprobs_start: int = param(0, whole(0, MAX_COUNT))  # index of a prompt token
    echo: bool = param(False, flag)
    skip_special_tokens: bool = param(True, flag)
    kept_special_ids: Sequence[int] = param((), _token_ids)
    structured: StructuredOutput | None = param(None, _structured, with_beams=False)
    watermark: bool | None = param(None, optional(flag))

    def __post_init__(self) -> None:
        known = fields(self)
        for one in known:
            if getattr(self, one.name) is not one.default:
                one.metadata["check"](self, one.name)
        if self.beam_width is None:
            return
        for one in known:
            if not one.metadata["with_beams"] and getattr(self, one.name) != one.default:
                raise RequestError(
                    f"{one.name} can't be combined with beam_width={self.beam_width}: beam search takes the "
                    f"likeliest continuations; leave one of them out"
                )

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """The `stop` strings as a tuple."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def num_sequences(self) -> int:
        """Number of sequences that the request runs concurrently."""
        return self.beam_width or self.best_of or self.n

    @property
    def is_greedy(self) -> bool:
        """True if the most likely token is always selected."""
        return self.temperature == 0

    @property
    def has_penalties(self) -> bool:
        """True if earlier tokens are penalized."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefixPin:
    """Pin that keeps a prompt's first `length` tokens in the prefix index, in complete blocks."""

    length: int  # tokens
    seconds: float  # since the tokens were computed or found; another request restarts it

    def __post_init__(self) -> None:
        whole(0, MAX_COUNT)(self, "length")
        real(0, MAX_PIN_S)(self, "seconds")


Params = SamplingParams | Mapping[str, Any]  # or a mapping of its fields


def as_params(params: Params | None) -> SamplingParams:
    """Convert `params` to SamplingParams: an object, a mapping of its fields, or None for the defaults.

    Raises:
        RequestError: a field is unknown or out of range, or `params` has another type.
    """
    if params is None or isinstance(params, SamplingParams):
        return params or SamplingParams()
    if not isinstance(params, Mapping):
        raise RequestError(f"params must be SamplingParams or a dict of its fields, got {params!r:.100}")
    known = [f.name for f in fields(SamplingParams)]
    for name in params:
        if name not in known:
            raise RequestError(unknown("sampling option", name, known))
    return SamplingParams(**params)


def each_params(params: Params | Sequence[Params] | None, count: int) -> list[SamplingParams]:
    """Return one set of parameters per prompt, from a single set or a list; see `as_params`."""
    if params is None or isinstance(params, SamplingParams | Mapping):
        return [as_params(params)] * count
    if not isinstance(params, Sequence):
        raise RequestError(
            f"params must be SamplingParams, a dict of its fields or a list, got {params!r:.100}"
        )
    if len(params) != count:
        raise RequestError(f"{count} prompts need one SamplingParams, or {count}, got {len(params)}")
    return [as_params(one) for one in params]


def check_params(params: SamplingParams, vocab_size: int) -> None:
    """Raise RequestError for token ids that the model can't generate.

    Raises:
        RequestError: logit_bias or stop_token_ids contains a token id of `vocab_size` or above.
    """
    for name, tokens in (("logit_bias", params.logit_bias or ()), ("stop_token_ids", params.stop_token_ids)):
        beyond = [token for token in tokens if token >= vocab_size]
        if beyond:
            raise RequestError(
                f"{name} may name tokens 0 to {vocab_size - 1}, the model's vocabulary, got "
                f"{', '.join(map(str, beyond[:5]))}{', ...' if len(beyond) > 5 else ''}; leave them out"
            )


def _is_whole(value: object) -> bool:
    if hasattr(value, "shape") and value.shape:  # an array: `index` would take its only element
        return False
    try:
        operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return False
    return not isinstance(value, bool)


def _is_real(value: object) -> bool:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # raised for large integers
        return False
