"""What a request asks for: how tokens are chosen, when to stop, what to return."""

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from kvq.errors import RequestError, nearest

# Caps on every field that costs memory or time, checked before any work is done.
MAX_SAMPLES = 128
MAX_LOGPROBS = 64
MAX_SALT = 1024  # characters
MAX_STOPS = 64
MAX_STOP_CHARACTERS = 1024
MAX_BIASES = 1024
MAX_PINS = 16
MAX_PIN_S = 86_400.0


@dataclass(frozen=True, kw_only=True, slots=True)
class StructuredOutput:
    """What the generated text must be; exactly one of the four.

    `json_schema`: a schema as a dict or JSON text. `regex`: a regular expression, matched in full.
    `choice`: one of these strings. `lark`: a grammar in llguidance's Lark dialect.
    """

    json_schema: Mapping[str, Any] | str | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    lark: str | None = None

    def __post_init__(self) -> None:
        given = [f.name for f in fields(self) if getattr(self, f.name) is not None]
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
    """How tokens are chosen and when a request ends. Temperature 0 takes the likeliest token.

    `n`: results returned; `best_of`: results generated, the likeliest n of them returned.
    `beam_width`: beam search with that many beams, the best n of them returned; deterministic.
    `max_tokens`: None goes on as far as the model's context and the block pool reach.
    `top_k`: None keeps all. `seed`: the same tokens in whatever batch the request runs.
    `stop`: strings that end the text, left out of it unless `include_stop`. `logprobs`: how many of
    the likeliest tokens' log-probabilities to return beside the chosen one's; `prompt_logprobs` the
    same for every prompt token from `prompt_logprobs_start` on; what lies before may come from the
    prefix cache. They are of the model's distribution, before temperature, penalties and filters.
    `echo`: the text starts with the prompt. `kept_special_ids`: special tokens that have text though
    `skip_special_tokens` leaves out the others.
    """

    n: int = 1
    best_of: int | None = None
    beam_width: int | None = None
    length_penalty: float = 1.0  # of beams: score / length ** length_penalty
    early_stopping: bool = False  # of beams: end as soon as beam_width are finished
    max_tokens: int | None = 64
    min_tokens: int = 0
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    seed: int | None = None
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    include_stop: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    prompt_logprobs_start: int = 0  # index of a prompt token
    echo: bool = False
    skip_special_tokens: bool = True
    kept_special_ids: Sequence[int] = ()
    structured: StructuredOutput | None = None

    def __post_init__(self) -> None:
        _whole(self, "n", 1, MAX_SAMPLES)
        _whole(self, "best_of", self.n, MAX_SAMPLES, optional=True)
        _whole(self, "beam_width", self.n, MAX_SAMPLES, optional=True)
        _whole(self, "max_tokens", 1, 1 << 30, optional=True)
        _whole(self, "min_tokens", 0, self.max_tokens or 1 << 30)
        _whole(self, "top_k", 1, 1 << 30, optional=True)
        _whole(self, "seed", -(1 << 63), (1 << 64) - 1, optional=True)  # what fits into 64 bits
        _whole(self, "logprobs", 0, MAX_LOGPROBS, optional=True)
        _whole(self, "prompt_logprobs", 0, MAX_LOGPROBS, optional=True)
        _whole(self, "prompt_logprobs_start", 0, 1 << 30)
        _real(self, "length_penalty", -100, 100)
        _real(self, "temperature", 0, 10)
        _real(self, "top_p", 0, 1, above=True)
        _real(self, "min_p", 0, 1)
        _real(self, "repetition_penalty", 0.01, 100)
        _real(self, "presence_penalty", -100, 100)
        _real(self, "frequency_penalty", -100, 100)
        for name in ("early_stopping", "include_stop", "ignore_eos", "echo", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"{name} must be True or False, got {getattr(self, name)!r}")
        if self.structured is not None and not isinstance(self.structured, StructuredOutput):
            raise RequestError(f"structured must be a kvq.StructuredOutput, got {self.structured!r:.200}")
        self._check_stops()
        self._check_bias()
        if self.beam_width is not None:
            self._check_beams()

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def num_sequences(self) -> int:
        """Sequences that run side by side."""
        return self.beam_width or self.best_of or self.n

    @property
    def is_greedy(self) -> bool:
        """True if the likeliest token is taken."""
        return self.temperature == 0

    @property
    def has_penalties(self) -> bool:
        """True if tokens that were there before count."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    def _check_stops(self) -> None:
        for name, kinds in (
            ("stop", str | Sequence),
            ("stop_token_ids", Sequence),
            ("kept_special_ids", Sequence),
        ):
            if not isinstance(getattr(self, name), kinds):
                raise RequestError(f"{name} must be a list, empty for none, got {getattr(self, name)!r:.200}")
        stops = self.stop_strings
        if not all(isinstance(s, str) and 0 < len(s) <= MAX_STOP_CHARACTERS for s in stops):
            raise RequestError(
                f"stop must be strings of 1 to {MAX_STOP_CHARACTERS} characters, got {self.stop!r:.200}"
            )
        if len(stops) > MAX_STOPS:
            raise RequestError(f"at most {MAX_STOPS} stop strings, got {len(stops)}")
        for name in ("stop_token_ids", "kept_special_ids"):
            ids = getattr(self, name)
            if len(ids) > MAX_STOPS:
                raise RequestError(f"{name} may be {MAX_STOPS} ids at most, got {len(ids)}")
            if not all(_is_whole(t) and t >= 0 for t in ids):
                raise RequestError(f"{name} must be token ids, got {ids!r:.200}")

    def _check_bias(self) -> None:
        bias = self.logit_bias or {}
        if not isinstance(bias, Mapping):
            raise RequestError(f"logit_bias maps token ids to numbers, got {bias!r:.200}")
        if len(bias) > MAX_BIASES:
            raise RequestError(f"logit_bias may name {MAX_BIASES} tokens at most, got {len(bias)}")
        for token, value in bias.items():
            if not _is_whole(token) or token < 0 or not _is_real(value) or not -100 <= value <= 100:
                raise RequestError(
                    f"logit_bias maps token ids to numbers of -100 to 100, got {token!r}: {value!r}"
                )

    def _check_beams(self) -> None:
        plain = SamplingParams()
        for name in (
            *("best_of", "temperature", "top_k", "top_p", "min_p", "seed", "structured", "logprobs"),
            *("repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "prompt_logprobs"),
            "stop",
        ):
            if getattr(self, name) != getattr(plain, name):
                raise RequestError(
                    f"{name} can't be combined with beam_width={self.beam_width}: beam search takes the "
                    f"likeliest continuations; leave one of them out"
                )


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefixPin:
    """Keep the first `length` tokens of a prompt in the prefix index, in whole blocks, for so long."""

    length: int  # tokens
    seconds: float  # from when they are computed or found; asking again begins anew

    def __post_init__(self) -> None:
        _whole(self, "length", 0, 1 << 30)
        _real(self, "seconds", 0, MAX_PIN_S)


Params = SamplingParams | Mapping[str, Any]  # or its fields


def as_params(params: Params | None) -> SamplingParams:
    """Sampling parameters from an object, a dict of its fields, or None for the defaults.

    Raises:
        RequestError: an unknown field, one out of range, or something else.
    """
    if params is None or isinstance(params, SamplingParams):
        return params or SamplingParams()
    if not isinstance(params, Mapping):
        raise RequestError(f"params must be SamplingParams or a dict of its fields, got {params!r:.100}")
    return sampling_params(params)


def each_params(params: Params | Sequence[Params] | None, count: int) -> list[SamplingParams]:
    """One for each of `count` prompts, from one for all or a list; see `as_params`."""
    if params is None or isinstance(params, SamplingParams | Mapping):
        return [as_params(params)] * count
    if not isinstance(params, Sequence):
        raise RequestError(
            f"params must be SamplingParams, a dict of its fields or a list, got {params!r:.100}"
        )
    if len(params) != count:
        raise RequestError(f"{count} prompts need one SamplingParams, or {count}, got {len(params)}")
    return [as_params(one) for one in params]


def sampling_params(options: Mapping[str, Any]) -> SamplingParams:
    """`SamplingParams(**options)`, with unknown names refused by a RequestError.

    Raises:
        RequestError: an unknown option, or one out of range.
    """
    known = [f.name for f in fields(SamplingParams)]
    for name in options:
        if name not in known:
            raise RequestError(
                f"unknown sampling option {name!r}{nearest(name, known) or ';'} known: {known}"
            )
    return SamplingParams(**options)


def _is_whole(value: object) -> bool:
    if hasattr(value, "shape") and value.shape:  # an array, whose index is that of its only element
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
    except OverflowError:  # of an integer
        return False


def _whole(params: object, name: str, low: int, high: int, *, optional: bool = False) -> None:
    value = getattr(params, name)
    if optional and value is None:
        return
    if not _is_whole(value) or not low <= operator.index(value) <= high:
        raise RequestError(f"{name} must be a whole number of {low} to {high}, got {value!r}")


def _real(params: object, name: str, low: float, high: float, *, above: bool = False) -> None:
    value = getattr(params, name)
    if not _is_real(value) or not low <= value <= high or (above and value == low):
        raise RequestError(
            f"{name} must be a number {'above' if above else 'of'} {low} {'and at most' if above else 'to'} "
            f"{high}, got {value!r}"
        )
