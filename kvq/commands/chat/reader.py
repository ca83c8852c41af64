"""Prompt reader in processes, as in the server: whatever a chat template does, it can be ended."""

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

from kvq.commands.chat.partner import Message
from kvq.commands.shared.interrupts import cancelling
from kvq.errors import ConfigError, EngineError, RequestError
from kvq.models.loading.prepared import PreparedModel
from kvq.server.admission.bodies import ChatMessage
from kvq.server.admission.prompts import Prompts
from kvq.server.http.problems import Problem
from kvq.server.reading import Readers, Setup

_Result = TypeVar("_Result")


@contextmanager
def process_reader(  # D337: prompts read aside, as in the server
    prepared: PreparedModel, loop: asyncio.AbstractEventLoop
) -> Iterator[Callable[[list[Message]], list[int]]]:
    """Yield a function that encodes messages in separate processes; it needs the server's packages.

    The function raises RequestError if the template refuses the messages or takes too long, and EngineError
    if the processes are gone. At the end of the block they are killed if needed.

    Raises:
        ConfigError: the template fails for any messages.
        EngineError: it can't be tried.
    """

    def wait(work: Coroutine[None, None, _Result]) -> _Result:
        """Run a coroutine; a KeyboardInterrupt cancels it and is raised after it ended."""
        task = loop.create_task(work)
        try:
            with cancelling(partial(loop.call_soon_threadsafe, task.cancel)):
                return loop.run_until_complete(task)
        except Problem as problem:
            kind = RequestError if problem.status < 500 else EngineError
            raise kind(problem.message) from problem

    def read(messages: list[Message]) -> list[int]:
        # Not validated here: typed text may be invalid Unicode, which the reader reports
        chat = [ChatMessage.model_construct(**message) for message in messages]  # type: ignore[arg-type]
        return list(wait(prompts.chat((chat, {"add_generation_prompt": True}))))

    prompts = Prompts(Readers(Setup(folder=str(prepared.folder))), prepared.tokenizer)
    try:
        wait(prompts.start())
        if (why := wait(prompts.try_one())) is not None:
            raise ConfigError(f"{prepared.folder}: {why}")
        yield read
    finally:
        prompts.close()
