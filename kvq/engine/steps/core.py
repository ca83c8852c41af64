"""The engine's core: one step is schedule, run, sample, commit, and telling everybody."""

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from math import inf
from time import perf_counter
from typing import TYPE_CHECKING

from kvq.cache.memory import held_bytes
from kvq.engine.build import build_parts, check_cache
from kvq.engine.config import EngineConfig
from kvq.engine.device.runner import StepOutput
from kvq.engine.requests.intake import Intake
from kvq.engine.requests.marking import read_marking
from kvq.engine.requests.outputs import FinishReason
from kvq.engine.requests.pinning import Pinning
from kvq.engine.requests.request_state import Job
from kvq.engine.sampling.choose import Choices, Chooser, Token, as_known
from kvq.engine.sampling.sampler import Sampler
from kvq.engine.speculation.make import load_helper, make_speculator
from kvq.engine.speculation_config import parse_speculation
from kvq.engine.steps.launch import Launcher
from kvq.engine.steps.publisher import Publisher, StepSubscriber
from kvq.engine.steps.reconcile import reconcile
from kvq.errors import EngineError, KVQError
from kvq.kernels.gpu.current import current
from kvq.models import Model
from kvq.models.describe.ends import NO_END
from kvq.models.parts.fork_guard import Home, NotCopyable
from kvq.scheduler import Branch, Request, StepPlan

if TYPE_CHECKING:  # imported with the first grammar: llguidance is not needed without one
    from kvq.engine.grammar.compiler import GrammarCompiler
    from kvq.engine.grammar.matcher import Matcher

_log = logging.getLogger("kvq")


class EngineCore(NotCopyable):
    """Requests in, tokens out, one step at a time. All calls come from one thread."""

    def __init__(
        self, model: Model, config: EngineConfig, *, clock: Callable[[], float] = perf_counter
    ) -> None:
        """Measure a step of full size, then allocate the pools; nothing is allocated for them later.

        Raises:
            ConfigError: an option out of range, static scales missing, or a watermark's key.
            OutOfMemory: the pools don't fit.
        """
        check_cache(model.prepared)
        self._home = Home()
        model.check_scales()
        if not model.end_ids:
            _log.warning("%s: %s", model.prepared.folder, NO_END)
        marking = read_marking(config.watermark, config.watermark_scheme, config.watermark_key_file)
        before = held_bytes(model.weights.device)
        self.model = model
        self.config = config
        self._clock = clock
        weights = model.weights
        self.max_context = min(config.max_context or weights.max_context, weights.max_context)
        speculation = parse_speculation(config.speculation)
        helper = load_helper(speculation, model)
        self.scheduler, self.runner = build_parts(model, config, self.max_context, helper)
        sampler = Sampler(
            max_rows=config.max_num_seqs,
            vocab_size=model.geometry.vocab_size,
            device=weights.device,
            watermark=None if marking is None else (marking.scheme, marking.key),
        )
        sampler.compile(model.prepared.dtype)
        self._chooser = Chooser(sampler, config.max_num_seqs)
        self._jobs: dict[Request, Job] = {}
        self.intake = Intake(model, self.scheduler, marking=marking, home=self._home, clock=clock)
        self.pinning = Pinning(self.scheduler.manager)
        self.speculator = make_speculator(
            speculation, helper, model, self.scheduler, self.runner, sampler, self._chooser, self._jobs, clock
        )
        asks = config.async_scheduling
        self._launcher = Launcher(
            self.scheduler,
            self.runner,
            self._jobs,
            clock,
            runs_ahead=True if asks is None and weights.device.type == "cuda" else asks,
            speculator=self.speculator,
        )
        num_blocks = [pool.num_blocks for pool in self.scheduler.manager.pools]
        self.memory = reconcile(model, self.runner.cache, num_blocks, before)
        self.memory.report()
        self._compiling: dict[Job, Future[Matcher]] = {}
        self._grammars: GrammarCompiler | None = None
        self._publisher = Publisher(model, self.scheduler)
        self._is_stepping = False
        self._finished = 0  # requests, in this step
        self._closed = False

    # What goes in

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
            from kvq.engine.grammar.compiler import GrammarCompiler

            self._grammars = GrammarCompiler(
                self.model.tokenizer, self.model.geometry.vocab_size, eos_ids=sorted(self.model.end_ids)
            )
        self._compiling[job] = self._grammars.submit(job.params.structured, tenant=job.request.tenant)

    def refuse(self, job: Job, error: KVQError) -> None:
        """End a job that was never submitted: its listener is told why."""
        self._complete(job, error, "error")

    def cancel(self, job: Job) -> None:
        """End a job now; nothing happens if it has ended."""
        if (future := self._compiling.pop(job, None)) is not None:
            future.cancel()
            self._complete(job, None, "cancelled")
        elif job.request in self._jobs:
            self._end(job, None, "cancelled")

    def on_step(self, subscriber: StepSubscriber) -> Callable[[], None]:
        """Call `subscriber` with the stats of every step from now on. Returns a function that ends it."""
        return self._publisher.subscribe(subscriber)

    @property
    def has_work(self) -> bool:
        """True while any job has not ended."""
        return bool(self._jobs) or bool(self._compiling)

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
            with current(self.model.weights.device):
                return self._step()
        finally:
            self._is_stepping = False

    def _step(self) -> bool:
        began = self._clock()
        self._finished = 0
        self.scheduler.manager.expire(began)
        self._begin_compiled()
        ahead = self._launcher.take_ahead()
        drafting_s = 0.0
        if ahead is None and self.speculator is not None:
            asked = self._clock()
            self.speculator.plan()  # a draft may read what it missed
            drafting_s = self._clock() - asked
        plan = self._plan(began) if ahead is None else ahead.plan
        if plan is None:
            return False
        planned = self._clock()
        try:
            wanted = None
            if ahead is None:
                running = self._launcher.launch(plan, planned - began)
            else:
                if ahead.output is not None:  # and may run aside
                    self._launcher.get_ready(ahead)
                    wanted = self._chooser.prepare(plan, ahead.output, self._jobs, {})
                running = self._launcher.resume(ahead)
            plan, output = running.plan, running.output
            if self.speculator is not None:
                self.speculator.observe(plan, output)
            ran = self._clock()
            if wanted is None or wanted.plan is not plan:
                wanted = self._chooser.prepare(plan, output, self._jobs, running.errors, running.drafts)
            pending = self._chooser.choose(wanted, output, self._jobs)
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
        if ahead is not None:  # the step may have run while nobody called for the next one
            began = min(began, ran + waited - launched - output.aside_s) - ahead.launched_s
        if plan.branches:
            self.scheduler.costs.observe(
                num_decodes=plan.num_decodes,
                num_drafts=plan.num_drafts,
                prefill_tokens=plan.prefill_tokens,
                depth=plan.ends[-1],
                seconds=chosen - began - running.drafting_s - drafting_s,
            )
        self._publisher.publish(
            running,
            seconds=self._clock() - began,
            sampling_s=launched - ran + chosen - waited,
            finished=self._finished,
        )
        return True

    def close(self, error: KVQError | None = None) -> None:
        """End every job, with `error` or as cancelled, and give back what lies outside the device."""
        reason: FinishReason = "cancelled" if error is None else "error"
        self._closed = True
        if not self._home.is_here:  # in a forked child, what lies outside is still its parent's
            return
        self._launcher.forget()
        for job, future in self._compiling.items():
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
        self._publisher.close()
        if self.speculator is not None:
            self.speculator.close()
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
        for job in [job for job, future in self._compiling.items() if future.done()]:
            future = self._compiling.pop(job)
            error = future.exception()
            if error is None:
                self._begin(job, future.result())
            else:
                self._complete(job, as_known(error), "error")

    def _begin(self, job: Job, matcher: "Matcher | None") -> None:
        try:
            job.begin(self.model.tokenizer, matcher)
        except Exception as error:  # noqa: BLE001 - a tokenizer or a grammar: this request's alone
            _log.exception("request %s failed", job.request.id)
            self._complete(job, as_known(error), "error")
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
        tokens = [[] if i in bad else self._kept(plan, output, choices, i) for i in range(len(plan.branches))]
        self.scheduler.commit(plan, tokens, bad=bad, failed_swaps=output.failed_swaps)
        self.pinning.apply(now)
        for request, error in choices.errors.items():
            if request in self._jobs:
                self._end(self._jobs[request], error, "error")
        timed: set[Request] = set()
        for i, chosen in choices.tokens.items():
            branch = plan.branches[i]
            if branch.request in self._jobs:
                told = chosen[: len(tokens[i])]
                guessed = (plan.drafts[i], len(chosen) - 1)
                self._take(self._jobs[branch.request], branch, told, timed, now, guessed)
        for request, picks in choices.forks.items():
            if request not in self._jobs:  # it failed, or a listener cancelled it
                continue
            self.scheduler.branch_out(request, [(0, token) for token, _ in picks])
            for branch, pick in zip(request.branches, picks, strict=True):
                if request in self._jobs:
                    self._take(self._jobs[request], branch, [pick], timed, now)
        for request in choices.beams:
            if request in self._jobs:
                self._expand(self._jobs[request], now)

    def _take(
        self,
        job: Job,
        branch: Branch,
        tokens: Sequence[Token],
        timed: set[Request],
        now: float,
        guessed: tuple[int, int] = (0, 0),
    ) -> None:
        """Give one result its tokens, up to the one that ends it; `guessed`: drafts, and right ones."""
        if job.request not in timed:
            timed.add(job.request)
            job.mark_token(now)
        used = 0
        try:
            for used, (token, logprobs) in enumerate(tokens, 1):  # noqa: B007 - it is what is looked for
                self._chooser.record(branch, token)
                if ended := job.accept(job.index_of(branch), token, logprobs):
                    break
                if job.request not in self._jobs:  # its listener cancelled it
                    return
        except Exception as error:  # noqa: BLE001 - a listener or a tokenizer: this request's alone
            if not isinstance(error, KVQError):
                _log.exception("request %s failed", job.request.id)
            if job.request in self._jobs:
                self._end(job, as_known(error), "error")
            return
        if guessed[0] and self.speculator is not None:
            self.speculator.count(job, guessed[0], min(guessed[1], used))
        if ended:
            self._release(branch)
            self.scheduler.finish(branch)
            if not job.request.live and job.request in self._jobs:  # its listener may have cancelled it
                self._complete(self._jobs.pop(job.request), None, None)

    def _kept(self, plan: StepPlan, output: StepOutput, choices: Choices, index: int) -> list[int]:
        """The tokens that a branch goes on by: none, one, or accepted drafts and one behind them."""
        chosen, drafts = [token for token, _ in choices.tokens.get(index, ())], plan.drafts[index]
        branch = plan.branches[index]
        if not drafts or branch.is_done or not chosen:
            return chosen
        job, accepted = self._jobs[branch.request], len(chosen) - 1
        assert self.speculator is not None, "drafts come from it"
        self.speculator.learn(branch, drafts, accepted)
        if accepted == drafts:
            output.keep_states(index)
        return chosen[: job.until_end(branch, chosen)]

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

    def _end(self, job: Job, error: KVQError | None, reason: FinishReason | None) -> None:
        """End a job. With an error its values can't be trusted: nothing of it stays cached."""
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
        if self.speculator is not None:
            self.speculator.forget(job)
        output = job.complete(self._clock(), error, reason)
        try:
            job.deliver(output)
        except Exception:  # noqa: BLE001 - somebody else's code must not stop the others' steps
            _log.exception("the listener of request %s failed", job.request.id)
