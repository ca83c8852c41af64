"""Cost of tokens: a GPU by the hour against an API by the token."""

from dataclasses import dataclass

from kvq.capacity.plan.gpus import check_positive
from kvq.errors import ConfigError

_HOURS_A_MONTH = 24 * 30


@dataclass(frozen=True, kw_only=True, slots=True)
class Prices:
    """Prices of an API, in $ per million tokens."""

    input: float
    output: float

    def __post_init__(self) -> None:
        check_positive("the price of input", self.input)
        check_positive("the price of output", self.output)

    def request_usd(self, prompt_tokens: float, output_tokens: float) -> float:
        """Return the $ of one request."""
        return (prompt_tokens * self.input + output_tokens * self.output) / 1e6


def usd_per_million(usd_per_hour: float, tokens_per_s: float, *, utilization: float = 1.0) -> float:
    """Return $ per million tokens of a machine that makes `tokens_per_s` while it is used.

    Raises:
        ConfigError: a number out of its range.
    """
    check_positive("$ an hour", usd_per_hour)
    check_positive("tokens a second", tokens_per_s)
    check_share("utilization", utilization)
    return usd_per_hour / (tokens_per_s * utilization * 3600) * 1e6


def monthly_usd(usd_per_hour: float, *, gpus: int = 1, operations_usd: float = 0.0) -> float:
    """Return $ per month of 30 days for GPUs that run all the time, and for their operation."""
    return usd_per_hour * _HOURS_A_MONTH * gpus + operations_usd


def requests_a_month(requests_per_s: float, *, utilization: float = 1.0) -> float:
    """Return the requests of 30 days."""
    return requests_per_s * utilization * 3600 * _HOURS_A_MONTH


def break_even_requests(usd_a_month: float, usd_per_request: float) -> float:
    """Return the requests per month above which a fixed cost is less than a price per request."""
    return usd_a_month / usd_per_request


def check_share(what: str, value: float) -> None:
    """Raise ConfigError unless `value` is above 0 and at most 1."""
    if not 0 < value <= 1:
        raise ConfigError(f"{what} must be above 0 and at most 1, got {value!r}")
