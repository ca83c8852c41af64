"""GPU catalogue: memory, bandwidth, dense throughput and price, from a file that users may replace.

This module also computes the cost of tokens on a GPU rented by the hour and from an API billed by the token.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from math import inf
from pathlib import Path
from typing import Any

from kvq import strict_json
from kvq.errors import ConfigError, nearest

_MAY = {"total_mib", "source"}  # optional keys
_VERSION = 1
_HOURS_A_MONTH = 24 * 30
_SMALLEST, _LARGEST = 1e-12, 1e15  # limits of any figure


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """One kind of GPU. GB and TB are powers of ten, as in data sheets.

    `total_mib`: the smallest total memory that any driver was seen to report (`cudaMemGetInfo`); None if only
    the data sheet's value is available. `source`: where `total_mib` was reported.
    """

    name: str
    memory_gb: float
    total_mib: float | None = None
    source: str = ""
    bandwidth_tb_s: float
    usd_per_hour: float
    tflops: Mapping[str, float]  # dense, without the sparsity that data sheets often include

    def __post_init__(self) -> None:
        for name in ("memory_gb", "bandwidth_tb_s", "usd_per_hour"):
            check_positive(f"{self.name}: {name}", getattr(self, name))
        if self.total_mib is not None:
            check_positive(f"{self.name}: total_mib", self.total_mib)
        if not isinstance(self.source, str):
            raise ConfigError(f"{self.name}: source must be a text, got {self.source!r}")
        if not self.tflops or not isinstance(self.tflops, Mapping):
            raise ConfigError(
                f"{self.name}: tflops must map types such as fp16 to numbers, got {self.tflops!r}"
            )
        if "fp16" not in self.tflops:
            raise ConfigError(f"{self.name}: tflops need fp16, which speed is planned with")
        for kind, value in self.tflops.items():
            check_positive(f"{self.name}: tflops of {kind}", value)

    @property
    def memory_bytes(self) -> int:
        """Total memory reported by the driver, or the data sheet's value if no report is available."""
        return round(self.memory_gb * 1e9 if self.total_mib is None else self.total_mib * 2**20)

    @property
    def bandwidth(self) -> float:
        """Memory bandwidth in bytes per second."""
        return self.bandwidth_tb_s * 1e12

    @property
    def flops(self) -> float:
        """Dense 16-bit operations per second, the basis of planned speeds."""
        return 1e12 * self.tflops["fp16"]


def check_positive(what: str, value: Any) -> None:
    """Raise ConfigError unless `value` is a finite number above 0."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < inf:
        raise ConfigError(f"{what} must be a number above 0, got {value!r}")
    if not _SMALLEST <= value <= _LARGEST:
        raise ConfigError(f"{what} must be {_SMALLEST:g} to {_LARGEST:g}, got {value!r}")


def known_gpus() -> Mapping[str, Gpu]:
    """Return the built-in GPU specifications, keyed by name."""
    return read_gpus(Path(__file__).with_name("gpus.json"))


def read_gpus(path: Path) -> dict[str, Gpu]:
    """Read GPU specifications from JSON: `{"format_version": 1, "gpus": {name: {memory_gb, ...}}}`.

    Raises:
        ConfigError: the file is unreadable or has another version, or an entry is invalid.
    """
    try:
        data = strict_json.read(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is no file of GPUs: {error}") from error
    if not isinstance(data, dict) or data.get("format_version") != _VERSION:
        raise ConfigError(f"{path} must have format_version {_VERSION} and gpus")
    gpus = data.get("gpus")
    if not isinstance(gpus, dict) or not gpus:
        raise ConfigError(f"{path}: gpus must map names to GPUs")
    must = {field.name for field in fields(Gpu)} - _MAY - {"name"}
    found = {}
    for name, facts in gpus.items():
        if not isinstance(facts, dict) or set(facts) - _MAY != must:
            raise ConfigError(
                f"{path}: {name} must have {', '.join(sorted(must))}, and may have {', '.join(sorted(_MAY))}"
            )
        found[str(name)] = Gpu(name=str(name), **facts)
    return found


def find_gpu(name: str, gpus: Mapping[str, Gpu] | None = None) -> Gpu:
    """Return the GPU with this name.

    Raises:
        ConfigError: no GPU, or more than one, matches the name; the message suggests names.
    """
    known = known_gpus() if gpus is None else gpus
    asked = name.lower().replace("_", "-").replace(" ", "-")
    found = known.get(asked) or {own.lower(): gpu for own, gpu in known.items()}.get(name.lower())
    if found is None:
        if several := [one for one in known if one.startswith(f"{asked}-")]:
            raise ConfigError(f"there are several {name}; say which: {', '.join(several)}")
        raise ConfigError(f"no GPU {name!r} is known{nearest(name, known) or ';'} see kvq gpus")
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class Prices:
    """Prices of an API, in $ per million tokens."""

    input: float
    output: float

    def __post_init__(self) -> None:
        check_positive("the price of input", self.input)
        check_positive("the price of output", self.output)

    def request_usd(self, prompt_tokens: float, output_tokens: float) -> float:
        """Return the price of one request, in $."""
        return (prompt_tokens * self.input + output_tokens * self.output) / 1e6


def usd_per_million(usd_per_hour: float, tokens_per_s: float, *, utilization: float = 1.0) -> float:
    """Return the cost per million tokens, in $, of a machine that generates `tokens_per_s` while in use.

    Raises:
        ConfigError: a number is out of range.
    """
    check_positive("$ an hour", usd_per_hour)
    check_positive("tokens a second", tokens_per_s)
    check_share("utilization", utilization)
    return usd_per_hour / (tokens_per_s * utilization * 3600) * 1e6


def monthly_usd(usd_per_hour: float, *, gpus: int = 1, operations_usd: float = 0.0) -> float:
    """Return the cost of continuously running GPUs plus operations, in $ per 30-day month."""
    return usd_per_hour * _HOURS_A_MONTH * gpus + operations_usd


def requests_a_month(requests_per_s: float, *, utilization: float = 1.0) -> float:
    """Return the number of requests served in 30 days."""
    return requests_per_s * utilization * 3600 * _HOURS_A_MONTH


def break_even_requests(usd_a_month: float, usd_per_request: float) -> float:
    """Return the number of requests per month above which a fixed cost is cheaper than paying per request."""
    return usd_a_month / usd_per_request


def check_share(what: str, value: float) -> None:
    """Raise ConfigError unless `value` is above 0 and at most 1."""
    if not 0 < value <= 1:
        raise ConfigError(f"{what} must be above 0 and at most 1, got {value!r}")
