"""`kvq detect-watermark`: detection of the watermark in generated texts, from tokens and the secret key."""

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvq.commands.shared.declare import gathered, option, path_option
from kvq.commands.shared.param_types import FILE, MODEL, PATH, Finite
from kvq.commands.shared.terminal import echo
from kvq.errors import ConfigError, RequestError
from kvq.fileio import write_text
from kvq.version import __version__

if TYPE_CHECKING:
    from kvq.watermark import Detection, Scheme

FALSE_ALARMS = 1e-4


@dataclass(frozen=True, kw_only=True, slots=True)
class _DetectOptions:
    model: str = option(
        "tiny", "Folder or hub name of the model that may have written them.", names="--model -m", type=MODEL
    )
    key_file: Path | None = option(None, "Secret key of the watermark.", type=FILE)
    scheme: str = option("green", "Scheme, as given to the engine's --watermark-scheme.")
    false_alarms: float = option(
        FALSE_ALARMS,
        "Share of texts without the mark that may be called marked.",
        type=Finite(0, 1, min_open=True, max_open=True),
    )
    lines: bool = option(False, "Each line of a file is a text.")
    new_key: Path | None = option(None, "Write a new secret key to this new file, and end.", type=PATH)
    json_path: str | None = path_option("--json", "Write the findings as JSON.")


@click.command(name="detect-watermark")
@click.argument("files", metavar="[MODEL] [FILES]...", nargs=-1, type=click.Path(allow_dash=True))
@gathered(_DetectOptions, "options")
def command(files: tuple[str, ...], options: _DetectOptions) -> None:
    """Detect the watermark in texts from FILES or standard input (-). A folder before FILES is the MODEL.

    Neither the model's weights nor the prompt is needed: the text is split into tokens, and tokens with
    enough context are tested. p is the probability that a text without the mark looks at least as marked as
    this text; --false-alarms is the share of unmarked texts that may be reported as marked.
    """
    if options.new_key is not None:
        _make_key(options.new_key, files)
        return
    if options.key_file is None:
        raise ConfigError(
            "--key-file is needed, the key that texts were marked with; --new-key FILE makes one for others"
        )
    from kvq.models.describe.resolve import resolve_model
    from kvq.models.loading.tokenizer import load_without_torch
    from kvq.watermark import detect, parse_scheme, read_key

    scheme, key = parse_scheme(options.scheme), read_key(options.key_file)
    if files and Path(files[0]).is_dir():
        options, files = replace(options, model=files[0]), files[1:]
    texts = list(_texts(files or ("-",), is_by_line=options.lines))
    tokenizer = load_without_torch(resolve_model(options.model, weights=False).folder)
    rows = []
    for name, text in texts:
        found = detect(tokenizer.encode(text, add_special_tokens=False), scheme, key)
        rows.append(_row(name, found, scheme, options.false_alarms))
        echo(_in_words(rows[-1]))
    if options.json_path is not None:
        _write_json(options.json_path, rows, options)


def _make_key(path: Path, files: Sequence[str]) -> None:
    from kvq.watermark import make_key

    if files:
        raise ConfigError(f"--new-key makes a key and looks at no text, got {files[0]}; leave it out")
    make_key(path)
    echo(f"wrote {path}: keep a copy, texts that are marked with it are found by nothing else")


def _texts(files: Sequence[str], *, is_by_line: bool) -> Iterator[tuple[str, str]]:
    """Yield (name, text) pairs; raise RequestError if a file is not UTF-8 or contains no text."""
    from kvq.evals.text import decoded

    for file in files:
        name = "standard input" if file == "-" else file
        text = _standard_input() if file == "-" else decoded(Path(file))
        if not is_by_line:
            yield name, text.rstrip("\r\n")
            continue
        for number, line in enumerate(text.splitlines(), 1):
            if line.strip():
                yield f"{name}:{number}", line


def _standard_input() -> str:
    try:
        text = sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(f"standard input is not UTF-8 text (byte {error.start})") from error
    if not text.strip():
        raise RequestError("standard input is empty; give it a text, or name files")
    return text


def _row(name: str, found: "Detection", scheme: "Scheme", false_alarms: float) -> dict[str, Any]:
    from kvq.watermark.detection import least_p

    return {
        "text": name,
        **asdict(found),
        "is_marked": found.p < false_alarms,
        "is_long_enough": least_p(found.counted, scheme) < false_alarms,
    }


def _in_words(row: dict[str, Any]) -> str:
    if row["is_marked"]:
        verdict = "marked"
    elif row["is_long_enough"]:
        verdict = "no mark found"
    else:
        verdict = "too short to tell"
    return (
        f"{row['text']}: {verdict}; z {row['z']:.1f}, p {row['p']:.2g}, {row['counted']} of "
        f"{row['tokens']} tokens counted"
    )


def _write_json(path: str, rows: list[dict[str, Any]], options: _DetectOptions) -> None:
    from kvq.watermark.schemes import parse_scheme, spelled

    scheme = spelled(parse_scheme(options.scheme))
    facts = {"kvq_version": __version__, "scheme": scheme, "false_alarms": options.false_alarms}
    write_text(path, json.dumps({**facts, "rows": rows}, indent=1, allow_nan=False) + "\n")
