"""`kvq completion`: the shell completes commands, options, and names of formats, models and GPUs."""

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

from kvq.commands.shared.terminal import echo
from kvq.errors import ConfigError

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
        options = ["ps", "-o", "ppid=,comm=", "-p", str(pid)]
        words = subprocess.run(options, capture_output=True, text=True, check=True).stdout.split(maxsplit=1)
    except (OSError, subprocess.SubprocessError):
        return "", 0
    return Path(words[1].strip()).name.removeprefix("-"), int(words[0])


@click.command(name="completion")
@click.argument("shell", metavar="[bash|zsh|fish]", required=False, type=click.Choice(SHELLS))
@click.option("--install", is_flag=True, help="Write the script where the shell finds it.")
def command(shell: str | None, install: bool) -> None:
    """Print the script that makes a shell complete kvq, by default the shell that calls.

    With --install it is written where that shell finds it; a second time changes nothing.
    """
    shell = shell or calling_shell()
    if shell is None:
        raise ConfigError(f"can't tell which shell this is; name it: kvq completion {' | '.join(SHELLS)}")
    command = click.get_current_context().find_root().command
    script = f"{MARK}\n{_CLASSES[shell](command, {}, 'kvq', VARIABLE).source()}"
    if install:
        _install(shell, place_of(shell), script)
    else:
        echo(script, nl=False)


def _install(shell: str, place: Place, script: str) -> None:
    did = [f"wrote {place.script}"] if _write(shell, place.script, script) else []
    if place.startup is not None and _add_line(place.startup, place.line):
        did.append(f"added a line to {place.startup}, which reads it")
    for line in did or [f"{shell} completes kvq already, by {place.script}; nothing was changed"]:
        echo(line)
    echo(f"Open a new {shell}, and try: kvq <Tab>")


def _write(shell: str, path: Path, script: str) -> bool:
    """Write the script, unless it is there; False if it was.

    Raises:
        ConfigError: a file that is not kvq's is in the way, or nothing can be written there.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        there = path.read_text(encoding="utf-8", errors="replace") if path.exists() else None
    except OSError as error:
        raise ConfigError(f"can't write {path}: {error.strerror or error}") from error
    if there == script:
        return False
    if there is not None and not there.startswith(MARK):
        raise ConfigError(
            f"{path} is there and not by kvq completion; move it away, or put what kvq completion {shell} "
            f"prints where your shell reads it"
        )
    from kvq import fileio  # tempfile and hashes, which help and completions need not wait for

    fileio.write_text(path, script)
    return True


def _add_line(path: Path, line: str) -> bool:
    """Append a line to a file of the user's, unless it has it; False if it has. Links and modes stay.

    Raises:
        ConfigError: nothing can be written there.
    """
    try:
        before = path.read_bytes() if path.exists() else b""
        if line.encode() in before.splitlines():
            return False
        with path.open("ab") as file:
            file.write((b"\n" if before and not before.endswith(b"\n") else b"") + line.encode() + b"\n")
    except OSError as error:
        raise ConfigError(
            f"can't write {path}: {error.strerror or error}; add this line to it: {line}"
        ) from error
    return True
