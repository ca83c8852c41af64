"""What a server is made of: the engine's process, and the service in front of it."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvq.engine.requests.defaults import read_defaults
from kvq.errors import KVQError
from kvq.models.describe.resolve import ModelSource, resolve_model
from kvq.server.admission.config import ServerConfig
from kvq.server.admission.prompts import Prompts
from kvq.server.admission.service import Service
from kvq.server.engine.messages import Start
from kvq.server.engine.remote import Remote, Watch
from kvq.server.reading import Readers, Setup
from kvq.server.tools.calling import ToolCalling

_log = logging.getLogger("kvq")


def make_remote(config: ServerConfig, on_failed: Callable[[KVQError], object]) -> tuple[ModelSource, Remote]:
    """Where the model is, and its engine, not started yet; `on_failed` is told why there won't be one.

    Raises:
        KVQError: there is no such model.
    """
    options = dict(config.engine)
    source = resolve_model(
        config.model, revision=options.pop("revision", None), token=options.pop("token", None)
    )
    start = Start(
        folder=str(source.folder), kv=config.kv, options=options, log=config.log, kv_events=config.kv_events
    )
    return source, Remote(start, watch=Watch(max_restarts=config.max_restarts), on_failed=on_failed)


def make_service(
    config: ServerConfig,
    name: str,
    folder: Path,
    remote: Remote,
    tokenizer: Any,
    prompts: Prompts | None = None,
) -> Service:
    """The service over an engine. `name`: of the model, unless the configuration has others. `prompts`: read
    otherwise than for clients who wait.

    Raises:
        ConfigError: there are no such tool calls, or no such generation_config.json.
    """
    defaults = read_defaults(folder, config.generation_config)
    if told := str(defaults):
        _log.info("%s", told)
    tools = ToolCalling.of(tokenizer, config.tool_call_parser, config.reasoning_parser)
    setup = Setup(folder=str(folder), chat_template=config.chat_template, trusts_chats=config.trusts_chats)
    prompts = prompts or Prompts(
        Readers(setup),
        tokenizer,
        plain_texts=not config.trusts_completions,
        max_tokens=lambda: None if remote.info is None else remote.info.max_context,
    )
    return Service(config.served_model_name or name, remote, prompts, config, tools=tools, defaults=defaults)
