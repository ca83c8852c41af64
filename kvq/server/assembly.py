"""Assembly of a server: the engine process and the service in front of it."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvq.engine.requests.defaults import read_defaults
from kvq.errors import KVQError
from kvq.models.describe.pooling import read_pooling
from kvq.models.describe.resolve import ModelSource, resolve_model
from kvq.server.admission.config import ServerConfig
from kvq.server.admission.prompts import DEADLINE_S, Prompts
from kvq.server.admission.service import Service
from kvq.server.engine.messages import Start
from kvq.server.engine.remote import Remote
from kvq.server.reading import Readers, Setup
from kvq.server.tools.calling import ToolCalling

_log = logging.getLogger("kvq")


def describe_engine(config: ServerConfig) -> tuple[ModelSource, Start]:
    """Return the model's source and the description of its engine. Raises KVQError if there is no model."""
    options = dict(config.engine)
    source = resolve_model(
        config.model, revision=options.pop("revision", None), token=options.pop("token", None)
    )
    same = ("kv", "log", "kv_events", "kv_also", "kv_also_share", "guard_fallback")
    start = Start(
        folder=str(source.folder), options=options, **{name: getattr(config, name) for name in same}
    )
    return source, start


def make_remote(config: ServerConfig, on_failed: Callable[[KVQError], object]) -> tuple[ModelSource, Remote]:
    """Return the model's source and an engine, not yet started. `on_failed` is called if the engine fails.

    Raises:
        KVQError: the model can't be found.
    """
    source, start = describe_engine(config)
    return source, Remote(start, max_restarts=config.max_restarts, on_failed=on_failed)


def make_service(
    config: ServerConfig,
    name: str,
    folder: Path,
    remote: Remote,
    tokenizer: Any,
    *,
    deadline_s: float = DEADLINE_S,
) -> Service:
    """Return the service for an engine. `name`: the model's name, unless the configuration sets names.
    `deadline_s`: time limit for reading one prompt.

    Raises:
        ConfigError: the format of tool calls is unknown, or generation_config.json can't be used.
    """
    defaults = read_defaults(folder, config.generation_config)
    if text := str(defaults):
        _log.info("%s", text)
    tools = ToolCalling.of(tokenizer, config.tool_call_parser, config.reasoning_parser)
    setup = Setup(folder=str(folder), chat_template=config.chat_template, trusts_chats=config.trusts_chats)
    prompts = Prompts(
        Readers(setup),
        tokenizer,
        plain_texts=not config.trusts_completions,
        deadline_s=deadline_s,
        max_tokens=lambda: None if remote.info is None else remote.info.max_context,
    )
    names = config.served_model_name or name
    service = Service(names, remote, prompts, config, tools=tools, defaults=defaults)
    service.pooling = read_pooling(folder, config.engine.get("pooling", "auto"))
    return service
