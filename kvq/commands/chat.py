"""`kvq chat`: a conversation in the terminal."""

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

import click
from click.core import ParameterSource

from kvq.commands.chat_partner import Sampling
from kvq.commands.options import ModelOptions, Size, gathered, kv_option, model_options
from kvq.commands.screen import echo
from kvq.errors import ConfigError
from kvq.printable import one_line

if TYPE_CHECKING:
    from kvq.commands.chat_partner import Partner

_WITH_URL = {"url", "api_key_env", "model", "system", "temperature", "top_p", "max_tokens", "seed"}


@click.command(name="chat")
@kv_option("auto", many=False)
@model_options
@click.option(
    "--kv-memory", type=Size(), help="Bytes of the block pool, such as 2GiB; default: what is free."
)
@click.option("--url", help="Chat with a running server, such as http://127.0.0.1:8000.")
@click.option("--api-key-env", help="With --url: the environment variable that holds the key.")
@click.option("--system", help="The system message.")
@click.option("--temperature", default=0.7, show_default=True, help="0 takes the likeliest token.")
@click.option(
    "--top-p", default=1.0, show_default=True, help="Nucleus sampling: keep this share of probability."
)
@click.option("--max-tokens", "-n", type=click.IntRange(min=1), help="Of one answer.  [default: the context]")
@click.option("--seed", type=int, help="Makes sampling repeatable.")
@click.option("--trim", is_flag=True, help="Drop the oldest turns when the context is full.")
@gathered(Sampling, "sampling")
def command(
    kv: list[str],
    model_options: ModelOptions,
    kv_memory: str | None,
    url: str | None,
    api_key_env: str | None,
    system: str | None,
    sampling: Sampling,
    trim: bool,
) -> None:
    """Chat in the terminal; /help lists what can be asked for besides.

    When standard input is no terminal, every line of it is a message, and answers are plain text.
    """
    from kvq.commands.chat_session import Session

    if url is not None:
        partner = _server(url, api_key_env, sampling)
    elif api_key_env is not None:
        raise ConfigError("--api-key-env is for --url")
    else:
        from kvq.commands.chat_engine import EnginePartner

        partner = EnginePartner(model_options, kv[0], sampling, kv_memory=kv_memory)
    is_terminal = sys.stdin.isatty()
    session = Session(partner, system=system, trim=trim, is_terminal=is_terminal)
    try:
        session.run(_typed(partner.name) if is_terminal else (line.rstrip("\n") for line in sys.stdin))
    finally:
        partner.close()
    sys.exit(1 if session.num_failed and not is_terminal else 0)


def _typed(name: str) -> Iterator[str]:
    """What is typed, line by line; Ctrl-C drops a line, Ctrl-D ends."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - gives input() its history and editing
    echo(f"{one_line(name)}: /help lists commands, Ctrl-C stops an answer, Ctrl-D ends")
    while True:
        try:
            yield input("> ")
        except KeyboardInterrupt:
            echo()
        except EOFError:
            echo()
            return


def _server(url: str, api_key_env: str | None, sampling: Sampling) -> "Partner":
    from kvq.commands.chat_client import ServerPartner

    context = click.get_current_context()
    given = {
        parameter.name
        for parameter in context.command.params
        if parameter.name and context.get_parameter_source(parameter.name) is ParameterSource.COMMANDLINE
    }
    if wrong := given - _WITH_URL:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in sorted(wrong))
        raise ConfigError(f"with --url the server decides about {names}; leave it out")
    key = None
    if api_key_env is not None and not (key := os.environ.get(api_key_env)):
        raise ConfigError(f"the environment has no {api_key_env}")
    return ServerPartner(url, key, context.params["model"] if "model" in given else None, sampling)
