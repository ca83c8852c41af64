"""The scheduler: fills every step with running decodes first, then with prefill."""

from collections.abc import Collection, Iterable, Sequence

from kvq.blockmgr import BlockManager, Match, SwapIn
from kvq.blockmgr.sequence import Work
from kvq.errors import ConfigError, KVQError, OutOfBlocks
from kvq.scheduler.admission import Admission, added
from kvq.scheduler.config import SchedulerConfig
from kvq.scheduler.costs import CostModel
from kvq.scheduler.fit import PoolShape, resolve_max_tokens
from kvq.scheduler.holders import Holders, held
from kvq.scheduler.lines import Lines
from kvq.scheduler.preemption import choose_victim, prefers_swap, swappable
from kvq.scheduler.request import Branch, Priority, Request, RequestState
from kvq.scheduler.snapshot import Counters, Snapshot
from kvq.scheduler.step import Step, StepPlan, pack, prefill_budget

_FIRST_CHUNK = 16  # prefill tokens beside streams, before anything is known of their cost


class Scheduler:
    """Decides who computes what in every step. All calls come from one thread.

    scheduler.add(request, now)                   # refused at once if it can never fit
    plan = scheduler.schedule(now)                # carry out its orders, run it, choose tokens
    scheduler.commit(plan, tokens)                # then `finish`, `branch_out` or go on
    """

    def __init__(self, manager: BlockManager, config: SchedulerConfig, costs: CostModel) -> None:
        self.manager = manager
        self.config = config
        self.costs = costs
        self.counters = Counters()
        self.lines = Lines(config)
        self.holders = Holders(manager, config)
        self.shape = PoolShape(
            num_blocks=[pool.num_blocks for pool in manager.pools],
            windows=manager.blocks.windows,
            limits=manager.blocks.limits,
            state_group=manager.blocks.state_group,
            block_size=manager.block_size,
        )
        self._admission = Admission(manager, config, costs, self.holders, self.shape)
        self._last_chunk = _FIRST_CHUNK  # prefill tokens of the last step that had decodes beside them
        self._failed: list[Request] = []
        self.prompts_lack_time = False  # somebody waits, and the last step's part for prompts was used up
        self.nobody_fits = False  # of those that wait, unless somebody ends
        self._holds_up = False  # whoever comes next, though there are rows: it did so the last time

    @property
    def has_work(self) -> bool:
        """True while any request has not ended."""
        return bool(self.holders.running) or len(self.lines) > 0

    @property
    def num_held_up(self) -> int:
        """Requests that wait though there are rows: those preempted, and all others too while the first
        of them can't begin for want of blocks, or would slow down those that run beyond their goal.

        Who only waits for its part of a step, or for another's prefix, is not among them.
        """
        return len(self.lines if self._holds_up else self.lines.preempted)

    def requests(self) -> list[Request]:
        """Every request that has not ended."""
        return [*self.holders.running, *self.lines.requests()]

    def snapshot(self) -> Snapshot:
        """Where everything stands."""
        counters, holders, lines = self.counters, self.holders, self.lines
        return Snapshot(
            running=len(holders.running),
            sequences=holders.num_sequences,
            waiting=lines.num_waiting,
            preempted=len(lines.preempted),
            held_up=self.num_held_up,
            queued_tokens=sum(request.prompt_length for request in lines.queue),
            preemptions=counters.swaps + counters.recomputes,
            prompt_tokens=counters.prompt_tokens,
            cached_tokens=counters.cached_tokens,
            drafts=counters.drafts,
            drafted_tokens=counters.drafted_tokens,
            accepted_tokens=counters.accepted_tokens,
            pools=self.manager.usage(),
        )

    def check(self, request: Request) -> int:
        """How many tokens a request may generate. Changes nothing.

        Raises:
            RequestError: it can never fit, with the numbers.
        """
        return resolve_max_tokens(request, self.shape, self.config)

    def add(self, request: Request, now: float) -> None:
        """Queue a request.

        Raises:
            RequestError: it can never fit, with the numbers.
            ConfigError: it was added before, or has no tokens.
        """
        if request.state is not RequestState.WAITING or request.branches:
            raise ConfigError(f"request {request.id!r} was added before; make a new one")
        if not request.tokens:
            raise ConfigError(f"request {request.id!r} has no prompt tokens; give at least one")
        request.begin(max_tokens=self.check(request), now=now)
        self.lines.queue.age(now)  # who waited long enough by now goes before who comes now
        self.lines.queue.append(request)
        self.counters.added += 1
        self.nobody_fits = False

    def schedule(self, now: float) -> StepPlan | None:
        """The next step, or None if nothing can run.

        Tokens get their slots here, so every plan must be committed before the next one is made, but
        for those of `schedule_ahead`.
        """
        self.nobody_fits = False
        step = Step(now)
        self._decode(step)
        if len(self.lines) or step.unfinished:
            step.unfinished = [branch for branch in step.unfinished if branch in self.holders.active]
            step.unfinished.sort(key=lambda branch: branch.request.place)
            step.budget = self._prefill_budget(step)
            for branch in step.unfinished:
                if branch.sequence is not None and step.budget:
                    self._prefill(step, branch)
            self.lines.queue.age(now)
            self.lines.wake()
            self._admit(step)
        self.prompts_lack_time = len(self.lines) > 0 and step.budget <= 0
        return self._plan(step)

    def schedule_ahead(self, plan: StepPlan) -> StepPlan | None:
        """The step after `plan`, whose tokens are not known yet; None if it depends on them.

        It does not if all there is to do is one more token for each of the branches. Who ends with
        `plan` by the number of its tokens is left out; who ends otherwise has computed one in vain.
        Commit `plan` first, then what this returned.
        """
        waits = (len(self.lines) > 0 and not self.nobody_fits) or plan.num_drafts > 0
        running = [i for i, branch in enumerate(plan.branches) if not branch.is_done]
        if waits or plan.restored or not all(plan.samples) or len(running) != len(self.holders.active):
            return None
        if not all(plan.branches[i].request.is_forked for i in running):
            return None
        follows = [i for i in running if not plan.branches[i].is_last]
        branches = [plan.branches[i] for i in follows]
        if not branches:
            return None
        try:
            self.manager.extend([(held(branch), 1) for branch in branches])
        except OutOfBlocks:
            return None
        return pack(
            [(branch, 1) for branch in branches], len(branches), self.manager, self.counters, follows=follows
        )

    def commit(
        self,
        plan: StepPlan,
        tokens: Sequence[Sequence[int]],
        *,
        bad: Collection[int] = (),
        failed_swaps: Iterable[SwapIn] = (),
    ) -> None:
        """Say what came of a plan: for each branch that wanted one the next token, behind accepted drafts.

        Where there is none the branch is in the middle of a prefill, or `branch_out` follows.
        `bad`: indices whose KV or logits are not finite; `fail` follows. `failed_swaps`: of the
        orders to swap in, those whose bytes were damaged; their tokens are computed again.
        """
        manager, ends, work = self.manager, plan.ends, []
        for i, (branch, new) in enumerate(zip(plan.branches, tokens, strict=True)):
            sequence = branch.sequence
            if sequence is None or i in bad:
                continue
            if new:
                branch.tokens.extend(new)
                branch.rewound = 0
                if plan.drafts[i]:
                    self._keep(branch, ends[i] - plan.drafts[i], new)
                else:
                    work.append((sequence, new[0], ends[i]))
                continue
            manager.commit(sequence)
            if sequence.length == branch.goal and not branch.is_sampled:
                self.holders.fork_again(branch)
        manager.commit_each(work, known=self.config.prefix_caching)
        failed = list(failed_swaps)
        for branch in plan.restored:
            if branch.sequence is not None:
                manager.recover(branch.sequence, failed)
                self.holders.active[branch] = None

    def _keep(self, branch: Branch, known: int, new: Sequence[int]) -> None:
        """Drop the drafts behind the first `known` tokens but for those that are among the `new` ones."""
        sequence, accepted = held(branch), len(new) - 1
        if self.manager.blocks.states is not None and known + accepted < sequence.length:
            branch.rewound, accepted = accepted, 0  # the state after all of the drafts is nobody's
        self.manager.truncate(sequence, known + accepted, state_is_due=True)
        self.manager.commit(sequence, new if self.config.prefix_caching else None)

    def branch_out(self, request: Request, picks: list[tuple[int, int]]) -> None:
        """Go on with other branches: (index of the branch it continues, next token) for each.

        After a prompt all continue branch 0; in beam search any may be continued several times or
        not at all. Blocks are shared until one of them writes. With fewer picks than branches the last
        branches end.
        """
        self.holders.branch_out(request, picks)

    def finish(self, branch: Branch) -> None:
        """End one branch; its request ends with its last one."""
        request = branch.request
        if branch.is_done:
            return
        if request.state in (RequestState.WAITING, RequestState.PREEMPTED) and len(request.live) == 1:
            self.lines.remove(request)
        self.lines.queue.tenants.charge(request.tenant, branch.num_generated)
        if branch.sequence is not None and branch.sequence.ready:
            self.manager.scrub_uncommitted(branch.sequence)
        self.holders.close(branch)
        self.nobody_fits = False
        self.counters.ended += request.state is RequestState.ENDED

    def end(self, request: Request) -> None:
        """End a request wherever it is: cancelled, or finished as a whole."""
        for branch in request.live:
            self.finish(branch)

    def fail(self, request: Request, error: KVQError) -> None:
        """End a request whose values can't be trusted: its blocks are zeroed and leave the index."""
        request.error = error
        for branch in request.live:
            if branch.sequence is not None and branch.sequence.ready:
                self.manager.scrub(branch.sequence)
            self.finish(branch)  # one by one: what its branches shared is the last one's alone

    def take_failed(self) -> list[Request]:
        """Requests that the scheduler itself gave up since the last call, with their errors."""
        failed, self._failed = self._failed, []
        return failed

    def preempt(self, request: Request, now: float, *, swap: bool) -> None:
        """Take a running request's blocks; it keeps its place and goes on later.

        With `swap` its blocks move to host memory, without they are computed again.

        Raises:
            OutOfBlocks: no host slots for it, or it has several branches; nothing changed.
            ConfigError: the request is not running.
        """
        if request not in self.holders.running:
            raise ConfigError(f"request {request.id!r} is {request.state.value}, not running")
        if swap:
            branch = swappable(request, self.manager)
            if branch is None:
                raise OutOfBlocks(
                    f"request {request.id!r} can't be swapped out: too few host slots, or several branches"
                )
            self.holders.swap_out(branch)
            self.counters.swaps += 1
        else:
            self.holders.drop(request)
            self.counters.recomputes += 1
        request.preempted_s = now
        request.preemptions += 1
        self.lines.put_back(request)

    def _decode(self, step: Step) -> None:
        """Find the branches that compute one token, with room for it, and those with more to compute.

        Some may be preempted on the way.
        """
        decodes, work, most = step.decodes, [], self.config.max_num_batched_tokens
        for branch in self.holders.active:
            sequence = held(branch)
            left = branch.goal - sequence.length
            if left == 1 or (left == 1 + branch.rewound and step.decode_tokens + left <= most):
                decodes.append(branch)
                work.append((sequence, left))
                step.decode_tokens += left
            elif left:
                step.unfinished.append(branch)
        if self._extend_with_drafts(step, work):
            return
        try:
            self.manager.extend(work)
        except OutOfBlocks:
            counts = {branch: count for branch, (_, count) in zip(decodes, work, strict=True)}
            decodes.sort(key=lambda branch: branch.request.place)
            done = [b for b in decodes if self._make_room(b, counts[b], step.now, is_decode=True)]
            step.decodes = [branch for branch in done if branch in self.holders.active]

    def _extend_with_drafts(self, step: Step, work: Work) -> bool:
        """Make room for decodes and their drafts; False, and nothing changed, if there are none that fit."""
        longer, left = [], self.config.max_num_batched_tokens - step.decode_tokens
        for branch, (sequence, count) in zip(step.decodes, work, strict=True):
            if branch.num_drafts:
                branch.num_drafts = min(branch.num_drafts, branch.most_drafts, left)
                left -= branch.num_drafts
            longer.append((sequence, count + branch.num_drafts))
        drafts = self.config.max_num_batched_tokens - step.decode_tokens - left
        if drafts:
            try:
                self.manager.extend(longer)
            except OutOfBlocks:  # nobody gives way to a guess
                for branch in step.decodes:
                    branch.num_drafts = 0
            else:
                step.decode_tokens += drafts
                return True
        return False

    def _make_room(self, branch: Branch, count: int, now: float, *, is_decode: bool = False) -> bool:
        """Append to a branch, preempting others if need be; False if it waits or lost its blocks.

        The oldest request never gives way, so at least one always gets on. A prefill only displaces
        younger requests, a decode displaces whoever loses least, maybe itself.
        """
        running = self.holders.running
        while branch in self.holders.active:
            try:
                self.manager.extend([(held(branch), count)])
            except OutOfBlocks as error:
                below = self._below(branch, is_decode=is_decode)
                victim = choose_victim(below, self.manager, self.costs)
                if victim is not None:
                    only = swappable(victim, self.manager)
                    self.preempt(victim, now, swap=only is not None and prefers_swap(only, self.costs))
                elif len(running) == 1:
                    if not self.manager.release_pin():
                        self._give_up(branch.request, error)
                else:
                    return False
            else:
                return True
        return False

    def _below(self, branch: Branch, *, is_decode: bool) -> list[Request]:
        """Who may give way to a branch that appends; not those whose blocks are on their way in."""
        running, active = self.holders.running, self.holders.active
        after = min(request.place for request in running) if is_decode else branch.request.place
        return [r for r in running if r.place > after and any(other in active for other in r.live)]

    def _give_up(self, request: Request, error: KVQError) -> None:
        """End a request that can't go on although it is alone and no pin is left to give way."""
        request.error = error
        self._failed.append(request)
        self.end(request)

    def _prefill_budget(self, step: Step) -> int:
        oldest = step.unfinished[0].request if step.unfinished else self.lines.first(step.now, None)
        has_streams = self.holders.num_interactive > 0 and any(
            branch.request.priority is Priority.INTERACTIVE for branch in step.decodes
        )
        return prefill_budget(
            step, self.config, self.costs, has_streams=has_streams, oldest=oldest, last=self._last_chunk
        )

    def _prefill(self, step: Step, branch: Branch) -> None:
        """Add the next chunk of a running prefill to the step."""
        count = min(branch.goal - held(branch).length, step.budget, branch.request.max_chunk or step.budget)
        if self._make_room(branch, count, step.now):
            step.prefills.append((branch, count))
            step.budget -= count

    def _admit(self, step: Step) -> None:
        """Let requests without blocks start or come back, in turn, while there is room."""
        below: Priority | None = None
        step.promised = self._admission.promised(step)
        while step.budget > 0 and (request := self.lines.first(step.now, below)) is not None:
            if self._start(step, request):
                self._holds_up = False
                continue
            self._holds_up = self.holders.has_rows(request) and not self.lines.num_parked
            if not self.holders.running and not self.lines.num_parked:
                if self.manager.release_pin():
                    continue
                error = OutOfBlocks(
                    f"request {request.id!r} does not fit although nothing else runs: sequences beside the "
                    f"scheduler's hold blocks; free them"
                )
                self._give_up(request, error)
            elif request.is_preempted and self.lines.rank(request, step.now) is Priority.BATCH:
                below = Priority.BATCH  # somebody more urgent may still fit
            else:
                self.nobody_fits = not self.lines.num_parked
                break

    def _start(self, step: Step, request: Request) -> bool:
        """Start, resume or park a request; False if it has to wait where it stands."""
        admission, is_back = self._admission, request.is_preempted
        if not admission.has_seats(request):
            return False
        if request.live[0].sequence is not None:
            if not admission.can_swap_in(step, request):
                return False
            self.lines.remove(request)
            step.restored.append(self.holders.swap_in(request))
            return True
        prompt = self.holders.prompt(request)
        match = self.manager.lookup(prompt) if self.config.prefix_caching else Match(0, None)
        if match.waits_for is not None:
            if is_back or self.lines.num_parked >= self.config.max_num_seqs:
                return False
            self.lines.park(request, match.waits_for)
            return True
        if not admission.can_start(step, request, prompt, match.length):
            return False
        self.lines.remove(request)
        if is_back:
            step.forget(request)
        branch = self.holders.start(request, prompt)
        if request.admitted_s is None:
            self._count_admission(request, held(branch).length, step.now)
        self._prefill(step, branch)
        if branch.sequence is not None:  # else it was given up
            left = admission.taken(branch.sequence.length, len(prompt.tokens))
            step.promised = added(step.promised, left)
        return True

    def _count_admission(self, request: Request, reused: int, now: float) -> None:
        request.admitted_s = now
        request.cached_tokens = reused
        self.counters.prompt_tokens += request.prompt_length
        self.counters.cached_tokens += reused
        self.lines.queue.tenants.charge(request.tenant, request.prompt_length - reused)

    def _plan(self, step: Step) -> StepPlan | None:
        """Pack what was decided. A branch that was preempted later in the step is left out."""
        active = self.holders.active
        decodes = [branch for branch in step.decodes if branch in active]
        chosen = [(branch, held(branch).length - held(branch).committed) for branch in decodes]
        num_decodes = len(chosen)
        chosen += [(branch, count) for branch, count in step.prefills if branch in active]
        if not chosen and not self.manager.blocks.orders and not step.restored:
            return None
        plan = pack(chosen, num_decodes, self.manager, self.counters, restored=step.restored)
        if num_decodes and plan.prefill_tokens:
            self._last_chunk = max(plan.prefill_tokens, self.config.min_chunk)
        return plan
