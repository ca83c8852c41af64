"""Request lengths: sampled at random, computed as quantiles for a plan, or read from a trace file.

Traces are JSON lines with `prompt_tokens`, `output_tokens` and optional `arrival_s`, `session`, `tenant` and
`priority`; lines of Mooncake's traces (`timestamp` in ms, `input_length`, `output_length`, `hash_ids` of
blocks of 512 tokens; Qin et al. 2024, arXiv:2407.00079); or CSV with the columns of Azure's LLM inference
traces (TIMESTAMP, ContextTokens, GeneratedTokens; Patel et al. 2024, arXiv:2311.18677).
"""

import csv
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from json import JSONDecodeError
from pathlib import Path
from statistics import NormalDist
from typing import Any

from kvq import strict_json
from kvq.errors import ConfigError
from kvq.scheduler import Priority
from kvq.sizes import parse_tokens

HASHED_TOKENS = 512  # per entry of `hash_ids`
_QUANTILES = 1000  # points that represent a distribution
_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_FORMS = (
    "a trace has an object a line, with prompt_tokens and output_tokens (or Mooncake's input_length and "
    f"output_length), or is a .csv with the columns {', '.join(_COLUMNS)}"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class _TraceLine:
    """One request of a trace."""

    prompt_tokens: int
    output_tokens: int
    arrival_s: float | None = None
    hash_ids: tuple[int, ...] = ()
    session: str = ""
    tenant: str = ""
    priority: Priority = Priority.INTERACTIVE


def read_lines(path: Path) -> Iterator[_TraceLine]:
    """Yield the requests of a trace file one by one, without reading the entire file into memory.

    Raises:
        ConfigError: the file does not exist, or a line is invalid; the message includes the line number.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            yield from _rows(path, file) if path.suffix.lower() == ".csv" else _objects(path, file)
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is no text in UTF-8; {_FORMS}") from error
    except (OSError, csv.Error) as error:
        raise ConfigError(f"{path} can't be read: {getattr(error, 'strerror', None) or error}") from error


def _objects(path: Path, file: Iterator[str]) -> Iterator[_TraceLine]:
    for number, line in enumerate(file, 1):
        if not line.strip():
            continue
        try:
            data = strict_json.loads(line)
            yield _line(data if isinstance(data, dict) else {})
        except (ValueError, KeyError) as error:
            what = f"no {error}" if isinstance(error, KeyError) else str(error)
            what = "it is no JSON" if isinstance(error, JSONDecodeError) else what
            raise ConfigError(f"{path}, line {number}: {what}; {_FORMS}") from error


def _line(data: dict[str, Any]) -> _TraceLine:
    is_mooncake = "input_length" in data
    prompt = data["input_length" if is_mooncake else "prompt_tokens"]
    output = data["output_length" if is_mooncake else "output_tokens"]
    arrival = data.get("arrival_s")
    if arrival is None and is_mooncake and "timestamp" in data:
        arrival = _seconds(data["timestamp"]) / 1e3
    hashes, priority = data.get("hash_ids", []), data.get("priority", "interactive")
    if not isinstance(hashes, list):
        raise ValueError(f"hash_ids are a list of numbers, got {hashes!r}")
    if not isinstance(priority, str) or priority.upper() not in Priority.__members__:
        raise ValueError(f"priority is interactive or batch, got {priority!r}")
    return _TraceLine(
        prompt_tokens=_count("prompt tokens", prompt, 1),
        output_tokens=_count("output tokens", output, 0),
        arrival_s=None if arrival is None else _seconds(arrival),
        hash_ids=tuple(_count("hash_ids", one, 0) for one in hashes),
        session=str(data.get("session", "")),
        tenant=str(data.get("tenant", "")),
        priority=Priority[priority.upper()],
    )


def _rows(path: Path, file: Iterator[str]) -> Iterator[_TraceLine]:
    reader = csv.DictReader(file)
    if reader.fieldnames is None or not set(_COLUMNS) <= set(reader.fieldnames):
        raise ConfigError(f"{path} must have the columns {', '.join(_COLUMNS)}, has {reader.fieldnames}")
    begin: datetime | None = None
    for row in reader:
        try:
            time = datetime.fromisoformat(row["TIMESTAMP"])  # Python keeps six of its seven decimals
            begin = begin or time
            yield _TraceLine(
                prompt_tokens=_count("ContextTokens", int(row["ContextTokens"]), 1),
                output_tokens=_count("GeneratedTokens", int(row["GeneratedTokens"]), 0),
                arrival_s=(time - begin).total_seconds(),
            )
        except (ValueError, TypeError) as error:
            got = ", ".join(str(row[name]) for name in _COLUMNS)
            raise ConfigError(f"{path}, line {reader.line_num}: no time and numbers: {got}") from error


def _count(what: str, value: Any, least: int) -> int:
    if type(value) is not int or not least <= value <= 1 << 31:
        raise ValueError(f"{what} must be whole numbers of at least {least}, got {value!r}")
    return value


def _seconds(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise ValueError(f"times must be numbers of at least 0, got {value!r}")
    return float(value)


@dataclass(frozen=True, kw_only=True, slots=True)
class Lengths:
    """Token count distribution: uniform from `low` to `high`, or log-normal with median `low` and `sigma`."""

    low: int
    high: int
    sigma: float | None = None  # of the logarithm

    def draw(self, rng: random.Random) -> int:
        """Sample one length, at least 1."""
        if self.sigma is None:
            return rng.randint(self.low, self.high)
        return max(1, round(rng.lognormvariate(math.log(self.low), self.sigma)))


def parse_lengths(text: str, option: str) -> Lengths:
    """Parse lengths such as "128", "16:512" (uniform) or "lognormal:MEDIAN:SIGMA".

    Raises:
        ConfigError: the text has none of these forms.
    """
    words = text.split(":")
    try:
        if words[0] == "lognormal" and len(words) == 3:
            median, sigma = parse_tokens(words[1]), float(words[2])
            if median >= 1 and 0 <= sigma <= 10:
                return Lengths(low=median, high=median, sigma=sigma)
        elif len(words) <= 2:
            low, high = parse_tokens(words[0]), parse_tokens(words[-1])
            if 1 <= low <= high:
                return Lengths(low=low, high=high)
    except ValueError:  # includes ConfigError
        pass
    raise ConfigError(f"{option} takes tokens such as 128, 8k, 16:512 or lognormal:256:0.7, got {text!r}")


@dataclass(frozen=True, slots=True)
class Length:
    """Token counts of one request."""

    prompt: int
    output: int

    @property
    def total(self) -> int:
        """Total number of tokens when the request finishes."""
        return self.prompt + self.output


@dataclass(frozen=True, kw_only=True, slots=True)
class Demand:
    """Memory demand of requests: their lengths, and the share of their prompts that is a common prefix."""

    lengths: Sequence[Length]  # a sample that represents all requests
    slot_tokens: int | None = None  # reserved per request by an engine without blocks; None: the longest
    prefix_share: float = 0.0  # share of each prompt that all requests have in common

    def __post_init__(self) -> None:
        if not 0 <= self.prefix_share < 1:
            raise ConfigError(f"the prefix share must be 0 to below 1, got {self.prefix_share}")
        if self.slot < self.longest:
            raise ConfigError(f"a slot of {self.slot} tokens does not hold a request of {self.longest}")

    @property
    def longest(self) -> int:
        """Total number of tokens of the longest request."""
        return max(length.total for length in self.lengths)

    @property
    def slot(self) -> int:
        """Number of tokens that an engine without blocks reserves for each request."""
        return self.slot_tokens or self.longest


def fixed(context: int, output: int = 0) -> list[Length]:
    """Return a single length for all requests: `context` tokens, `output` of which are generated.

    Raises:
        ConfigError: the context is not positive, or the output is negative or not smaller than the context.
    """
    if context < 1 or not 0 <= output < context:
        raise ConfigError(f"a context of {context} tokens with {output} of output is none")
    return [Length(context - output, output)]


def lognormal(median: int, sigma: float, *, most: int) -> list[Length]:
    """Return quantiles of log-normal total lengths, clamped to `most` tokens; half of each length is output.

    Raises:
        ConfigError: a number is out of range.
    """
    if median < 1 or not 0 < sigma <= 5:
        raise ConfigError(
            f"log-normal lengths need a median of at least 1 and a sigma of 0 to 5, got {median}, {sigma}"
        )
    normal = NormalDist(math.log(median), sigma)
    found = []
    for i in range(_QUANTILES):
        tokens = max(2, min(most, round(math.exp(normal.inv_cdf((i + 0.5) / _QUANTILES)))))
        output = min(tokens - 1, round(tokens / 2))
        found.append(Length(tokens - output, output))
    return found


def read_trace(path: Path) -> list[Length]:
    """Read the lengths of a trace; see `read_lines`.

    Raises:
        ConfigError: the file does not exist, or a line is invalid.
    """
    found = [Length(line.prompt_tokens, line.output_tokens) for line in read_lines(path)]
    if not found:
        raise ConfigError(f'{path} has no lines such as {{"prompt_tokens": 900, "output_tokens": 100}}')
    return found
