"""Trace files of requests: lengths, arrival times and shared prefixes.

JSON lines with `prompt_tokens` and `output_tokens`, maybe `arrival_s`, `session`, `tenant` and `priority`;
the lines of Mooncake's traces (`timestamp` in ms, `input_length`, `output_length`, `hash_ids` of blocks of
512 tokens; Qin et al. 2024, arXiv:2407.00079); or CSV with the columns of Azure's LLM inference traces
(TIMESTAMP, ContextTokens, GeneratedTokens; Patel et al. 2024, arXiv:2311.18677).
"""

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from json import JSONDecodeError
from math import isfinite
from pathlib import Path
from typing import Any

from kvq import strict_json
from kvq.errors import ConfigError
from kvq.scheduler import Priority

HASHED_TOKENS = 512  # that one of `hash_ids` stands for
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
    """Yield the requests of a file of any size, one after another.

    Raises:
        ConfigError: no such file, or a line that is none; with its number.
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
            time = datetime.fromisoformat(row["TIMESTAMP"])  # of its seven decimals Python keeps six
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
    if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value) or value < 0:
        raise ValueError(f"times must be numbers of at least 0, got {value!r}")
    return float(value)
