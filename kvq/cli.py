"""Command line of kvq. Commands are imported only when they are called, so that `--help` is immediate."""

import importlib
import io
import json
import sys
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

from kvq.commands.machine import completion
from kvq.commands.shared.interrupts import interruptible
from kvq.commands.shared.memory_errors import check_addresses, memory_message
from kvq.commands.shared.terminal import echo, escape_unencodable, show_warnings
from kvq.errors import BrokenFormat, KVQError, nearest
from kvq.version import __version__

# Commands by group: the folder of their module in kvq.commands, and a line of help, shown without an import
_GROUPS = json.loads(Path(__file__).with_name("commands").joinpath("commands.json").read_text("utf-8"))
_COMMANDS = {name: entry for group in _GROUPS.values() for name, entry in group.items()}
_WINDOWS = (
    "kvq runs on Linux, macOS and WSL; on Windows, install WSL (wsl --install) and run it there, please."
)


class _Interrupted(BaseException):
    """Interrupt that click passes on; for a KeyboardInterrupt in a form, click would print an empty line."""


class _Commands(click.Group):
    """Group of commands that imports a command's module when the command is called, but not to list it."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in _COMMANDS:
            return None
        check_addresses()
        folder, _ = _COMMANDS[name]
        module = importlib.import_module(f"kvq.commands.{folder}.{name.replace('-', '_')}")
        command: click.Command = module.command
        return command

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as error:
            raise _Interrupted from error

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for title, group in _GROUPS.items():
            with formatter.section(title):
                formatter.write_dl([(name, line) for name, (_, line) in group.items()])

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem[Any]]:
        """Return kvq's own options and matching commands, without importing the commands."""
        found = [
            CompletionItem(name, help=line)
            for name, (_, line) in _COMMANDS.items()
            if name.startswith(incomplete)
        ]
        return found + click.Command.shell_complete(self, ctx, incomplete)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        is_known = not args or args[0].startswith("-") or args[0] in _COMMANDS
        if not is_known and not ctx.resilient_parsing:  # resilient: the shell is completing the line
            hint = nearest(args[0], _COMMANDS) or ";"
            ctx.fail(f"there is no command {args[0]!r}{hint} commands: {', '.join(_COMMANDS)}")
        return super().resolve_command(ctx, args)


@click.command(
    cls=_Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="Exit codes: 0 done, 1 a check failed, 2 the request was wrong, 130 interrupted.",
)
@click.version_option(__version__, prog_name="kvq")
def root() -> None:
    """Quantized, block-managed KV caches for language models, and what they cost.

    A MODEL is a folder, a name on the Hugging Face hub, or 'tiny', the embedded one. `kvq COMMAND --help`
    lists a command's options.
    """


def main(args: list[str] | None = None) -> Any:
    """Run the command line.

    kvq's errors are printed on one line and exit with code 2, or 1 if a KV format breaks the model.
    SIGTERM interrupts a command as Ctrl-C does, unless the command handles it.
    """
    if sys.platform == "win32":
        echo(_WINDOWS, err=True)
        sys.exit(2)
    escape_unencodable()
    show_warnings()
    completion.register()
    try:
        with interruptible():
            sys.exit(root.main(args, prog_name="kvq", standalone_mode=False))
    except click.ClickException as error:
        shown = io.StringIO()
        error.show(shown)
        echo(shown.getvalue(), nl=False, err=True)
        sys.exit(2)
    except (click.Abort, KeyboardInterrupt, _Interrupted):
        echo("kvq: interrupted", err=True)
        sys.exit(130)
    except KVQError as error:
        echo(f"kvq: error: {error}", err=True)
        sys.exit(1 if isinstance(error, BrokenFormat) else 2)
    except BrokenPipeError:  # the reader of the output, such as `head`, has exited
        sys.stderr.close()
        sys.exit(0)
    except (MemoryError, ImportError, OSError, RuntimeError, SystemError) as error:
        if (message := memory_message(error)) is None:
            raise
        echo(f"kvq: error: {message}", err=True)
        sys.exit(2)


if __name__ == "__main__":
    main()
