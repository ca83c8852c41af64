"""Engine core: turns requests into tokens. Each step is planned, run, sampled and settled."""

import logging
from collections.abc import Callable, Sequence
from functools import partial
from math import inf
from time import perf_counter
from typing import TYPE_CHECKING

from kvq.cache.memory import held_bytes
from kvq.engine.adapters import Adapters
from kvq.engine.build import build_parts, check_cache
from kvq.engine.config import EngineConfig
from kvq.engine.exactness import keep_kv_digest, make_signer
from kvq.engine.requests.intake import Intake
from kvq.engine.requests.marking import read_marking
from kvq.engine.requests.outputs import FinishReason
from kvq.engine.requests.pinning import Pinning
from kvq.engine.requests.request_state import Job, as_job
from kvq.engine.requests.sessions import Sessions
from kvq.engine.sampling.choose import Choices, Chooser, Token, Wanted, as_known
from kvq.engine.sampling.pooler import make_pooler
from kvq.engine.sampling.sampler import Sampler
from kvq.engine.speculation.make import load_helper, make_speculator
from kvq.engine.speculation_config import parse_speculation
from kvq.engine.steps.flight import Flight, Phase, Stopwatch, kept_tokens
from kvq.engine.steps.grammars import PendingGrammars
from kvq.engine.steps.launch import Launcher
from kvq.engine.steps.publisher import Publisher
from kvq.engine.steps.reconcile import reconcile
from kvq.engine.tiering import Upkeep
from kvq.errors import EngineError, KVQError
from kvq.kernels.gpu.support import current
from kvq.models import Model
from kvq.models.describe.ends import NO_END
from kvq.models.parts.fork_guard import Home, NotCopyable
from kvq.scheduler import Branch

if TYPE_CHECKING:  # llguidance is not needed without a grammar
    from kvq.engine.grammar.matcher import Matcher

_log = logging.getLogger("kvq")


class EngineCore(NotCopyable):
    """Engine without a loop. It accepts requests and computes tokens step by step, all in one thread."""

    def __init__(
        self, model: Model, config: EngineConfig, *, clock: Callable[[], float] = perf_counter
    ) -> None:
        """Measure a full-size step, then allocate the pools, which never grow afterwards.

        Raises:
            ConfigError: an option is out of range, static scales are missing, or a watermark key is invalid.
            OutOfMemory: the pools don't fit in memory.
        """
        check_cache(model.prepared)
        self._home = Home()
        model.check_scales()
        if not model.end_ids:
            _log.warning("%s: %s", model.prepared.folder, NO_END)
        marking = read_marking(config.watermark, config.watermark_scheme, config.watermark_key_file)
        before = held_bytes(model.weights.device)
        self.model, self.config, self._clock = model, config, clock
        weights = model.weights
        self.max_context = min(config.max_context or weights.max_context, weights.max_context)
        drafting = parse_speculation(config.speculation)
        helper = load_helper(drafting, model)
        self.adapters = Adapters.of(model, config)
        self.scheduler, self.runner = build_parts(model, config, self.max_context, helper)
        sampler = Sampler(
            max_rows=config.max_num_seqs,
            vocab_size=model.geometry.vocab_size,
            device=weights.device,
            watermark=None if marking is None else (marking.scheme, marking.key),
        )
        sampler.compile(model.prepared.dtype)
        self._chooser = Chooser(sampler, config.max_num_seqs, make_pooler(model, config.pooling))
        self.jobs: dict[Job, None] = {}  # started and not ended, oldest first
        self._sign = make_signer(model, marking) if model.prepared.exact else None
        pooling, find = self._chooser.pooling, self.adapters.find
        self.intake = Intake(model, self.scheduler, marking, self._home, clock, find, pooling)
        self.adapters.serve(self)
        self.pinning = Pinning(self.scheduler.manager)
        self.sessions = Sessions(self.scheduler, clock)
        self.speculator = make_speculator(drafting, helper, self.scheduler, self.runner, self._chooser, clock)
        ahead = config.async_scheduling
        ahead = ahead is not False if weights.device.type == "cuda" else ahead
        self._launcher = Launcher(self.scheduler, self.runner, clock, ahead, self.speculator)
        self.memory = reconcile(model, self.runner.cache, self.scheduler.shape.num_blocks, before)
        self.memory.report()
        self._grammars = PendingGrammars(model)
        self.upkeep = Upkeep(self.scheduler.manager, self.runner.cache, self.sessions, clock)
        self._publisher = Publisher(model, self.scheduler)
        self.on_step = self._publisher.subscribe
        self.handover = self.upkeep.begin(self)
        self._is_stepping = False
        self._flight: Flight | None = None  # the current step, or, between steps, the one launched ahead
        self._finished = 0  # requests finished in this step
        self._closed = False

    def submit(self, job: Job, *, arrival_s: float | None = None) -> None:
        """Queue a job. A job with a grammar waits until the grammar is compiled; other jobs' steps continue.

        `arrival_s`: its arrival on the engine's clock, if that was during a step; TTFT counts from it.

        Raises:
            RequestError: too many grammars are waiting to be compiled.
            EngineError: the engine was closed.
        """
        if self._closed:
            raise EngineError("the engine was closed; make a new one")
        job.timing.arrival_s = self._clock() if arrival_s is None else arrival_s
        if job.params.structured is None:
            self._begin(job, None)
        else:
            self._grammars.add(job)

    def refuse(self, job: Job, error: KVQError) -> None:
        """End a job that was never submitted, and send the error to its listener."""
        self._complete(job, error, "error")

    def cancel(self, job: Job) -> None:
        """End a job immediately. Does nothing if the job has already ended."""
        if self._grammars.remove(job):
            self._complete(job, None, "cancelled")
        elif job in self.jobs:
            self.end(job, None, "cancelled")

    @property
    def has_work(self) -> bool:
        """True while any job has not ended yet, or blocks come back for one that is to come."""
        return bool(self.jobs) or len(self._grammars) > 0 or len(self.scheduler.loading) > 0

    def can_submit(self, job: Job) -> bool:
        """Return False if `submit` might refuse a job because too many grammars wait to be compiled."""
        return self._grammars.has_room(job)

    def step(self) -> bool:
        """Run one step. Return False if there was nothing to run.

        Raises:
            EngineError: `step` was called from a listener, during a step, or in a forked child process.
        """
        self._home.check()
        if self._is_stepping:
            raise EngineError("the engine is inside a step: a listener can't step it")
        self._is_stepping = True
        try:
            with current(self.model.weights.device):
                return self._step()
        finally:
            self._is_stepping = False

    def _step(self) -> bool:
        began = self._clock()
        self._finished = 0
        self.scheduler.manager.expire(began)
        self.sessions.prefetch_due()
        self._begin_compiled()
        if self.handover is not None:
            self._launcher.holds = self.handover.advance(is_free=self._flight is None)
        flight = None if self._flight is None else self._resume(self._flight, began)
        flight = self._flight = flight or self._plan(began)
        if flight is None:
            return False
        try:
            self._run(flight)
            flight.watch.start("sampling")
            choices = self._chooser.choose(flight.wanted or self._prepare_choices(flight), flight.result())
            self._launcher.launch_ahead(flight, choices)
            self._settle(flight, choices)
        except BaseException:  # also on an interrupt: the plan's tokens have slots, but were never committed
            self._abandon()
            raise
        self._flight = flight.following
        self._account(flight)
        return True

    def _resume(self, flight: Flight, began: float) -> Flight | None:
        """Continue a step that was launched ahead. Return None if all its branches have ended."""
        if all(branch.is_done for branch in flight.plan.branches):
            self._forget()
            return None
        flight.watch.start("forward", since=began)
        return flight

    def _plan(self, began: float) -> Flight | None:
        """Plan a step. Return None if there is nothing to run."""
        watch = Stopwatch(self._clock)
        watch.start("scheduling", since=began)
        if self.speculator is not None:
            watch.start("drafting")
            self.speculator.plan()  # a draft model may catch up here
            watch.start("scheduling")
        self.upkeep.make_room(self.scheduler)
        plan = self.scheduler.schedule(began)
        for request in self.scheduler.take_failed():
            self._complete(as_job(request), request.error, "error")
        return None if plan is None else Flight(plan, watch)

    def _run(self, flight: Flight) -> None:
        """Run a step until its output is available. Meanwhile, do work that doesn't depend on the output."""
        if flight.phase is Phase.RUNNING:
            self._launcher.plan_next(flight)
            self._prepare_choices(flight)
        self._launcher.run(flight)
        if self.speculator is not None:
            flight.watch.start("forward")
            self.speculator.observe(flight.plan, flight.result())

    def _prepare_choices(self, flight: Flight) -> Wanted:
        flight.wanted = self._chooser.prepare(flight.plan, flight.result(), flight.errors, flight.drafts)
        return flight.wanted

    def _account(self, flight: Flight) -> None:
        """Update the cost model with a step, and publish the step's statistics."""
        plan, watch = flight.plan, flight.watch
        if plan.branches:
            self.scheduler.costs.observe(
                num_decodes=plan.num_decodes,
                num_drafts=plan.num_drafts,
                prefill_tokens=plan.prefill_tokens,
                depth=plan.ends[-1],
                seconds=watch.seconds - watch["drafting"] - watch["settling"],
            )
        self._publisher.publish(flight, finished=self._finished)
        self.upkeep.after_step(watch.seconds)

    def close(self, error: KVQError | None = None) -> None:
        """End every job, with `error` or as cancelled, and release resources that are not on the device."""
        reason: FinishReason = "cancelled" if error is None else "error"
        self._closed = True
        if not self._home.is_here:  # in a forked child, these resources still belong to its parent
            return
        self._forget()
        if self.handover is not None:
            self.handover.close()
        for job in self._grammars.close():
            self._complete(job, error, reason)
        for job in list(self.jobs):
            try:
                self.end(job, error, reason)
            except Exception:  # noqa: BLE001 - after a failure; every waiting caller must still get an answer
                _log.exception("request %s could not be ended in order", job.id)
                self._complete(job, error, reason)
        self._publisher.close()
        self.upkeep.close()

    def _abandon(self) -> None:
        """End all jobs after a step failed midway. Orders may be lost, so the blocks can't be trusted."""
        self._forget()
        for job in list(self.jobs):
            self.end(job, EngineError("a step broke off; send the request again"), "error")
        self.scheduler.loading.abandon()
        self.scheduler.manager.expire(inf)
        self.scheduler.manager.drop_cached()

    def _forget(self) -> None:
        """Drop the steps in flight; wait for any step that is running."""
        if self._flight is not None:
            self._launcher.forget(self._flight)
        self._flight = None

    def _begin_compiled(self) -> None:
        """Queue the jobs whose grammars have compiled, and end the jobs whose grammars were refused."""
        for job, found in self._grammars.take_done():
            if isinstance(found, BaseException):
                self._complete(job, as_known(found), "error")
            else:
                self._begin(job, found)

    def _begin(self, job: Job, matcher: "Matcher | None") -> None:
        try:
            job.begin(self.model.tokenizer, matcher)
            has_arrived = self.handover is not None and self.handover.enter(job)
        except Exception as error:  # noqa: BLE001 - a tokenizer or grammar error affects only this request
            _log.exception("request %s failed", job.id)
            self._complete(job, as_known(error), "error")
            return
        if not has_arrived:
            self.scheduler.add(job, job.timing.arrival_s)
        self.jobs[job] = None
        self.sessions.begin(job)
        self.pinning.add(job)

    def _settle(self, flight: Flight, choices: Choices) -> None:
        """Commit a step whose tokens are available, notify all listeners, and end finished requests."""
        choices.wait()
        plan, now = flight.plan, flight.watch.start("settling")
        bad = {i for i, branch in enumerate(plan.branches) if branch.request in choices.errors}
        keep = partial(kept_tokens, flight, choices, self.speculator)
        tokens = [[] if i in bad else keep(i) for i in range(len(plan.branches))]
        self.scheduler.commit(plan, tokens, bad=bad)
        self.pinning.apply(now)
        for job, error in choices.errors.items():
            if job in self.jobs:
                self.end(job, error, "error")
        timed: set[Job] = set()
        for i, chosen in choices.tokens.items():
            branch = plan.branches[i]
            job = as_job(branch.request)
            if job in self.jobs:
                guessed = (plan.drafts[i], len(chosen) - 1)
                self._take(job, branch, chosen[: len(tokens[i])], timed, now, guessed)
        for job, picks in choices.forks.items():
            if job not in self.jobs:  # the job failed, or a listener cancelled it
                continue
            self.scheduler.branch_out(job, [(0, token) for token, _ in picks])
            for branch, pick in zip(job.branches, picks, strict=True):
                if job in self.jobs:
                    self._take(job, branch, [pick], timed, now)
        for job in choices.beams:
            if job in self.jobs:
                self._expand(job, now)
        flight.watch.stop()

    def _take(
        self,
        job: Job,
        branch: Branch,
        tokens: Sequence[Token],
        timed: set[Job],
        now: float,
        guessed: tuple[int, int] = (0, 0),
    ) -> None:
        """Add tokens to a result, up to the token that ends it. `guessed`: (drafts, accepted drafts)."""
        if job not in timed:
            timed.add(job)
            job.mark_token(now)
        used = 0
        try:
            for used, (token, logprobs) in enumerate(tokens, 1):  # noqa: B007 - used after the loop
                self._chooser.record(branch, token)
                if ended := job.accept(job.index_of(branch), token, logprobs):
                    break
                if job not in self.jobs:  # its listener cancelled it
                    return
        except Exception as error:  # noqa: BLE001 - a listener or tokenizer error affects only this request
            if not isinstance(error, KVQError):
                _log.exception("request %s failed", job.id)
            if job in self.jobs:
                self.end(job, as_known(error), "error")
            return
        if guessed[0] and self.speculator is not None:
            self.speculator.count(job, guessed[0], min(guessed[1], used))
        if ended:
            if self._sign is not None:
                keep_kv_digest(self.runner.cache, self.model.layout, job, branch)
            self.upkeep.ending(branch)
            self.release_row(branch)
            self.scheduler.finish(branch)
            if not job.live and job in self.jobs:  # its listener may have cancelled it
                self._complete(job, None, None)

    def _expand(self, job: Job, now: float) -> None:
        """Let beam search select the beams that continue."""
        assert job.beams is not None, "only beams are expanded"
        job.mark_token(now)
        running = job.branches[: job.beams.num_running]
        picks = job.beams.step([job.candidates[branch] for branch in running])
        job.candidates.clear()
        if job.beams.is_done or not picks:
            self.end(job, None, None)
        else:
            self.scheduler.branch_out(job, picks)

    def end(self, job: Job, error: KVQError | None, reason: FinishReason | None) -> None:
        """End a job. After an error, its values can't be trusted, and none of its blocks stay cached."""
        if self.handover is not None:
            self.handover.recall(job)
        for branch in job.live:
            self.release_row(branch)
        if error is None:
            self.scheduler.end(job)
        else:
            self.scheduler.fail(job, error)
        self._complete(job, error, reason)

    def release_row(self, branch: Branch) -> None:
        if branch.row is not None:
            self._chooser.forget(branch.row)

    def _complete(self, job: Job, error: KVQError | None, reason: FinishReason | None) -> None:
        """Deliver the result. An error raised by a listener is logged; the request has ended anyway."""
        self._finished += 1
        self.jobs.pop(job, None)  # a job that never started is not included
        self.adapters.leave(job)
        for other in (self.speculator, self.handover):
            if other is not None:
                other.forget(job)
        output = job.complete(self._clock(), error, reason)
        self.sessions.end(job, self._clock(), error)
        if self._sign is not None and error is None and reason is None:
            output.receipt = self._sign(job, output)
        try:
            job.deliver(output)
        except Exception:  # noqa: BLE001 - third-party code must not stop the steps of others
            _log.exception("the listener of request %s failed", job.id)
