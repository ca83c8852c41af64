"""Conversations to token ids as the server makes them: whatever a template does, it can be ended."""

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

from kvq.commands.chat.partner import Turn
from kvq.commands.shared.interrupts import cancelling
from kvq.errors import ConfigError, EngineError, RequestError
from kvq.models.loading.prepared import PreparedModel
from kvq.server.admission.bodies import ChatMessage
from kvq.server.admission.prompts import Conversation, Prompts
from kvq.server.http.problems import Problem
from kvq.server.reading import Readers, Setup

_Result = TypeVar("_Result")


@contextmanager
def reading_aside(
    prepared: PreparedModel, loop: asyncio.AbstractEventLoop
) -> Iterator[Callable[[list[Turn]], list[int]]]:
    """Yield a function that reads turns by processes of their own; it needs the server's packages.

    It raises RequestError where the template refuses the turns or takes too long for them, and EngineError
    where the processes are gone. At the end they are ended, whatever they do.

    Raises:
        ConfigError: the template fails, whatever is said.
        EngineError: it can't be tried.
    """

    def wait(work: Coroutine[None, None, _Result]) -> _Result:
        """Its result; a KeyboardInterrupt cancels it and is raised behind it."""
        task = loop.create_task(work)
        try:
            with cancelling(partial(loop.call_soon_threadsafe, task.cancel)):
                return loop.run_until_complete(task)
        except Problem as problem:
            kind = RequestError if problem.status < 500 else EngineError
            raise kind(problem.message) from problem

    def read(turns: list[Turn]) -> list[int]:
        # What somebody typed may be no valid Unicode, which the reader's answer says
        messages = [ChatMessage.model_construct(**turn) for turn in turns]  # type: ignore[arg-type]
        return wait(prompts.chat(Conversation(messages=messages, options={"add_generation_prompt": True})))

    prompts = Prompts(Readers(Setup(folder=str(prepared.folder))), prepared.tokenizer)
    try:
        wait(prompts.start())
        if (why := wait(prompts.try_one())) is not None:
            raise ConfigError(f"{prepared.folder}: {why}")
        yield read
    finally:
        prompts.close()
