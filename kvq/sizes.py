"""Sizes and counts in readable units, so that a small model's bytes are not shown as 0.00 GiB.

Files contain plain bytes; only displayed figures are formatted here.
"""

import re

from kvq.errors import ConfigError

_BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_DECIMAL = ("B", "KB", "MB", "GB", "TB", "PB")
_COUNTS = ("", "K", "M", "B", "T")
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_UNITS |= {f"{unit}i": 1024 ** (i + 1) for i, unit in enumerate("kmgt")}
_TOKENS = re.compile(r"([-+]?(?:0|[1-9]\d{0,17})(?:\.\d{1,9})?)([km]?)", re.IGNORECASE | re.ASCII)
_SIZE = re.compile(r"\s*(\d{0,18}\.?\d{1,18})\s*((?:[kmgt]i?)?)(?:b|bytes)?\s*", re.IGNORECASE)


def binary(nbytes: float) -> str:  # D365: 1024 for memory, 1000 for GPUs and files
    """Format bytes in powers of 1024, the unit of memory and blocks: `1.50 GiB`, `23.04 MiB`, `864 B`."""
    return _fitting(nbytes, 1024, _BINARY)


def decimal(nbytes: float) -> str:
    """Format bytes in powers of 1000, the unit of data sheets and files: `80.00 GB`, `141.1 MB`, `864 B`."""
    return _fitting(nbytes, 1000, _DECIMAL)


def speed(gb_per_s: float) -> str:
    """Format GB/s as bytes per second: `41.20 GB/s`, `8.35 MB/s`."""
    return f"{decimal(1e9 * gb_per_s)}/s"


def count(number: float) -> str:
    """Format a count, such as the number of a model's weights: `70.55 B`, `5.84 M`, `12`."""
    return _fitting(number, 1000, _COUNTS).rstrip()


def dollars(usd: float | None) -> str:
    """Format dollars to the cent, or to two digits below ten cents: `12.40`, `0.0031`; `-` if unknown."""
    if usd is None:
        return "-"
    return f"{usd:,.2f}" if usd == 0 or abs(usd) >= 0.1 else f"{usd:.2g}"


def parse_bytes(size: int | str, name: str) -> int:
    """Parse bytes from a number or a string such as "2GiB", "512M" or "1.5g".

    Raises:
        ConfigError: the value is not a valid size.
    """
    if isinstance(size, int) and not isinstance(size, bool) and size >= 0:
        return size
    match = _SIZE.fullmatch(size) if isinstance(size, str) else None
    if match is None:
        raise ConfigError(f"{name} must be a size such as '2GiB' or a number of bytes, got {size!r}")
    return int(float(match[1]) * _UNITS[match[2].lower()])


def parse_tokens(text: str) -> int:
    """Parse a number of tokens: `8192`, `8k` or `1M`, in powers of 1024, as is usual for context lengths.

    Raises:
        ConfigError: the text is not a whole number of tokens.
    """
    match = _TOKENS.fullmatch(text)
    tokens = float(match[1]) * {"": 1, "k": 1 << 10, "m": 1 << 20}[match[2].lower()] if match else 0.5
    if not tokens.is_integer():
        raise ConfigError(f"{text!r} is no number of tokens; write it as 8192, 8k (which is 8192) or 1M")
    return int(tokens)


def _fitting(amount: float, step: int, units: tuple[str, ...]) -> str:
    """Format an amount with about four digits, in the largest unit in which it rounds to at least one."""
    if abs(amount) < step:
        return f"{amount:,.4g} {units[0]}"
    for unit in units[1:]:
        amount /= step
        digits = 2 if abs(amount) < 99.995 else 1
        if round(abs(amount), digits) < step or unit == units[-1]:
            break
    return f"{amount:,.{digits}f} {unit}"
