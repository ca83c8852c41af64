"""What shells need to complete kvq's commands: a script each, and where they read it.

The scripts are click's; every completion calls kvq itself, with `_KVQ_COMPLETE` in its environment.
"""

import os
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from click.shell_completion import (
    BashComplete,
    CompletionItem,
    FishComplete,
    ShellComplete,
    ZshComplete,
    add_completion_class,
)

VARIABLE = "_KVQ_COMPLETE"
MARK = "# Made by `kvq completion`"
_MOST_ANCESTORS = 8  # a shell may be behind make, sudo or a script


class _Valued(ShellComplete):
    """Completes `--option=value` too, where the shell hands it over as one word."""

    def get_completions(self, args: list[str], incomplete: str) -> list[CompletionItem[Any]]:
        """What the last word may become."""
        found = super().get_completions(args, incomplete)
        option, equals, _ = incomplete.partition("=")
        if equals and option.startswith("-"):
            for item in found:
                item.value = f"{option}={item.value}"
        return found


class Bash(_Valued, BashComplete):
    """bash, which cuts `--option=value` into three words."""

    def get_completion_args(self) -> tuple[list[str], str]:
        """The words before the last one, and that."""
        args, incomplete = super().get_completion_args()
        if args and args[-1] == "=":
            args.pop()
        return args, incomplete


class Zsh(_Valued, ZshComplete):
    """zsh, whose completion may not have been started yet when the script is read."""

    source_template = (
        "(( $+functions[compdef] )) || { autoload -Uz compinit && compinit -i }\n"
        + ZshComplete.source_template
    )


class Fish(_Valued, FishComplete):
    """fish; values with commas stay whole, which click's script cuts."""

    source_template = FishComplete.source_template.replace('split ","', 'split --max 1 ","')


_CLASSES: dict[str, type[ShellComplete]] = {"bash": Bash, "zsh": Zsh, "fish": Fish}
SHELLS = tuple(_CLASSES)


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where a shell finds the script."""

    script: Path
    startup: Path | None  # what has to read the script; None: the shell looks for it by itself

    @property
    def line(self) -> str:
        """What reads the script, if it is there, in the startup file."""
        quoted = shlex.quote(str(self.script))
        return f"if [ -f {quoted} ]; then . {quoted}; fi  {MARK} --install"


def register() -> None:
    """Let click complete by these classes."""
    for name, one in _CLASSES.items():
        add_completion_class(one, name)


def script_of(shell: str, command: click.Command) -> str:
    """The script that makes `shell` complete `command`."""
    return f"{MARK}\n{_CLASSES[shell](command, {}, 'kvq', VARIABLE).source()}"


def place_of(shell: str) -> Place:
    """Where a user's `shell` finds its script."""
    home = Path.home()
    if shell == "fish":
        folder = _folder("XDG_CONFIG_HOME", home / ".config") / "fish" / "completions"
        return Place(script=folder / "kvq.fish", startup=None)
    script = _folder("XDG_DATA_HOME", home / ".local" / "share") / "kvq" / f"completion.{shell}"
    startup = home / ".bashrc" if shell == "bash" else _folder("ZDOTDIR", home) / ".zshrc"
    return Place(script=script, startup=startup)


def calling_shell() -> str | None:
    """The nearest shell among the processes that called this one, else the user's own; None if unknown."""
    pid = os.getppid()
    for _ in range(_MOST_ANCESTORS):
        name, pid = _process(pid)
        if name in SHELLS:
            return name
        if pid <= 1:
            break
    own = Path(os.environ.get("SHELL", "")).name
    return own if own in SHELLS else None


def _folder(variable: str, default: Path) -> Path:
    """A folder that shells take from their environment; by XDG's rules only absolute ones count."""
    named = Path(os.environ.get(variable, ""))
    return named if named.is_absolute() else default


def _process(pid: int) -> tuple[str, int]:
    """A process's name and its parent; "" and 0 where that can't be told."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        _, _, rest = stat.partition("(")
        name, _, rest = rest.rpartition(")")
        return name, int(rest.split()[1])
    except OSError:
        pass
    import subprocess  # where there is no /proc, as on macOS

    try:
        asked = ["ps", "-o", "ppid=,comm=", "-p", str(pid)]
        words = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.split(maxsplit=1)
    except (OSError, subprocess.SubprocessError):
        return "", 0
    return Path(words[1].strip()).name.removeprefix("-"), int(words[0])
