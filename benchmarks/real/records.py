"""Records of measurements, a row a line, so that an interrupted run continues where it was."""

import datetime
import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from kvq.errors import ConfigError
from kvq.evals.report.results import describe_device, source_commit

Row = dict[str, Any]
Settings = Mapping[str, Any]
STORED = "stored"  # among the settings: what the format's name meant


def key_of(model: str, part: str, kv: str, settings: Settings) -> str:
    """Return what identifies a measurement, whatever the commit."""
    named = json.dumps([model, part, kv, dict(settings)], sort_keys=True)
    return hashlib.sha256(named.encode()).hexdigest()[:16]


def published(path: Path) -> list[Row]:
    """The rows of a file that `publish` wrote; none if there is no such file.

    Raises:
        ConfigError: another file.
    """
    try:
        return list(json.loads(path.read_bytes())["rows"])
    except FileNotFoundError:
        return []
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is no file of rows ({error}); name another folder with --out") from error


def merged(before: Iterable[Row], rows: Iterable[Row]) -> list[Row]:
    """Rows in the place of those that measured the same before, and others behind them, models together."""
    found = {_asked(row): row for row in before}
    found |= {_asked(row): row for row in rows}
    models = list(dict.fromkeys(row["model"] for row in found.values()))
    return sorted(found.values(), key=lambda row: models.index(row["model"]))


def _key(row: Row) -> str:
    return key_of(row["model"], row["part"], row["kv"], row["settings"])


def _asked(row: Row) -> str:
    """The key, whatever the format's name meant."""
    settings = {name: value for name, value in row["settings"].items() if name != STORED}
    return key_of(row["model"], row["part"], row["kv"], settings)


class Records:
    """The rows of one file, and of published ones. A later row replaces an earlier one of the same key."""

    def __init__(self, path: Path, published: Iterable[Row] = ()) -> None:
        """Read what is there; of rows that were published before, too, those that are not in the file.

        Raises:
            ConfigError: a line before the last one that is no row.
        """
        self._path = path
        self._rows = {_key(row): row for row in published}
        lines = path.read_bytes().splitlines(keepends=True) if path.is_file() else []
        for number, line in enumerate(lines, start=1):
            try:
                row = json.loads(line)
                self._rows[row["key"]] = row
            except (ValueError, KeyError, TypeError) as error:
                if number < len(lines) or line.endswith(b"\n"):
                    raise ConfigError(
                        f"{path}, line {number} is no row ({error}); remove the line"
                    ) from error
                with path.open("r+b") as file:  # a run that was killed while it wrote
                    file.truncate(sum(map(len, lines[:-1])))

    def find(self, model: str, part: str, kv: str, settings: Settings) -> Row | None:
        """The row of a measurement, if it was made."""
        return self._rows.get(key_of(model, part, kv, settings))

    def add(self, model: str, part: str, kv: str, settings: Settings, found: Row) -> Row:
        """Append a row, with the commit, the machine and the time of it.

        Raises:
            ValueError: a figure is NaN or infinite; nothing was written.
        """
        row = {
            "key": key_of(model, part, kv, settings),
            "model": model,
            "part": part,
            "kv": kv,
            "settings": dict(settings),
            **found,
            "commit": source_commit(),
            "device": describe_device(torch.device("cpu")),
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        }
        line = json.dumps(row, allow_nan=False) + "\n"
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("ab") as file:
            file.write(line.encode())
        self._rows[row["key"]] = row
        return row

    def seconds_of(self, model: str, part: str) -> list[float]:
        """Return the seconds of a part's measurements on a model, or on any model if this one has none."""
        of_part = [row for row in self._rows.values() if row["part"] == part and "seconds" in row]
        own = [row for row in of_part if row["model"] == model]
        return [row["seconds"] for row in own or of_part]
