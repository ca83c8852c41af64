"""Texts from files and datasets: plain text, JSON lines, Parquet, and datasets on the Hugging Face Hub."""

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from kvq.errors import ConfigError, KVQError, RequestError, first_lines
from kvq.evals.text import EvalText, decoded
from kvq.extras import require
from kvq.models.parts.inputs import check_unicode

HUB = "hf:"
_JSON = (".jsonl", ".ndjson", ".json")
_PARQUET = (".parquet", ".pq")
_FIELDS = ("text", "content", "prompt", "messages")  # tried in this order
_MOST_CHARACTERS = 64 << 20  # limit for one dataset, which may be larger than memory


def read_text(source: str | Path, field: str | None = None) -> EvalText:
    """Read a text for measurement or calibration.

    `source`: a UTF-8 text file; `.jsonl` with one JSON object per line, or `.json` with a list of objects;
    `.parquet`; or `hf:NAME[:CONFIG[:SPLIT]]`, a dataset on the Hub or in a local folder, by default the first
    split of its first configuration. `field`: the field that contains a row's text, by default the first
    field present among text, content, prompt and messages (the turns of a conversation). Rows are separated
    by empty lines.

    Raises:
        RequestError: the source is missing, unreadable, not UTF-8, or empty, or a row lacks the field.
        ConfigError: the package that reads this kind of source is missing.
    """
    name = str(source)
    if name.startswith(HUB):
        return _joined(name, _hub_rows(name.removeprefix(HUB)), field)
    suffix = Path(name).suffix.lower()
    if suffix in _JSON:
        return _joined(Path(name).name, _json_rows(Path(name)), field)
    if suffix in _PARQUET:
        return _joined(Path(name).name, _parquet_rows(Path(name)), field)
    if field is not None:
        raise ConfigError(
            f"{name} is read as plain text, which has no field {field!r}; leave --text-field out"
        )
    return EvalText(name=Path(name).name, text=decoded(Path(name)))


def _joined(name: str, rows: Iterable[Any], field: str | None) -> EvalText:
    texts: list[str] = []
    characters = 0
    for number, row in enumerate(rows, start=1):
        text = _text_of(f"{name}, row {number}", row, field)
        texts.append(text)
        characters += len(text)
        if characters > _MOST_CHARACTERS:
            break
    whole = "\n\n".join(text for text in texts if text.strip())
    if not whole:
        raise RequestError(f"{name} holds no text; give one of at least one window (--context) of tokens")
    check_unicode(whole, name)
    return EvalText(name=name, text=whole)


def _text_of(where: str, row: Any, field: str | None) -> str:
    if isinstance(row, str) and field is None:
        return row
    if not isinstance(row, Mapping):
        raise RequestError(f"{where}: expected an object with a field of text, got {type(row).__name__}")
    name = field or next((known for known in _FIELDS if known in row), None)
    if name is None or name not in row:
        raise RequestError(
            f"{where} has no field {field or ' or '.join(_FIELDS)}; "
            f"it has {', '.join(map(str, row)) or 'none'}: name one with --text-field"
        )
    value = row[name]
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(turn, Mapping) for turn in value):
        return "\n".join(filter(None, (_turn_text(turn.get("content")) for turn in value)))
    raise RequestError(f"{where}: field {name} must be text or a conversation, got {type(value).__name__}")


def _turn_text(content: Any) -> str:
    """Return the text of a turn; its content may be a list of parts such as {"type": "text", "text": ...}."""
    if isinstance(content, list):
        return "\n".join(filter(None, (_turn_text(part) for part in content)))
    if isinstance(content, Mapping):
        content = content.get("text")
    return content if isinstance(content, str) else ""


def _json_rows(path: Path) -> Iterator[Any]:
    text = decoded(path).removeprefix("\ufeff")
    if text.lstrip().startswith("["):
        try:
            yield from json.loads(text)
        except (ValueError, RecursionError) as error:
            raise RequestError(f"{path} is not JSON: {error}") from error
        return
    for number, line in enumerate(text.split("\n"), start=1):  # strings may contain other line separators
        if not line.strip():
            continue
        try:
            yield json.loads(line)
        except (ValueError, RecursionError) as error:
            raise RequestError(f"{path}, line {number} is not JSON: {error}") from error


def _parquet_rows(path: Path) -> Iterator[Any]:  # D41: pyarrow and `datasets`, streamed
    require(f"the Parquet file {path}", ("pyarrow",))
    from pyarrow import ArrowException, parquet

    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=1024):
                yield from batch.to_pylist()
    except OSError as error:
        raise RequestError(f"can't read {path}: {error}") from error
    except ArrowException as error:
        raise RequestError(f"{path} is not Parquet: {error}") from error


def _hub_rows(spec: str) -> Iterator[Any]:
    """Stream the rows of `NAME[:CONFIG[:SPLIT]]`, downloading no more rows than are read."""
    require(f"hf:{spec}", ("datasets",))
    import datasets

    name, _, rest = spec.partition(":")
    config, _, split = rest.partition(":")
    if not name:
        raise RequestError(f"a dataset is named hf:NAME[:CONFIG[:SPLIT]], got hf:{spec}")
    try:
        found = datasets.load_dataset(name, config or None, split=split or None, streaming=True)
        if isinstance(found, Mapping):
            found = next(iter(found.values()))
        yield from found
    except KVQError:
        raise
    except Exception as error:  # any error in a dataset's files or the network
        raise RequestError(
            f"can't read the dataset hf:{spec}: {first_lines(error)}; "
            f"is the name right, and the hub within reach?"
        ) from error
