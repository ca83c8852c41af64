"""The engine's core: one step is schedule, run, sample, commit, and telling everybody."""

import itertools
import logging
import random
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from concurrent.futures import Future
from functools import cached_property
from math import inf
from time import perf_counter
from typing import Any

from kvq.blockmgr.prefix import token_array
from kvq.cache.memory import held_bytes
from kvq.engine.beam import BeamSearch
from kvq.engine.build import check_cache
from kvq.engine.choose import Choices, Chooser, Token, describe
from kvq.engine.config import EngineConfig
from kvq.engine.grammar import Grammar, GrammarCompiler
from kvq.engine.here import Home, StaysHere
from kvq.engine.job import Job, Listener
from kvq.engine.launch import Launched, Launcher
from kvq.engine.linear_time import LinearTime
from kvq.engine.outputs import FinishReason, Timing
from kvq.engine.params import MAX_PINS, MAX_SALT, PrefixPin, SamplingParams
from kvq.engine.parts import build_parts
from kvq.engine.pinning import Pinning
from kvq.engine.reconcile import reconcile
from kvq.engine.runner import StepOutput
from kvq.engine.sampling import Sampler, TokenLogprobs, check_params
from kvq.engine.stats import StepStats
from kvq.errors import EngineError, KVQError, RequestError
from kvq.models import Model
from kvq.models.prompts import check_length, longest_token
from kvq.models.unicode import check_unicode
from kvq.scheduler import (
    Branch,
    Priority,
    Request,
    StepPlan,
)

_log = logging.getLogger("kvq")
_PROMPT = "a prompt is a text or a list of token ids"
_PROMPT_LOGPROB_BYTES = 64 << 20  # logits of one step that prompt log-probabilities may take
StepSubscriber = Callable[[StepStats], object]


class EngineCore(StaysHere):
    """Requests in, tokens out, one step at a time. All calls come from one thread."""

    def __init__(
        self, model: Model, config: EngineConfig, *, clock: Callable[[], float] = perf_counter
    ) -> None:
        """Measure a step of full size, then allocate the pools; nothing is allocated for them later.

        Raises:
            ConfigError: an option out of range, or static scales missing.
            OutOfMemory: the pools don't fit.
        """
        check_cache(model.prepared)
        self._home = Home()
        model.check_scales()
        before = held_bytes(model.weights.device)
        self.model = model
        self.config = config
        self._clock = clock
        weights = model.weights
        self.max_context = min(config.max_context or weights.max_context, weights.max_context)
        self.scheduler, self.runner = build_parts(model, config, self.max_context)
        sampler = Sampler(
            max_rows=config.max_num_seqs, vocab_size=model.geometry.vocab_size, device=weights.device
        )
        self._chooser = Chooser(sampler, config.max_num_seqs)
        self._jobs: dict[Request, Job] = {}
        self.pinning = Pinning(self.scheduler.manager)
        asks = config.async_scheduling
        self._launcher = Launcher(
            self.scheduler,
            self.runner,
            self._jobs,
            clock,
            runs_ahead=weights.device.type == "cuda" if asks is None else asks,
        )
        num_blocks = [pool.num_blocks for pool in self.scheduler.manager.pools]
        self.memory = reconcile(model, self.runner.cache, num_blocks, before)
        self.memory.report()
        self._compiling: list[tuple[Job, Future[Grammar]]] = []
        self._grammars: GrammarCompiler | None = None
        self._ids = itertools.count()
        self._subscribers: list[StepSubscriber] = []
        self._linear: LinearTime | None = None
        self._random = random.SystemRandom()
        self._is_stepping = False
        self._finished = 0  # requests, in this step
        self._closed = False

    # What goes in

    def new_job(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams,
        *,
        priority: Priority = Priority.INTERACTIVE,
        tenant: str = "",
        shared_salt: str | None = None,
        cache_salt: str | None = None,
        request_id: str | None = None,
        listener: Listener | None = None,
        pins: Sequence[PrefixPin] = (),
    ) -> Job:
        """Check a request and prepare it; `submit` makes it run. May be called from any thread.

        `pins`: prefixes of the prompt that shall stay cached, for its tenant or its salt only.
        `cache_salt`: it shares cached prefixes only with requests of its tenant that name the same, of 1 to
        1,024 characters.

        Raises:
            RequestError: it can't be served, or can never fit.
            EngineError: this process was forked from the one that made the engine.
        """
        self._home.check()
        for name, value in (
            ("tenant", tenant),
            ("shared_salt", shared_salt or ""),
            ("request_id", request_id or ""),
        ):
            if not isinstance(value, str):
                raise RequestError(f"{name} must be a text, got {value!r}")
        _check_salt(cache_salt)
        text = prompt if isinstance(prompt, str) else None
        if text is not None and len(text) > self.max_context:
            check_length(text, self.max_context, self._longest_token)
        tokens = prompt_tokens(prompt, self.model.tokenizer, self.model.geometry.vocab_size)
        check_params(params, self.model.geometry.vocab_size)
        start = params.prompt_logprobs_start
        if start and (params.prompt_logprobs is None or start >= len(tokens)):
            raise RequestError(
                f"prompt_logprobs_start must be below the {len(tokens)} prompt tokens, and needs "
                f"prompt_logprobs, got {start} and {params.prompt_logprobs}"
            )
        request = Request(
            id=request_id or f"request-{next(self._ids)}",
            tokens=tokens,
            max_tokens=params.max_tokens,
            num_branches=params.num_sequences,
            priority=priority,
            tenant=tenant,
            shared_salt=shared_salt,
            cache_salt=cache_salt,
            **self._prompt_logprob_limits(params, len(tokens)),
        )
        max_tokens = self.scheduler.check(request)
        if len(pins) > MAX_PINS or any(pin.length > len(tokens) for pin in pins):
            raise RequestError(f"a request may pin {MAX_PINS} prefixes of its {len(tokens)} prompt tokens")
        eos = frozenset() if params.ignore_eos else self.model.end_ids
        if params.structured is not None and params.ignore_eos:
            raise RequestError("structured output ends by the end token; leave ignore_eos out")
        block_bytes = [group.block_bytes for group in self.model.layout.groups]
        job = Job(
            request=request,
            params=params,
            prompt=self.model.tokenizer.decode(tokens) if text is None and params.echo else text,
            seed=self._random.getrandbits(63) if params.seed is None else int(params.seed),
            end_ids=eos | frozenset(params.stop_token_ids),
            block_bytes=sum(block_bytes) / len(block_bytes),
            listener=listener,
            timing=Timing(arrival_s=self._clock()),
            prompt_logprobs=None if params.prompt_logprobs is None else [None] * max(1, start),
            pins=sorted(pins, key=lambda pin: pin.length),
        )
        if params.beam_width is not None:
            job.beams = BeamSearch(
                params.beam_width,
                params.n,
                length_penalty=params.length_penalty,
                early_stopping=params.early_stopping,
                max_tokens=max_tokens,
                end_ids=job.end_ids,
                min_tokens=params.min_tokens,
            )
        return job

    def submit(self, job: Job, *, arrival_s: float | None = None) -> None:
        """Queue a job; one with a grammar once that is compiled, aside from the steps.

        `arrival_s`: on the engine's clock, if it came while a step ran; TTFT counts from there.

        Raises:
            RequestError: too many grammars wait to be compiled.
            EngineError: the engine was closed.
        """
        if self._closed:
            raise EngineError("the engine was closed; make a new one")
        job.timing.arrival_s = self._clock() if arrival_s is None else arrival_s
        if job.params.structured is None:
            self._begin(job, None)
            return
        if self._grammars is None:
            self._grammars = GrammarCompiler(
                self.model.tokenizer, self.model.geometry.vocab_size, eos_ids=sorted(self.model.end_ids)
            )
        self._compiling.append((job, self._grammars.submit(job.params.structured, tenant=job.request.tenant)))

    def cancel(self, job: Job) -> None:
        """End a job now; nothing happens if it has ended."""
        for entry in self._compiling:
            if entry[0] is job:
                entry[1].cancel()
                self._compiling.remove(entry)
                self._complete(job, None, "cancelled")
                return
        if job.request in self._jobs:
            self._end(job, None, "cancelled")

    def on_step(self, subscriber: StepSubscriber) -> Callable[[], None]:
        """Call `subscriber` with the stats of every step from now on. Returns a function that ends it."""
        self._subscribers.append(subscriber)
        if self._linear is None and self.model.weights.device.type == "cpu":
            self._linear = LinearTime(self.model.weights.model)

        return lambda: self._unsubscribe(subscriber)

    @property
    def has_work(self) -> bool:
        """True while any job has not ended."""
        return bool(self._jobs) or bool(self._compiling)

    @property
    def is_waiting(self) -> bool:
        """True if all that is left to do is waiting for grammars."""
        return bool(self._compiling) and not self._jobs

    def can_submit(self, job: Job) -> bool:
        """False while so many grammars wait to be compiled that `submit` might refuse a job for it."""
        if job.params.structured is None or self._grammars is None:
            return True
        return self._grammars.has_room(job.request.tenant)

    # One step

    def step(self) -> bool:
        """Run one step; False if there was nothing to run.

        Raises:
            EngineError: called from a listener, inside a step, or in a forked child.
        """
        self._home.check()
        if self._is_stepping:
            raise EngineError("the engine is inside a step: whoever listens to it can't step it")
        self._is_stepping = True
        try:
            return self._step()
        finally:
            self._is_stepping = False

    def _step(self) -> bool:
        began = self._clock()
        self._finished = 0
        self.scheduler.manager.expire(began)
        self._begin_compiled()
        ahead = self._launcher.take_ahead()
        plan = self._plan(began) if ahead is None else ahead.plan
        if plan is None:
            return False
        planned = self._clock()
        try:
            if ahead is None:
                running = self._launcher.launch(plan, planned - began)
            else:
                running = self._launcher.resume(ahead)
            plan, output = running.plan, running.output
            ran = self._clock()
            pending = self._chooser.choose(plan, output, self._jobs, running.errors)
            launched = self._clock()
            self._launcher.launch_ahead(plan, pending)
            waited = self._clock()
            choices = pending.wait()
            chosen = self._clock()
            self._settle(plan, output, choices, chosen)
        except BaseException:  # an interruption too: the plan's tokens have slots and were never committed
            self._abandon()
            raise
        began += waited - launched  # launching the next step is that one's time
        if ahead is not None:
            began -= running.scheduling_s + running.forward_s
        if plan.branches:
            self.scheduler.costs.observe(
                num_decodes=plan.num_decodes,
                prefill_tokens=plan.num_tokens - plan.num_decodes,
                depth=plan.ends[-1],
                seconds=chosen - began,
            )
        if self._subscribers:
            self._publish(running, began, sampling_s=launched - ran + chosen - waited)
        return True

    def close(self, error: KVQError | None = None) -> None:
        """End every job, with `error` or as cancelled, and give back what lies outside the device."""
        reason: FinishReason = "cancelled" if error is None else "error"
        self._closed = True
        if not self._home.is_here:  # in a forked child, what lies outside is still its parent's
            return
        self._launcher.forget()
        for job, future in self._compiling:
            future.cancel()
            self._complete(job, error, reason)
        self._compiling.clear()
        for job in list(self._jobs.values()):
            try:
                self._end(job, error, reason)
            except Exception:  # noqa: BLE001 - after a breakdown; whoever waits is answered all the same
                _log.exception("request %s could not be ended in order", job.request.id)
                self._complete(self._jobs.pop(job.request), error, reason)
        if self._grammars is not None:
            self._grammars.close()
        if self._linear is not None:
            self._linear.close()
        self.runner.close()

    def _abandon(self) -> None:
        """End everything that runs, after a step broke off: orders may be lost, so blocks say nothing."""
        self._launcher.forget()
        for job in list(self._jobs.values()):
            self._end(job, EngineError("a step broke off; send the request again"), "error")
        self.scheduler.manager.expire(inf)
        self.scheduler.manager.drop_cached()

    def _begin_compiled(self) -> None:
        """Queue the jobs whose grammars are ready, end those whose grammars are refused."""
        for entry in [entry for entry in self._compiling if entry[1].done()]:
            self._compiling.remove(entry)
            job, future = entry
            error = future.exception()
            if error is None:
                self._begin(job, future.result())
            else:
                self._complete(job, _known(error), "error")

    def _begin(self, job: Job, grammar: Grammar | None) -> None:
        tokenizer = self.model.tokenizer
        try:
            job.begin(tokenizer, None if grammar is None else grammar.matcher())
        except Exception as error:  # noqa: BLE001 - a tokenizer or a grammar: this request's alone
            _log.exception("request %s failed", job.request.id)
            self._complete(job, _known(error), "error")
            return
        self.scheduler.add(job.request, job.timing.arrival_s)
        self._jobs[job.request] = job
        self.pinning.add(job)

    def _plan(self, now: float) -> StepPlan | None:
        plan = self.scheduler.schedule(now)
        for request in self.scheduler.take_failed():
            self._complete(self._jobs.pop(request), request.error, "error")
        return plan

    def _settle(self, plan: StepPlan, output: StepOutput, choices: Choices, now: float) -> None:
        """Commit the step, then give everybody their tokens and end who is done."""
        bad = {i for i, branch in enumerate(plan.branches) if branch.request in choices.errors}
        tokens = [None if i in bad else _id(choices.tokens.get(i)) for i in range(len(plan.branches))]
        self.scheduler.commit(plan, tokens, bad=bad, failed_swaps=output.failed_swaps)
        self.pinning.apply(now)
        for request, error in choices.errors.items():
            if request in self._jobs:
                self._fail(self._jobs[request], error)
        timed: set[Request] = set()
        for i, (token, logprobs) in choices.tokens.items():
            branch = plan.branches[i]
            if branch.request in self._jobs:
                self._take(self._jobs[branch.request], branch, token, logprobs, timed, now)
        for request, picks in choices.forks.items():
            if request not in self._jobs:  # it failed, or a listener cancelled it
                continue
            self.scheduler.branch_out(request, [(0, token) for token, _ in picks])
            for branch, (token, logprobs) in zip(request.branches, picks, strict=True):
                if request in self._jobs:
                    self._take(self._jobs[request], branch, token, logprobs, timed, now)
        for request in choices.beams:
            if request in self._jobs:
                self._expand(self._jobs[request], now)

    def _take(
        self,
        job: Job,
        branch: Branch,
        token: int,
        logprobs: TokenLogprobs | None,
        timed: set[Request],
        now: float,
    ) -> None:
        """Give one result its token."""
        if job.request not in timed:
            timed.add(job.request)
            job.mark_token(now)
        self._chooser.record(branch, token)
        try:
            ended = job.accept(job.index_of(branch), token, logprobs)
        except KVQError as error:
            self._fail(job, error)
            return
        except Exception as error:  # noqa: BLE001 - a listener or a tokenizer: this request's alone
            _log.exception("request %s failed", job.request.id)
            self._fail(job, EngineError(describe(error)))
            return
        if ended:
            self._release(branch)
            self.scheduler.finish(branch)
            if not job.request.live and job.request in self._jobs:  # its listener may have cancelled it
                self._complete(self._jobs.pop(job.request), None, None)

    def _expand(self, job: Job, now: float) -> None:
        """Let beam search choose which beams go on."""
        assert job.beams is not None, "only beams are expanded"
        job.mark_token(now)
        running = job.request.branches[: job.beams.num_running]
        picks = job.beams.step([job.candidates[branch] for branch in running])
        job.candidates.clear()
        if job.beams.is_done or not picks:
            self._end(job, None, None)
        else:
            self.scheduler.branch_out(job.request, picks)

    def _fail(self, job: Job, error: KVQError) -> None:
        """End a job whose values can't be trusted; nothing of it stays cached."""
        if job.request in self._jobs:
            self._end(job, error, "error")

    def _end(self, job: Job, error: KVQError | None, reason: FinishReason | None) -> None:
        for branch in job.request.live:
            self._release(branch)
        if error is None:
            self.scheduler.end(job.request)
        else:
            self.scheduler.fail(job.request, error)
        self._complete(self._jobs.pop(job.request), error, reason)

    def _release(self, branch: Branch) -> None:
        if branch.row is not None:
            self._chooser.forget(branch.row)

    def _complete(self, job: Job, error: KVQError | None, reason: FinishReason | None) -> None:
        """Hand the result over. A listener that raises is reported; its request has ended anyway."""
        self._finished += 1
        output = job.complete(self._clock(), error, reason)
        try:
            job.deliver(output)
        except Exception:  # noqa: BLE001 - somebody else's code must not stop the others' steps
            _log.exception("the listener of request %s failed", job.request.id)

    def _publish(self, running: Launched, began: float, *, sampling_s: float) -> None:
        plan = running.plan
        counters, lines = self.scheduler.counters, self.scheduler.lines
        on_cpu = self.model.weights.device.type == "cpu"
        stats = StepStats(
            number=plan.number,
            decode_tokens=plan.num_decodes,
            prefill_tokens=plan.num_tokens - plan.num_decodes,
            decode_context=sum(plan.ends[: plan.num_decodes]),
            prefill_context=plan.prefill_context,
            sampled=sum(plan.samples),
            running=len(self.scheduler.holders.running),
            sequences=self.scheduler.holders.num_sequences,
            waiting=lines.num_waiting,
            preempted=len(lines.preempted),
            finished=self._finished,
            preemptions=counters.swaps + counters.recomputes,
            prompt_tokens=counters.prompt_tokens,
            cached_tokens=counters.cached_tokens,
            pools=self.scheduler.manager.usage(),
            utilization=self.scheduler.manager.utilization(),
            seconds=self._clock() - began,
            scheduling_s=running.scheduling_s,
            forward_s=running.forward_s,
            attention_s=running.output.attention_s if on_cpu else None,
            linear_s=self._linear.take() if self._linear is not None else None,
            sampling_s=sampling_s,
        )
        for subscriber in tuple(self._subscribers):
            try:
                subscriber(stats)
            except Exception:  # noqa: BLE001 - somebody else's code must not stop the steps
                _log.exception("a subscriber to step stats failed and is dropped")
                self._unsubscribe(subscriber)

    def _unsubscribe(self, subscriber: StepSubscriber) -> None:
        if subscriber in self._subscribers:
            self._subscribers.remove(subscriber)
        if not self._subscribers and self._linear is not None:
            self._linear.close()
            self._linear = None

    @cached_property
    def _longest_token(self) -> int:
        return longest_token(self.model.tokenizer)

    def _prompt_logprob_limits(self, params: SamplingParams, num_tokens: int) -> dict[str, Any]:
        """What a request must compute of its prompt, and in which pieces, for its log-probabilities."""
        if params.prompt_logprobs is None:
            return {}
        reused = max(0, params.prompt_logprobs_start - 1)  # the token before the first one has its row
        rows = max(16, _PROMPT_LOGPROB_BYTES // (4 * self.model.geometry.vocab_size))
        return {
            "reuse": reused > 0,
            "max_reuse": reused,
            "max_chunk": rows if num_tokens - reused > rows else None,
        }


def prompt_tokens(prompt: str | Sequence[int], tokenizer: Any, vocab_size: int) -> "array[int]":
    """The token ids of a prompt that is text or ids.

    Raises:
        RequestError: it is empty, not Unicode, or beyond the vocabulary.
    """
    check_prompt(prompt)
    if isinstance(prompt, str):
        check_unicode(prompt, "the prompt")
        tokens = token_array(tokenizer(prompt, return_attention_mask=False)["input_ids"])
    else:
        tokens = token_array(prompt)
    if not tokens:
        raise RequestError("the prompt is empty; give some text to go on from")
    if max(tokens) >= vocab_size:
        raise RequestError(
            f"token id {max(tokens)} is outside the vocabulary of 0 to {vocab_size - 1}; "
            f"if a tokenizer made it, it is not this model's"
        )
    return tokens


def check_prompt(prompt: object) -> None:
    """Raise RequestError if a prompt is neither text nor token ids: what is taken for them runs as others."""
    if isinstance(prompt, str):
        return
    check_items(prompt)
    if isinstance(prompt, Iterator):
        raise RequestError(f"{_PROMPT}, got {type(prompt).__name__}; make a list of it")
    assert isinstance(prompt, Iterable), "it was checked"
    if isinstance(prompt, array) and prompt.typecode in "bB":
        raise RequestError(f"{_PROMPT}, got an array of bytes")
    kinds = {kind.__name__: hasattr(kind, "__index__") for kind in set(map(type, prompt))}
    if wrong := sorted(name for name, is_whole in kinds.items() if name in ("bool", "bool_") or not is_whole):
        raise RequestError(f"{_PROMPT}, got a list with {', '.join(wrong)} in it")


def check_items(items: object) -> None:
    """Raise RequestError if something holds no prompts, and no token ids, in order."""
    is_one = getattr(items, "shape", None) == ()  # an array of no dimension
    wrong = isinstance(items, bytes | bytearray | memoryview | Mapping | Set)
    if is_one or wrong or not isinstance(items, Iterable):
        raise RequestError(f"{_PROMPT}, got {type(items).__name__}")


def _check_salt(salt: object) -> None:
    if salt is not None and not (isinstance(salt, str) and 1 <= len(salt) <= MAX_SALT):
        raise RequestError(f"cache_salt must be a text of 1 to {MAX_SALT} characters, got {salt!r:.100}")


def _id(token: Token | None) -> int | None:
    return None if token is None else token[0]


def _known(error: BaseException) -> KVQError:
    return error if isinstance(error, KVQError) else EngineError(describe(error))
