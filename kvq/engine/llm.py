"""`kvq.LLM`: offline engine that runs as many prompts at a time as the pool can hold."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Self, TypedDict, Unpack

from kvq.engine.loop import LoopedEngine
from kvq.engine.params import HintAction, Params, SamplingParams, as_params, each_params
from kvq.engine.requests.outputs import CompletionOutput, Event, Piece, RequestOutput, as_piece
from kvq.engine.requests.request_options import (
    Prompt,
    RequestFields,
    RequestOptions,
    as_prompts,
    prompt_tokens,
)
from kvq.engine.requests.request_state import Job
from kvq.engine.steps.publisher import StepSubscriber
from kvq.errors import RequestError
from kvq.models.run.prompts import PromptEncoder
from kvq.models.templates.forms import Turns
from kvq.scheduler import Priority

_MESSAGE = {"role": "user", "content": "Hello"}


class _BatchFields(TypedDict, total=False):
    """Fields of `RequestOptions` for all requests of a batch."""

    priority: str | Priority
    tenant: str
    cache_salt: str | None


class LLM(LoopedEngine):
    """Engine that runs in the caller's thread.

        llm = kvq.LLM("tiny", kv="int4", kv_memory="1GiB")
        for output in llm.generate(["Once upon"], kvq.SamplingParams(max_tokens=64)):
            print(output.outputs[0].text, output.receipt)

    Requests are batched continuously: each step computes the next token of every running request and a chunk
    of new requests' prompts.
    """

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: Params | Sequence[Params] | None = None,
        *,
        adapter: str | Sequence[str | None] | None = None,
        progress: Callable[[int, int], object] | None = None,
        **options: Unpack[_BatchFields],
    ) -> list[RequestOutput]:
        """Generate results for all prompts, in order. `params`: one set for all prompts, or one per prompt.

        All requests are checked before any is run. If a request fails while running, its output has an
        `error`, and the others continue. `adapter`: name of a LoRA adapter, or one per prompt; None for the
        base model. `progress` is called with (requests finished, total). `options`: priority, batch by
        default; tenant; `cache_salt`: cached prefixes are shared only among its requests with the same salt.

        Raises:
            RequestError: a prompt or its parameters can't be served; no request was run.
        """
        many = as_prompts(prompts)
        names = [adapter] * len(many) if adapter is None or isinstance(adapter, str) else adapter
        given = [
            RequestOptions(params=one, adapter=name, **_BatchFields(priority=Priority.BATCH) | options)
            for one, name in zip(each_params(params, len(many)), names, strict=True)
        ]
        return self._outputs(many, given, progress)

    def _outputs(
        self,
        many: Sequence[Prompt],
        given: Sequence[RequestOptions],
        progress: Callable[[int, int], object] | None,
    ) -> list[RequestOutput]:
        """Run requests to their ends, and return their outputs in order."""
        outputs: dict[int, RequestOutput] = {}  # by index

        def keep(index: int, event: Event) -> None:
            if isinstance(event, RequestOutput):
                outputs[index] = event
                if progress is not None:
                    progress(len(outputs), len(many))

        jobs = [
            self.core.intake.new_job(prompt, options, listener=partial(keep, i))
            for i, (prompt, options) in enumerate(zip(many, given, strict=True))
        ]
        self._run(jobs)
        return [outputs[i] for i in range(len(many))]

    def embed(
        self,
        texts: Prompt | Sequence[Prompt],
        *,
        dimensions: int | None = None,
        priority: str | Priority = Priority.BATCH,
        progress: Callable[[int, int], object] | None = None,
    ) -> list[list[float]]:
        """Return the embeddings of texts or token ids, in order, of a model made for them.

            llm = kvq.LLM("Qwen/Qwen3-Embedding-0.6B")
            vectors = llm.embed(["a text", "another one"])

        The model's files say how tokens' hidden states become one vector (docs/server.md); `LLM(pooling=...)`
        says it for other models. `dimensions`: the first so many, if the model allows it.

        Raises:
            RequestError: the model makes no embeddings, a text can't be served, or one failed while running.
        """
        many = as_prompts(texts)
        options = RequestOptions(pools=True, dimensions=dimensions, priority=priority)
        outputs = self._outputs(many, [options] * len(many), progress)
        if error := next((output.error for output in outputs if output.error is not None), None):
            raise error
        return [output.vector or [] for output in outputs]

    def chat(
        self,
        conversations: Turns | Sequence[Turns],
        params: Params | Sequence[Params] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_options: Mapping[str, Any] | None = None,
        progress: Callable[[int, int], object] | None = None,
    ) -> list[RequestOutput]:
        """Generate answers to conversations in the model's chat format, in order.

            llm.chat([{"role": "user", "content": "Hello"}])[0].outputs[0].text

        `conversations`: the messages of one, or several of these. `tools`: offered functions, as in OpenAI's
        chats; calls are in the text, in the model's own form. `template_options`: for the chat template, such
        as {"enable_thinking": False}. Texts of users and tools are plain, whatever they spell.
        `params`, `progress`: as for `generate`.

        Raises:
            RequestError: the model has no chat template, its template rejects a conversation, or a request
                can't be served; no request was run.
        """
        if not self.model.tokenizer.chat_template:
            raise RequestError("the model has no chat template, so it is a base model; use generate")
        options = {
            "add_generation_prompt": True,
            "tools": list(tools or ()) or None,
            **(template_options or {}),
        }
        prompts = [
            self._encoder.encode_chat(turns, options, max_tokens=self.core.max_context)
            for turns in _each(conversations)
        ]
        return self.generate(prompts, params, progress=progress)

    def stream(
        self, prompt: Prompt, params: Params | None = None, **options: Unpack[RequestFields]
    ) -> Iterator[Piece]:
        """Yield pieces of one prompt's results as they are generated. The request is checked immediately.

        `options`: fields of `RequestOptions`, such as `tenant`, `cache_salt` or `session`.
        Leaving the loop early cancels the request.

        Raises:
            RequestError: the request can't be served, or it failed while running.
        """
        events: list[Event] = []
        given = RequestOptions(params=as_params(params), **options)
        job = self.core.intake.new_job(prompt, given, listener=events.append)
        return self._stream(job, events)

    def score(
        self,
        prompts: Prompt | Sequence[Prompt],
        completions: Prompt | Sequence[Prompt],
        *,
        progress: Callable[[int, int], object] | None = None,
    ) -> list[RequestOutput]:
        """Return what `generate` would return if it chose these completions, one per prompt: their logprobs.

        In an engine loaded with `exact`, they have the bits of those that it returns when it generates. Texts
        of completions are tokenized apart, without special tokens; give token ids to score exactly what was
        generated. `progress`: as for `generate`.

        Raises:
            RequestError: a prompt or completion can't be served, such as an empty one, or one is missing.
        """
        beginnings, ends = as_prompts(prompts), as_prompts(completions)
        if len(beginnings) != len(ends):
            raise RequestError(f"{len(beginnings)} prompts have {len(ends)} completions; give one for each")
        pairs = [self._tokens_of(i, *pair) for i, pair in enumerate(zip(beginnings, ends, strict=True))]
        params = [
            SamplingParams(max_tokens=1, prompt_logprobs=0, prompt_logprobs_start=len(prompt))
            for prompt, _ in pairs
        ]
        outputs = self.generate([x + y for x, y in pairs], params, progress=progress)
        return [_scored(output, len(prompt)) for output, (prompt, _) in zip(outputs, pairs, strict=True)]

    @cached_property
    def _encoder(self) -> PromptEncoder:
        return PromptEncoder(self.model.tokenizer)

    def _tokens_of(self, index: int, prompt: Prompt, completion: Prompt) -> tuple[list[int], list[int]]:
        """Return the token ids of a prompt and of its completion, number `index`."""
        own, vocab = self.core.model.tokenizer, self.core.model.geometry.vocab_size
        if isinstance(completion, str):
            completion = own(completion, add_special_tokens=False)["input_ids"]
        if not len(completion):
            raise RequestError(f"completion {index} is empty, so there is nothing to score; leave it out")
        return prompt_tokens(prompt, own, vocab).tolist(), prompt_tokens(completion, own, vocab).tolist()

    def hint(
        self, session: str, action: HintAction, seconds: float | None = None, *, tenant: str = ""
    ) -> None:
        """Say what should happen to a session's KV; see `Sessions.hint`. Unknown sessions are ignored.

        Raises:
            RequestError: the action is unknown.
        """
        self.core.sessions.hint(tenant, session, action, seconds)

    def load_adapter(self, name: str, folder: str | Path) -> None:
        """Read a LoRA adapter from a PEFT folder, so that requests may name it.

        Raises:
            ConfigError: the name is taken.
            ModelError: the adapter is damaged, of another model, or of a kind that kvq would run incorrectly.
        """
        self.core.adapters.load(name, folder)

    def unload_adapter(self, name: str) -> None:
        """Forget a LoRA adapter; raise RequestError if there is none of that name."""
        self.core.adapters.unload(name)

    def on_step(self, subscriber: StepSubscriber) -> Callable[[], None]:
        """Call `subscriber` with `StepStats` after every step. Returns a function that unsubscribes."""
        return self.core.on_step(subscriber)

    def step(self) -> None:
        """Run one step. For callers that drive the engine themselves."""
        self._loop.step()

    def close(self) -> None:
        """End all requests and release the memory."""
        if not self._is_ending():
            self.core.close()
            self._loop.watchdog.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self, jobs: list[Job]) -> None:
        """Submit jobs and run steps until all jobs have ended. An interrupt cancels the jobs."""
        try:
            for job in jobs:
                while not self.core.can_submit(job):
                    self.step()
                self.core.submit(job)
            while self.core.has_work:
                self.step()
        except BaseException:
            for job in jobs:
                self.core.cancel(job)
            raise

    def _stream(self, job: Job, events: list[Event]) -> Iterator[Piece]:
        self.core.submit(job)
        try:
            while True:
                for piece in map(as_piece, events):
                    yield piece
                    if piece.output is not None:
                        return
                events.clear()
                self.step()
        finally:
            if not self._is_ending():
                self.core.cancel(job)


def _each(given: Any) -> list[Turns]:
    """Return one conversation or several as a list; raise RequestError for anything else."""
    is_one = isinstance(given, Sequence) and len(given) > 0 and isinstance(given[0], Mapping)
    many = [given] if is_one else given
    if not isinstance(many, Sequence) or not many or not all(map(_is_conversation, many)):
        raise RequestError(f"a conversation is a list of messages such as {_MESSAGE}, got {given!r:.100}")
    return list(many)


def _is_conversation(given: Any) -> bool:
    is_list = isinstance(given, Sequence) and not isinstance(given, str) and len(given) > 0
    return is_list and all(isinstance(one, Mapping) and isinstance(one.get("role"), str) for one in given)


def _scored(output: RequestOutput, length: int) -> RequestOutput:
    """Return an output with the part of its prompt from `length` on as the result."""
    prompt, tokens = output.prompt_token_ids[:length], output.prompt_token_ids[length:]
    entries = [entry for entry in (output.prompt_logprobs or [])[length:] if entry is not None]
    result = CompletionOutput(index=0, text="", token_ids=tokens, finish_reason="length", logprobs=entries)
    result.cumulative_logprob = sum(entry.logprob for entry in entries)
    return replace(output, prompt_token_ids=prompt, outputs=[result], prompt_logprobs=None)
