"""Conversations to token ids as the server makes them: whatever a template does, it can be ended."""

import asyncio
from collections.abc import Coroutine
from functools import partial
from typing import TypeVar

from kvq.commands.chat_partner import Turn
from kvq.commands.interrupts import cancelling
from kvq.errors import ConfigError, EngineError, KVQError, RequestError
from kvq.models.prepared import PreparedModel
from kvq.server.bodies import ChatMessage
from kvq.server.problems import Problem
from kvq.server.prompts import Conversation, Prompts
from kvq.server.reading import Readers, Setup

_Result = TypeVar("_Result")


class ReaderAside:
    """Of one model; it needs the server's packages."""

    def __init__(self, prepared: PreparedModel, runner: asyncio.Runner) -> None:
        self._folder = prepared.folder
        self._prompts = Prompts(Readers(Setup(folder=str(prepared.folder))), prepared.tokenizer)
        self._loop = runner.get_loop()

    def check(self) -> None:
        """Start the processes, and try the template.

        Raises:
            ConfigError: it fails, whatever is said.
            EngineError: it can't be tried.
        """
        self._await(self._prompts.start())
        why = self._await(self._prompts.try_one())
        if why is not None:
            raise ConfigError(f"{self._folder}: {why}")

    def read(self, turns: list[Turn]) -> list[int]:
        """Token ids, with what begins an answer.

        Raises:
            RequestError: the template refuses the turns, or takes too long for them.
            EngineError: the processes are gone.
        """
        # What somebody typed may be no valid Unicode, which the reader's answer says
        messages = [ChatMessage.model_construct(**turn) for turn in turns]  # type: ignore[arg-type]
        conversation = Conversation(messages=messages, options={"add_generation_prompt": True})
        return self._await(self._prompts.chat(conversation))

    def close(self) -> None:
        """End the processes, whatever they do."""
        self._prompts.close()

    def _await(self, work: Coroutine[None, None, _Result]) -> _Result:
        """Its result; a KeyboardInterrupt cancels it and is raised behind it."""
        task = self._loop.create_task(work)
        try:
            with cancelling(partial(self._loop.call_soon_threadsafe, task.cancel)):
                return self._loop.run_until_complete(task)
        except Problem as problem:
            raise _error_of(problem) from problem


def _error_of(problem: Problem) -> KVQError:
    return (RequestError if problem.status < 500 else EngineError)(problem.message)
