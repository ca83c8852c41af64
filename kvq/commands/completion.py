"""`kvq completion`: the shell completes commands, options, and names of formats, models and GPUs."""

from pathlib import Path

import click

from kvq import fileio
from kvq.commands.screen import echo
from kvq.commands.shells import MARK, SHELLS, Place, calling_shell, place_of, script_of
from kvq.errors import ConfigError


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
    script = script_of(shell, click.get_current_context().find_root().command)
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
