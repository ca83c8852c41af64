"""A door: YAML of `--config`."""

import random
import tempfile
import traceback
from pathlib import Path

import click

from benchmarks.fuzz.mutate import mutated_bytes
from kvq.errors import KVQError
from tests.commands.every_option import command

_KEYS = (
    "port",
    "wait",
    "model",
    "folder",
    "host",
    "fast",
    "max-num-seqs",
    "config",
    "help",
    "x",
    "<<",
    "? [a]",
)
_SCALARS = (
    "1",
    "-1",
    "1.5",
    "true",
    "~",
    "''",
    "'12'",
    "a b",
    "9" * 5000,
    "1e999",
    ".nan",
    "-.inf",
    "0x1F",
    "0o17",
    "0b1",
    "190:20:30",
    "2024-01-01",
    "2024-13-99",
    "2001-12-14t21:59:43.10-05:00",
    "!!binary aGk=",
    "!!binary ?",
    "!!python/object:os.system a",
    "!!python/name:os.system",
    "!!int x",
    "!!float y",
    "!!set {a, b}",
    "!!omap [a: 1]",
    "!!pairs [a: 1]",
    "!!timestamp x",
    "!!bool 3",
    "!!null x",
    "!foo bar",
    "&a 1",
    "*a",
    "|\n  text",
    ">\n  text",
    '"\\ud800"',
    '"\\x1b[2J"',
    '"\\u202e"',
    "[a, b]",
    "{a: b}",
    "{[a]: b}",
    "[" * 5000,
    "{a: " * 5000,
    "- " * 5000 + "a",
    "=",
    "<<",
    "\x07",
    "%",
    "@",
    "`",
    "!!str [a]",
    "!!seq a",
    "!!map [a]",
    "1_000",
    "0o9",
    "0x",
)
_LINES = (
    "---",
    "...",
    "%YAML 1.1",
    "%YAML 9.9",
    "%TAG ! tag:x,2024:",
    "# note",
    "? [a]\n: 1",
    "? {a: b}\n: 1",
    "- a",
    "!!merge <<: {port: 1}",
    "<<: {port: 1}",
    "<<: [{port: 1}, {wait: 2}]",
    "\t",
    "1: 2",
    "true: 1",
    "~: 1",
    "2024-01-01: 1",
    "1.5: 2",
    "!!binary aGk=: 1",
    "\ufeff",
    "a",
    "'",
    '"',
)


def case(odds: random.Random) -> str | None:
    """One file of options; a finding, if it is neither taken nor refused in words."""
    lines = [f"{odds.choice(_KEYS)}: {odds.choice(_SCALARS)}" for _ in range(odds.randrange(1, 4))]
    if odds.random() < 0.5:
        lines.insert(odds.randrange(len(lines) + 1), odds.choice(_LINES))
    content = "\n".join(lines).encode()
    if odds.random() < 0.4:
        content = mutated_bytes(odds, content)
    with tempfile.NamedTemporaryFile(suffix=".yaml") as file:
        Path(file.name).write_bytes(content)
        try:
            command.main(["--config", file.name], standalone_mode=False)
        except (KVQError, click.ClickException):
            return None
        except Exception:  # noqa: BLE001 - which is what is looked for
            return f"{content!r:.2000}\n{traceback.format_exc()}"
    return None
