"""`kvq completion`: shell completion for commands, options, and names of formats, models and GPUs."""

import os
import shlex
from pathlib import Path
from typing import Any

import click
from click import shell_completion

from kvq.commands.shared.terminal import echo
from kvq.errors import ConfigError, explained

VARIABLE = "_KVQ_COMPLETE"
MARK = "# Made by `kvq completion`"
_MOST_ANCESTORS = 8  # make, sudo or a script may run between the shell and kvq


class _Valued(shell_completion.ShellComplete):
    """Completion that also supports `--option=value` if the shell passes it as one word."""

    def get_completions(self, args: list[str], incomplete: str) -> list[shell_completion.CompletionItem[Any]]:
        """Return completions for the last word."""
        found = super().get_completions(args, incomplete)
        option, equals, _ = incomplete.partition("=")
        if equals and option.startswith("-"):
            for item in found:
                item.value = f"{option}={item.value}"
        return found


class _Bash(_Valued, shell_completion.BashComplete):
    """Completion for bash, which splits `--option=value` into three words."""

    def get_completion_args(self) -> tuple[list[str], str]:
        """Return all words except the last, and the last word."""
        args, incomplete = super().get_completion_args()
        if args and args[-1] == "=":
            args.pop()
        return args, incomplete


class _Zsh(_Valued, shell_completion.ZshComplete):
    """Completion for zsh; the script initializes zsh's completion system if necessary."""

    source_template = (
        "(( $+functions[compdef] )) || { autoload -Uz compinit && compinit -i }\n"
        + shell_completion.ZshComplete.source_template
    )


class _Fish(_Valued, shell_completion.FishComplete):
    """Completion for fish; unlike click's script, this one does not split values at commas."""

    source_template = shell_completion.FishComplete.source_template.replace('split ","', 'split --max 1 ","')


# D364
_CLASSES: dict[str, type[shell_completion.ShellComplete]] = {"bash": _Bash, "zsh": _Zsh, "fish": _Fish}
SHELLS = tuple(_CLASSES)


def register() -> None:
    """Register kvq's completion classes with click."""
    for name, one in _CLASSES.items():
        shell_completion.add_completion_class(one, name)


def _place_of(shell: str) -> tuple[Path, Path | None]:
    """Return the path of the script for `shell`, and the startup file that must load the script, if any."""
    home = Path.home()
    if shell == "fish":
        return _folder("XDG_CONFIG_HOME", home / ".config") / "fish" / "completions" / "kvq.fish", None
    script = _folder("XDG_DATA_HOME", home / ".local" / "share") / "kvq" / f"completion.{shell}"
    return script, home / ".bashrc" if shell == "bash" else _folder("ZDOTDIR", home) / ".zshrc"


def calling_shell() -> str | None:
    """Return the nearest shell among the ancestor processes, or else the login shell; None if unsupported."""
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
    """Return the folder named by an environment variable, or `default` if the path is not absolute."""
    named = Path(os.environ.get(variable, ""))
    return named if named.is_absolute() else default


def _process(pid: int) -> tuple[str, int]:
    """Return a process's name and its parent's id, or "" and 0 if they can't be determined."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        _, _, rest = stat.partition("(")
        name, _, rest = rest.rpartition(")")
        return name, int(rest.split()[1])
    except OSError:
        pass
    import subprocess  # without /proc, as on macOS

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
    """Print a script that completes kvq's commands in a shell, by default the calling shell.

    With --install, the script is written where the shell finds it; a second --install changes nothing.
    """
    shell = shell or calling_shell()
    if shell is None:
        raise ConfigError(f"can't tell which shell this is; name it: kvq completion {' | '.join(SHELLS)}")
    command = click.get_current_context().find_root().command
    script = f"{MARK}\n{_CLASSES[shell](command, {}, 'kvq', VARIABLE).source()}"
    if install:
        _install(shell, script)
    else:
        echo(script, nl=False)


def _install(shell: str, script: str) -> None:
    path, startup = _place_of(shell)
    did = [f"wrote {path}"] if _write(shell, path, script) else []
    quoted = shlex.quote(str(path))
    line = f"if [ -f {quoted} ]; then . {quoted}; fi  {MARK} --install"  # loads the script if it exists
    if startup is not None and _add_line(startup, line):
        did.append(f"added a line to {startup}, which reads it")
    for told in did or [f"{shell} completes kvq already, by {path}; nothing was changed"]:
        echo(told)
    echo(f"Open a new {shell}, and try: kvq <Tab>")


def _write(shell: str, path: Path, script: str) -> bool:
    """Write the script, or return False if the file already has this text.

    Raises:
        ConfigError: the file is not kvq's, or can't be read.
    """
    with explained(ConfigError, f"can't write {path}"):
        path.parent.mkdir(parents=True, exist_ok=True)
        there = path.read_text(encoding="utf-8", errors="replace") if path.exists() else None
    if there == script:
        return False
    if there is not None and not there.startswith(MARK):
        raise ConfigError(
            f"{path} is there and not by kvq completion; move it away, or put what kvq completion {shell} "
            f"prints where your shell reads it"
        )
    from kvq import fileio  # imported late: help and completions don't need it

    fileio.write_text(path, script)
    return True


def _add_line(path: Path, line: str) -> bool:
    """Append a line to a user's file, or return False if it is already there; links and modes are kept."""
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
