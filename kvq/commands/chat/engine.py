"""Chat partner in this process: an engine with the model's own chat template."""

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import TypeVar

from kvq.commands.chat.partner import Answer, ChatSampling, ContextFull, Message, Show
from kvq.commands.shared.interrupts import cancelling
from kvq.commands.shared.loading import check_for, load_to_serve
from kvq.commands.shared.options import ModelOptions
from kvq.commands.shared.terminal import say_defaults
from kvq.engine import AsyncLLM, SamplingParams
from kvq.engine.build import check_cache
from kvq.engine.requests.outputs import RequestOutput
from kvq.errors import ConfigError, EngineError, RequestError
from kvq.extras import SERVER, is_installed
from kvq.models.loading.prepared import PreparedModel
from kvq.models.run.prompts import PromptEncoder

_LEAST_ROOM = 64  # minimum number of tokens for an answer
_USUAL = {"temperature": 0.7, "max_tokens": None}
_Result = TypeVar("_Result")


class EnginePartner:
    """Model loaded in this process. The KV of earlier messages is reused through the prefix index."""

    def __init__(
        self,
        options: ModelOptions,
        kv: str,
        sampling: ChatSampling,
        *,
        kv_memory: str | None = None,
        accept_divergence: bool = False,
        generation_config: str = "auto",
    ) -> None:
        """Load the model.

        Raises:
            ConfigError: the chat template is missing or broken, or an option is unsuitable.
            ModelError: the model is missing, damaged or not supported.
            BrokenFormat: the format breaks the model, and `accept_divergence` is False.
        """
        given = sampling.body()
        SamplingParams(**given)  # raises errors before anything is read
        checked = check_for(options, [kv])
        check_cache(checked.prepared)
        _check_template(checked.prepared)
        self.name = checked.prepared.source.name
        defaults = say_defaults(checked.prepared.source, generation_config)
        self._params = SamplingParams(**defaults.fill(_USUAL | given, given))
        with ExitStack() as held:
            # The loop outlives an answer, because the engine may still send events to it
            self._loop = held.enter_context(asyncio.Runner()).get_loop()
            self._read = held.enter_context(_reading(checked.prepared, self._loop))
            model = load_to_serve(checked, kv, accept_divergence=accept_divergence)
            self._engine = AsyncLLM(model, max_num_seqs=1, kv_memory=kv_memory)
            held.callback(self._engine.close)
            self._held = held.pop_all()
        self._max_context = self._engine.core.max_context

    def answer(self, messages: list[Message], show: Show) -> Answer:
        """Answer the last message; a KeyboardInterrupt cancels the answer.

        Raises:
            ContextFull: the context has no room for an answer.
            RequestError: the template or the engine rejects the messages.
            EngineError: the engine or the prompt reader fails.
        """
        tokens = self._read(messages)
        room = self._max_context - len(tokens)
        wanted = self._params.max_tokens or self._params.most_tokens
        if room < min(wanted or _LEAST_ROOM, self._max_context // 4):
            raise ContextFull(f"{len(tokens):,} of {self._max_context:,} tokens are taken")
        max_tokens = None if wanted is None else min(wanted, room)
        output = self._run(self._stream(tokens, max_tokens, show))
        timing, receipt = output.timing, output.receipt
        return Answer(
            prompt_tokens=receipt.prompt_tokens,
            cached_tokens=receipt.cached_tokens,
            generated_tokens=receipt.generated_tokens,
            ttft_s=timing.ttft_s or 0.0,
            total_s=timing.e2e_s or 0.0,
            kv_bytes=receipt.peak_bytes,
            fills_context=output.outputs[0].finish_reason == "length" and (wanted is None or wanted > room),
        )

    def close(self) -> None:
        """Stop the engine and the prompt reader."""
        self._held.close()

    def _run(self, work: Coroutine[None, None, _Result]) -> _Result:
        """Run a coroutine, and cancel it on KeyboardInterrupt, even while an answer is printed."""
        task = self._loop.create_task(work)
        try:
            return self._loop.run_until_complete(task)
        except KeyboardInterrupt:
            if task.cancel():
                with suppress(asyncio.CancelledError):
                    self._loop.run_until_complete(task)
            raise

    async def _stream(self, tokens: list[int], max_tokens: int | None, show: Show) -> RequestOutput:
        params = replace(self._params, max_tokens=max_tokens)
        output: RequestOutput | None = None
        async for piece in self._engine.stream(tokens, params):
            show(piece.text)
            output = piece.output
        assert output is not None, "a stream ends with the output"
        return output


@contextmanager
def _reading(
    prepared: PreparedModel, loop: asyncio.AbstractEventLoop
) -> Iterator[Callable[[list[Message]], list[int]]]:
    """Yield a function that encodes messages as token ids, including the generation prompt."""
    if all(map(is_installed, SERVER)):
        with _process_reader(prepared, loop) as read:
            yield read
    else:  # in this process, where only Ctrl-C stops a template that takes too long
        encoder = PromptEncoder(prepared.tokenizer)
        yield lambda messages: encoder.encode_chat(messages, {"add_generation_prompt": True})


def _check_template(prepared: PreparedModel) -> None:
    """Raise ConfigError if the model has no chat template, before weights are loaded."""
    if not getattr(prepared.tokenizer, "chat_template", None):
        raise ConfigError(
            f"{prepared.source} has no chat template, so it is a base model: "
            f'use kvq generate --model {prepared.folder} "PROMPT"'
        )


@contextmanager
def _process_reader(  # D337: prompts are encoded in separate processes, as in the server
    prepared: PreparedModel, loop: asyncio.AbstractEventLoop
) -> Iterator[Callable[[list[Message]], list[int]]]:
    """Yield a function that encodes messages in separate processes, which require the server's packages.

    A chat template that takes too long can therefore be stopped. The function raises RequestError if the
    template rejects the messages or takes too long, and EngineError if the processes have died. The processes
    are stopped, or killed, at the end of the block.

    Raises:
        ConfigError: the template fails for all messages.
        EngineError: the template can't be tested.
    """
    from kvq.server.admission.bodies import ChatMessage
    from kvq.server.admission.prompts import Prompts
    from kvq.server.http.problems import Problem
    from kvq.server.reading import Readers, Setup

    def wait(work: Coroutine[None, None, _Result]) -> _Result:
        """Run a coroutine; a KeyboardInterrupt cancels the coroutine and is raised after it has ended."""
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
