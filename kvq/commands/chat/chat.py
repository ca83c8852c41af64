"""`kvq chat`: a conversation in the terminal, with a local model or a running server."""

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kvq import fileio
from kvq.commands.chat.partner import Answer, ChatSampling, ContextFull, Message
from kvq.commands.shared.declare import SectionedCommand, gathered, given_options, option, picked
from kvq.commands.shared.options import ACCEPT, GENERATION_CONFIG, ModelOptions, kv_option, model_options
from kvq.commands.shared.param_types import SIZE
from kvq.commands.shared.terminal import echo, stream
from kvq.errors import ConfigError, KVQError, nearest
from kvq.printable import one_line

if TYPE_CHECKING:
    from kvq.commands.chat.client import ServerPartner
    from kvq.commands.chat.engine import EnginePartner

_WITH_URL = {"url", "api_key_env", "model", "system", "temperature", "top_p", "max_tokens", "seed"}
_HELP = """\
/reset         start over, with the same system message
/system TEXT   set the system message, or drop it if there is no TEXT
/save FILE     write the conversation as JSON
/stats         show tokens and speed of the last answer
/exit          end, as Ctrl-D does
Ctrl-C stops an answer. A message that begins with / needs a blank before it."""


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

    If standard input is not a terminal, each input line is a message, and answers are plain text.
    """
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
    session = _ChatSession(partner, system=options.system, trim=options.trim, is_terminal=is_terminal)
    try:
        session.run(_typed(partner.name) if is_terminal else (line.rstrip("\n") for line in sys.stdin))
    finally:
        partner.close()
    sys.exit(1 if session.num_failed and not is_terminal else 0)


def _typed(name: str) -> Iterator[str]:
    """Yield typed lines; Ctrl-C discards the current line, and Ctrl-D ends the input."""
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


class _ChatSession:
    """Chat session that handles input lines, each of which is a message or a command."""

    def __init__(
        self,
        partner: "EnginePartner | ServerPartner",
        *,
        system: str | None = None,
        trim: bool = False,
        is_terminal: bool = False,
    ) -> None:
        """Start a conversation. `trim`: drop the oldest messages when the context is full."""
        self.num_failed = 0
        self._partner = partner
        self._system = system
        self._trim = trim
        self._is_terminal = is_terminal
        self._messages: list[Message] = []
        self._last: Answer | None = None
        self._saved: set[Path] = set()
        self._commands: dict[str, Callable[[str], None]] = {
            "/help": lambda _: echo(_HELP),
            "/reset": lambda _: self._messages.clear(),
            "/system": self._set_system,
            "/save": self._save,
            "/stats": lambda _: echo(self._stats()),
        }

    def run(self, lines: Iterable[str]) -> None:
        """Handle input lines until the input ends or a line is /exit."""
        for line in lines:
            name, _, rest = line.strip().partition(" ")
            if line.startswith("/") and name in ("/exit", "/quit"):
                return
            try:
                if line.startswith("/"):
                    self._command(name, rest.strip())
                elif line.strip():
                    self._send(line.strip())
            except KVQError as error:
                self.num_failed += 1
                echo(f"kvq: {error}", err=True)

    def _command(self, name: str, rest: str) -> None:
        if name not in self._commands:
            hint = nearest(name, self._commands) or ";"
            raise ConfigError(f"there is no {name}{hint} /help lists what there is")
        self._commands[name](rest)

    def _send(self, text: str) -> None:
        """Send a message and show the answer; a message that fails is removed from the conversation."""
        self._messages.append({"role": "user", "content": text})
        shown: list[str] = []
        self._last = None
        try:
            self._last = self._answer(shown)
        except KeyboardInterrupt:
            if not self._is_terminal:
                raise
            echo(" [stopped]", nl=False)
        except KVQError:
            if shown:
                echo()
            self._messages.pop()
            raise
        if shown:
            self._messages.append({"role": "assistant", "content": "".join(shown)})
        else:
            self._messages.pop()
        echo()
        if self._last is not None and self._last.fills_context:
            echo("kvq: the context is full: this answer was cut; /reset starts over", err=True)

    def _answer(self, shown: list[str]) -> Answer:
        while True:
            try:
                return self._partner.answer(self._with_system(), lambda text: self._show(text, shown))
            except ContextFull as error:
                if not self._trim or len(self._messages) < 3 or shown:
                    remedy = "/reset starts over" + ("" if self._trim else "; --trim drops the oldest turns")
                    raise ContextFull(f"the context is full: {error}; {remedy}") from error
                del self._messages[:2]
                echo("kvq: the context is full; the oldest turn was dropped", err=True)

    def _show(self, text: str, shown: list[str]) -> None:
        if text:
            shown.append(text)
            stream(text)

    def _with_system(self) -> list[Message]:
        system = [] if self._system is None else [{"role": "system", "content": self._system}]
        return [*system, *self._messages]

    def _set_system(self, text: str) -> None:
        self._system = text or None

    def _save(self, name: str) -> None:
        if not name:
            raise ConfigError("/save needs a file's name")
        path = fileio.check_writable(name)
        if path.exists() and path not in self._saved:
            raise ConfigError(f"{name} is there already; name another file")
        content = {"format_version": 1, "model": self._partner.name, "messages": self._with_system()}
        fileio.write_text(path, json.dumps(content, ensure_ascii=False, indent=1) + "\n")
        self._saved.add(path)

    def _stats(self) -> str:
        last = self._last
        if last is None:
            return "the last answer was not completed"
        kv = "" if last.kv_bytes is None else f", {last.kv_bytes:,} bytes of KV"
        return (
            f"{last.prompt_tokens:,} prompt tokens ({last.cached_tokens:,} cached), "
            f"{last.generated_tokens:,} generated{kv}; first token after {last.ttft_s * 1000:,.0f} ms, "
            f"then {last.tokens_per_s:,.1f} tokens/s"
        )
