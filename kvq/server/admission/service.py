"""Service behind the routes: the engine, the tokenizer, admission and metrics."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from kvq.engine import SamplingParams
from kvq.engine.requests.defaults import SamplingDefaults
from kvq.engine.requests.outputs import Piece
from kvq.engine.requests.request_options import RequestOptions, check_known
from kvq.errors import ConfigError, EngineError, RequestError, not_one_of
from kvq.models.describe.pooling import Pooling
from kvq.server.admission.admission import Admission, blocks_wanted
from kvq.server.admission.bodies import HintBody
from kvq.server.admission.config import ServerConfig
from kvq.server.admission.metrics import Metrics
from kvq.server.admission.prompts import Prompts
from kvq.server.admission.slots import SequenceSlots
from kvq.server.admission.transcript import transcript
from kvq.server.engine.messages import Ended, ErrorKind, Hint, Ready
from kvq.server.engine.remote import Remote, State
from kvq.server.http.ignored import Body, find_ignored
from kvq.server.http.loop_budget import LoopBudget
from kvq.server.http.problems import Problem, failed, timed_out, unavailable
from kvq.server.logs import log_event
from kvq.server.tools.calling import ToolCalling

# Problems of requests that the engine ended
_PROBLEMS: dict[ErrorKind | None, Callable[[str], Problem]] = {
    "request": partial(Problem, 400),
    "busy": unavailable,
    "engine": failed,
    None: failed,
}


class Service:
    """Front end of the engine: admits requests and streams their results until the server shuts down."""

    def __init__(
        self,
        names: str | tuple[str, ...],
        remote: Remote,
        prompts: Prompts,
        config: ServerConfig | None = None,
        *,
        tools: ToolCalling | None = None,
        defaults: SamplingDefaults | None = None,
    ) -> None:
        """`names`: the model's names for clients; responses use the first. `tools`: the model's tool-call
        format. `defaults`: values for fields that requests omit.
        """
        config = config or ServerConfig()
        self.names = (names,) if isinstance(names, str) else names
        self.name = self.names[0]
        self.remote = remote
        self.prompts = prompts
        self.counting = prompts.for_counting()  # for requests that do not use the engine
        self.tools = tools or ToolCalling()
        self.defaults = defaults or SamplingDefaults()
        self.pooling: Pooling | None = None  # of a model for embeddings or scores
        self.admission = Admission(config.admission, config.tenants, engine=remote, prompts=prompts)
        self.metrics = Metrics(remote, self.name, config.metrics_names)
        self.loop_budget = LoopBudget()
        self.num_active = 0
        self.is_strict = config.strict_requests
        self.kv_formats = (config.kv, *config.kv_also)
        self.adapters = list(config.engine.get("adapters", ()))  # names that requests may give as their model
        self.adapter_folder = config.adapter_folder
        self.kv_format_of: Callable[[str], str | None] = lambda tenant: None  # of its API key
        self.tracing = None if config.tracing is None else config.tracing()
        self.overflow = None if config.overflow is None else config.overflow(self.metrics.registry)
        self.recorder = None if config.record is None else config.record()
        self.most_stored = (config.stored_responses, config.stored_responses_bytes)  # responses and bytes
        self._watch()
        self._timeout_s = config.timeout_s
        self.is_draining = False
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def why_not_ready(self) -> str | None:
        """Reason why no request can be accepted at the moment, or None."""
        if self.is_draining:
            return "the server is shutting down"
        if self.remote.state is not State.READY:
            return f"the engine is {self.remote.state.value}"
        return None

    @property
    def models(self) -> tuple[str, ...]:
        """Names that requests may give as their model: the model's, then those of adapters."""
        return *self.names, *self.adapters

    def adapter_of(self, name: str | None) -> str | None:
        """Return the name of a request's adapter, or None if it is for the model itself."""
        return name if name in self.adapters else None

    async def change_adapter(self, name: str, path: str | None) -> None:
        """Load an adapter from a path in the operator's folder, or unload it if `path` is None.

        Raises:
            Problem: the operator named no folder, the path lies outside it, or the engine refused.
        """
        if (folder := self.adapter_folder) is None:
            raise Problem(403, "adapters can't be changed here; the operator can allow it: --adapter-folder")
        if path is None and name not in self.adapters:
            raise Problem(404, not_one_of("lora_name", name, self.adapters), param="lora_name")
        if path is not None and name in self.models:
            raise Problem(400, f"there is a model {name!r} already; unload it first", param="lora_name")
        try:
            place = None if path is None else (folder / path).resolve()
        except (OSError, ValueError) as error:  # a loop of links, or a NUL
            raise Problem(400, f"lora_path can't be read: {error}", param="lora_path") from error
        if place is not None and not place.is_relative_to(folder.resolve()):
            raise Problem(403, "lora_path must lie in the folder that the operator named", param="lora_path")
        try:
            await self.remote.change_adapter(name, None if place is None else str(place))
        except ConfigError as error:
            words = str(error).replace(f"{folder.resolve()}/", "")  # which clients need not know
            raise Problem(400, words, param="lora_path") from error
        except EngineError as error:
            raise unavailable(str(error)) from error
        if path is None:
            self.adapters.remove(name)
        else:
            self.adapters.append(name)

    def check_ready(self) -> None:
        """Raise Problem while no request can be accepted."""
        if (reason := self.why_not_ready) is not None:
            raise unavailable(reason)

    def check_model(self, name: str | None, kv_format: str | None = None) -> None:
        """Raise Problem if `name` is not a name of the served model, or the KV format not one of its."""
        if kv_format is not None and kv_format not in self.kv_formats:
            more = "" if len(self.kv_formats) > 1 else "; its operator can allow more with --kv-also"
            words = not_one_of("kv_format", kv_format, self.kv_formats) + more
            raise Problem(400, words, param="kv_format")
        if name is not None and name not in self.models:
            raise Problem(
                404,
                f"no model {name!r} here; this server has {', '.join(map(repr, self.models))}",
                code="model_not_found",
                param="model",
            )

    async def check_fields(self, given: Any, body: Body) -> list[str]:
        """Count the ignored fields of a decoded body and return their paths; see `find_ignored`.

        Raises:
            Problem: the server is strict, and an unknown field is not a label.
        """
        fields = ("tools", "chat_template_kwargs", "reasoning_effort", "reasoning")
        is_for_template = any(map(given.get, fields))
        forms = await self.prompts.forms() if is_for_template else None
        names, unknown = find_ignored(given, body, forms)
        if unknown is not None and (self.is_strict or isinstance(body, HintBody)):
            self.metrics.ignored.labels("refused").inc()
            raise unknown.refusal()
        if names:
            self.metrics.ignored.labels("label" if unknown is None else "unknown").inc()
        return names

    def hint(self, tenant: str, body: HintBody) -> None:
        """Pass on a hint about a tenant's session to the engine."""
        self.remote.hint(
            Hint(tenant=tenant, session=body.session_id, action=body.action, seconds=body.seconds)
        )

    def check_arrival(self, tenant: str, *, may_overflow: bool = False) -> None:
        """Raise Problem if a tenant's request can't be accepted, regardless of its body.

        `may_overflow`: the load of this server is no reason.
        """
        with self._counting_refusals():
            self.check_ready()
            if may_overflow and self.overflow is not None:
                self.admission.tenants[tenant].check()
            else:
                self.admission.check(tenant)

    def check_prompt(self, tokens: Sequence[int], options: RequestOptions, where: str) -> None:
        """Raise Problem if the engine would refuse a prompt; used before any prompt of a request starts."""
        info = self._info()
        with self._counting_refusals():
            try:
                check_known(tokens, info.vocab_size)
            except RequestError as error:
                raise Problem(400, str(error), param=where) from error
            blocks_wanted(options.params, len(tokens), info.of(self._format_of(options)))

    def thinks(
        self, params: SamplingParams, tokens: Sequence[int], begun: str | None = None
    ) -> tuple[bool | None, SamplingParams]:
        """Return `Thinking.is_open` for the response, and sampling parameters that allow thinking.

        `begun`: the start of the assistant message that the response continues, if any.
        """
        if (thinking := self.tools.thinking) is None:
            return False, params
        before = "".join(map(self.prompts.texts.text, tokens[-16:])) if begun is None else begun
        is_open = thinking.is_open(before, is_continued=begun is not None)
        return is_open, thinking.params(params, is_open)

    @contextmanager
    def text_request(self, tenant: str) -> Iterator[None]:  # D301
        """Admit a request that does not need the engine.

        Raises:
            Problem: the server is shutting down, or the tenant has sent too many requests.
        """
        if self.is_draining:
            raise unavailable("the server is shutting down")
        limits = self.admission.tenants[tenant]
        limits.check()
        with limits.active():
            yield

    @contextmanager
    def enter(self, tenant: str, slots: SequenceSlots) -> Iterator[None]:
        """Admit a request and count its slots until the response is complete.

        Raises:
            Problem: the server can't accept the request now, or the tenant has sent too many requests.
        """
        with contextlib.ExitStack() as stack:
            with self._counting_refusals():
                self.check_ready()
                stack.enter_context(self.admission.enter(tenant, slots))
            self.num_active += 1
            self._idle.clear()
            stack.callback(self._leave)
            yield

    async def stream(
        self, tokens: Sequence[int], options: RequestOptions, slots: SequenceSlots
    ) -> AsyncGenerator[Piece | Ended]:
        """Yield a prompt's messages up to its successful `Ended`. `slots`: the slots of the prompt's request.

        Raises:
            Problem: the prompt failed, or can't be served now or at all.
        """
        info = self._info()
        options = replace(options, kv_format=self._format_of(options))
        kept = transcript.get()
        if kept is not None:
            options, kept = kept.take(options)
        with contextlib.ExitStack() as stack:
            with self._counting_refusals():
                own = info.of(options.kv_format)
                entry = stack.enter_context(self.admission.queue(tokens, options.params, own, slots))
            note = partial(self.admission.note, entry)  # even if the client reads slowly
            messages = self.remote.stream(tokens, options, timeout_s=self._timeout_s, on_message=note)
            status = "cancelled"  # unless it is replaced below
            try:
                async for message in messages:
                    if kept is not None:
                        kept.add(message)
                    if isinstance(message, Ended):
                        status = ""  # counted by its own status
                        self._count(message, options.tenant)
                        if self.tracing is not None:
                            self.tracing.ended(message, options.params)
                        if message.error is not None:
                            raise _PROBLEMS[message.kind](message.error).counted()
                    elif self.tracing is not None and message.finish_reason is not None:
                        self.tracing.finished(message.finish_reason)
                    yield message
            except TimeoutError as error:
                status = "timeout"
                words = f"the request did not end within {self._timeout_s:g} s"
                raise timed_out(words).counted() from error
            except EngineError as error:
                status = "error"
                raise unavailable(str(error)).counted() from error
            finally:
                if status:
                    self.metrics.count(status)
                    if self.tracing is not None:
                        self.tracing.failed(status)
                await messages.aclose()

    def _format_of(self, options: RequestOptions) -> str | None:
        """Return the KV format of a request: its own, or that of its API key; None: the server's."""
        return options.kv_format or self.kv_format_of(options.tenant)

    def _info(self) -> Ready:
        """Return the engine's description; raise Problem if no engine is running."""
        self.check_ready()
        assert self.remote.info is not None, "a ready engine said what it is"
        return self.remote.info

    async def drain(self, grace_s: float | None) -> None:
        """Stop accepting requests, and hand the running ones over if the engine knows another one.

        Returns when all have ended, or after `grace_s`.
        """
        self.is_draining = True
        self.remote.hand_over()
        self.loop_budget.close()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), grace_s)

    def hurry(self) -> None:
        """Make `drain` return immediately."""
        self._idle.set()

    async def close(self) -> None:
        """Terminate the engine; waiting requests get an error object."""
        await self.remote.close()
        self.counting.close()
        self.prompts.close()
        if self.overflow is not None:
            await self.overflow.close()
        for one in (self.recorder, self.tracing):
            if one is not None:
                await asyncio.to_thread(one.close)

    @contextmanager
    def _counting_refusals(self) -> Iterator[None]:
        try:
            yield
        except Problem as problem:
            self.metrics.count(problem.counted().ending)
            raise

    def _count(self, ended: Ended, tenant: str) -> None:
        self.metrics.ended(ended)
        if (used := ended.receipt) is not None:
            counts = ("prompt_tokens", "cached_tokens", "generated_tokens")
            times: dict[str, Any] = {
                name: getattr(ended.timing, name, None) for name in ("queue_s", "ttft_s", "e2e_s")
            }
            log_event(
                "generated",
                **{name: getattr(used, name) for name in counts},
                preemptions=used.preemptions or None,
                **times,
                tenant=tenant or None,
                kv_format=ended.kv_format,
                failed=None if ended.error is None else ended.kind,
            )
            computed = used.prompt_tokens - used.cached_tokens + used.generated_tokens
            self.admission.tenants[tenant].charge(computed)

    def _watch(self) -> None:
        watch, admission = self.metrics.watch, self.admission
        watch(
            "kvq_active_requests", "Requests between their arrival and their answer.", lambda: self.num_active
        )
        watch("kvq_requests_waiting", "Requests without a slot at the engine.", lambda: admission.num_waiting)
        watch("kvq_load", "Waiting work / work that may wait.", lambda: admission.load)
        watch("kvq_http_tasks", "Tasks of the event loop.", lambda: len(asyncio.all_tasks()))

    def _leave(self) -> None:
        self.num_active -= 1
        if not self.num_active:
            self._idle.set()


def describe(service: Service, created: int, name: str) -> dict[str, Any]:
    """Return the entry in `/v1/models` for one of the model's names."""
    info = service.remote.info
    limit = {} if info is None else {"max_model_len": info.max_context, "vocab_size": info.vocab_size}
    parent = {} if service.adapter_of(name) is None else {"parent": service.name}
    return {"id": name, "object": "model", "created": created, "owned_by": "kvq"} | parent | limit
