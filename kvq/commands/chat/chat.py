"""`kvq chat`: a conversation in the terminal, with a model or with a running server."""

import contextlib
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

from kvq.commands.chat.partner import ChatSampling
from kvq.commands.shared.options import (
    ACCEPT,
    GENERATION_CONFIG,
    ModelOptions,
    SectionedCommand,
    gathered,
    given_options,
    kv_option,
    model_options,
    option,
    picked,
)
from kvq.commands.shared.param_types import SIZE
from kvq.commands.shared.terminal import echo
from kvq.errors import ConfigError
from kvq.printable import one_line

if TYPE_CHECKING:
    from kvq.commands.chat.client import ServerPartner
    from kvq.commands.chat.engine import EnginePartner

_WITH_URL = {"url", "api_key_env", "model", "system", "temperature", "top_p", "max_tokens", "seed"}


@dataclass(frozen=True, kw_only=True, slots=True)
class _ChatOptions:
    kv_memory: str | None = option(
        None, "Size of the block pool, such as 2GiB; default: all free memory.", type=SIZE
    )
    url: str | None = option(None, "Chat with a running server, such as http://127.0.0.1:8000.")
    api_key_env: str | None = option(None, "With --url: the environment variable that holds the key.")
    system: str | None = option(None, "The system message.")
    accept_divergence: bool = option(False, ACCEPT)
    generation_config: str = option("auto", GENERATION_CONFIG)
    trim: bool = option(False, "Drop the oldest turns when the context is full.")


@click.command(name="chat", cls=SectionedCommand)
@kv_option("auto", many=False)
@model_options
@gathered(_ChatOptions, "options")
@gathered(ChatSampling, "sampling")
def command(
    kv: list[str], model_options: ModelOptions, options: _ChatOptions, sampling: ChatSampling
) -> None:
    """Chat in the terminal; /help lists further commands.

    If standard input is no terminal, every line of it is a message, and answers are plain text.
    """
    from kvq.commands.chat.session import ChatSession

    if options.url is not None:
        partner = _server(options.url, options.api_key_env, sampling)
    elif options.api_key_env is not None:
        raise ConfigError("--api-key-env is for --url")
    else:
        from kvq.commands.chat.engine import EnginePartner

        partner = EnginePartner(
            *(model_options, kv[0], sampling),
            **picked(options, "kv_memory", "accept_divergence", "generation_config"),
        )
    is_terminal = sys.stdin.isatty()
    session = ChatSession(partner, system=options.system, trim=options.trim, is_terminal=is_terminal)
    try:
        session.run(_typed(partner.name) if is_terminal else (line.rstrip("\n") for line in sys.stdin))
    finally:
        partner.close()
    sys.exit(1 if session.num_failed and not is_terminal else 0)


def _typed(name: str) -> Iterator[str]:
    """Yield typed lines; Ctrl-C drops a line, Ctrl-D ends."""
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


def _server(url: str, api_key_env: str | None, sampling: ChatSampling) -> "EnginePartner | ServerPartner":
    from kvq.commands.chat.client import ServerPartner

    given = given_options()
    if wrong := sorted(given[name] for name in given.keys() - _WITH_URL):
        raise ConfigError(f"with --url the server decides about {', '.join(wrong)}; leave it out")
    key = None
    if api_key_env is not None and not (key := os.environ.get(api_key_env)):
        raise ConfigError(f"the environment has no {api_key_env}")
    return ServerPartner(
        url, key, click.get_current_context().params["model"] if "model" in given else None, sampling
    )
