"""Options of vLLM, llama.cpp's server, SGLang and LMDeploy, either translated to kvq's options or refused.

foreign.json has an entry for each option, looked up by `names`:

- `takes`: number of values: 0 (default), 1, "many" (up to an option or a path), or a list of the values that
may follow.
- `values`: kvq's options for specific values; empty if kvq always behaves that way.
- `as`: kvq's options for any other value, which replaces `{}`; `commas`: split the value at commas; `beside`:
a note about the translation.
- `always`: kvq's behaviour, which needs no option. `instead`: advice if there is no translation.
- `sets`: an environment variable that a positive whole number sets, as before the command.
- `secret`: whether values are hidden in messages.

One of kvq's own options has an entry if other engines accept other values, or several values, for it.
"""

import json
import os
from itertools import takewhile
from pathlib import Path
from typing import Any

import click

from kvq.commands.shared.terminal import echo
from kvq.errors import ConfigError

_Entry = dict[str, Any]
_TABLE = Path(__file__).with_name("foreign.json")  # D355: other engines' options are taken, mapped or refused


def translated(command: click.Command, words: list[str]) -> list[str]:
    """Translate a command line to the command's own options, and print the translations on standard error.

    Raises:
        ConfigError: an option has no translation (the message gives advice), or two options mean the same.
    """
    options = [one for one in command.params if isinstance(one, click.Option)]
    own = {name: one for one in options for name in (*one.opts, *one.secondary_opts)}
    entries: list[_Entry] = json.loads(_TABLE.read_text(encoding="utf-8"))
    table = {name: entry for entry in entries for name in entry["names"]}
    found: list[str] = []
    refused: list[str] = []
    spelled: dict[str | None, str] = {}  # how each option is spelled
    rest = list(words)
    while rest and rest[0] != "--":
        name, equals, value = (word := rest.pop(0)).partition("=")
        name = name.replace("_", "-") if name.startswith("--") else name
        option, entry = own.get(name), table.get(name.partition(".")[0])
        if not word.startswith("-") or (option is None and entry is None):
            found.append(word)
            continue
        takes = entry.get("takes", 0) if entry is not None else int(option is None or not option.is_flag)
        count = 0 if equals else _num_values(takes, rest)
        values, rest = [value] if equals else rest[:count], rest[count:]
        typed = [f"{name}={value}"] if equals else [name, *values]
        is_known = entry is not None and "".join(values[:1]).lower() in entry.get("values", {})
        if entry is None or (option is not None and count < 2 and not is_known):
            _check_once(spelled, option, name)
            found += typed
            continue
        shown = name if entry.get("secret") else " ".join(typed)
        if (became := _became(entry, values)) is None or (became and became[0] not in own):
            refused.append(f"{shown}: {entry.get('instead', 'it is for kvq serve')}")
            continue
        found += became
        _check_once(spelled, own[became[0]] if became else None, name)
        if became != typed:
            taken = f"taken as {became[0] if entry.get('secret') else ' '.join(became)}"
            notes = [taken, entry.get("beside", "")] if became else [entry.get("always", "")]
            echo(f"kvq: {shown}: {'; '.join(filter(None, notes))}", err=True)
    if refused:
        raise ConfigError("options that kvq does not have:\n  " + "\n  ".join(refused))
    return found + rest


def _check_once(spelled: dict[str | None, str], option: click.Option | None, name: str) -> None:
    """Raise ConfigError if a single-valued option was already specified under another name."""
    if option is None or option.multiple:
        return
    before = spelled.setdefault(option.name, name)
    if before != name and not {before, name} <= {*option.opts, *option.secondary_opts}:
        raise ConfigError(f"{before} and {name} are one option; give it once")


def _num_values(takes: int | str | list[str], rest: list[str]) -> int:
    """Return how many of the words after an option are its values."""
    if isinstance(takes, list):
        return int(bool(rest) and rest[0].lower() in takes)
    if takes != "many":
        return int(takes)
    more = takewhile(lambda word: word[:1] != "-" and "/" not in word and not Path(word).exists(), rest[1:])
    return 1 + len(list(more))


def _became(entry: _Entry, values: list[str]) -> list[str] | None:
    """Return an option as kvq's options: empty if there is nothing to add, None if untranslatable."""
    single = entry.get("values", {}).get(values[0].lower()) if values else None
    if single is not None:
        return list(single.split())
    if "sets" in entry and values and values[0].strip("0").isdecimal():
        os.environ[entry["sets"]] = values[0]  # D384: before torch is loaded or the engine's process starts
        return []
    if "as" in entry:
        values = values[0].split(",") if entry.get("commas") else values or [""]
        return [word.replace("{}", value) for value in values for word in entry["as"].split()]
    return None if "instead" in entry else []
