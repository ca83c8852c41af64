"""Scheduler: fills every step with decodes of running requests first, then with prefill."""

from collections.abc import Collection, Sequence

from kvq.blockmgr import BlockManager, Match
from kvq.errors import ConfigError, KVQError, OutOfBlocks
from kvq.scheduler.admission import Admission, added
from kvq.scheduler.config import SchedulerConfig
from kvq.scheduler.costs import CostModel
from kvq.scheduler.fit import PoolShape, Reach, resolve_max_tokens
from kvq.scheduler.loading import Loading
from kvq.scheduler.request import Branch, Priority, Request, RequestState
from kvq.scheduler.running import Running, choose_victim, held, may_preempt
from kvq.scheduler.snapshot import Counters, Snapshot, take_snapshot
from kvq.scheduler.step import Step, StepPlan, extend_with_drafts, pack, pack_step, prefill_budget
from kvq.scheduler.waiting_queue import WaitingQueue

_FIRST_CHUNK = 16  # prefill tokens in a step with streams while their cost is unknown


class Scheduler:
    """Scheduler that decides what every step computes. All calls must come from one thread.

    scheduler.add(request, now)                   # refused immediately if it can never fit
    plan = scheduler.schedule(now)                # carry out its orders, run it, choose tokens
    scheduler.commit(plan, tokens)                # then `finish`, `branch_out` or continue
    """

    def __init__(self, manager: BlockManager, config: SchedulerConfig, costs: CostModel) -> None:
        self.manager = manager
        self.config = config
        self.costs = costs
        self.counters = Counters()
        self.waiting = WaitingQueue(config)
        self.running = Running(manager, config)
        rules = zip(manager.blocks.windows, manager.blocks.limits, strict=True)
        self.shape = PoolShape(
            num_blocks=[pool.num_blocks for pool in manager.pools],
            reaches=[Reach(*rule, group == manager.blocks.state_group) for group, rule in enumerate(rules)],
            block_size=manager.block_size,
        )
        self.loading = Loading(manager, costs)
        self._admission = Admission(manager, config, costs, self.running, self.shape)
        self._last_chunk = _FIRST_CHUNK  # prefill tokens of the last step that also had decodes
        self._failed: list[Request] = []
        self.prompts_lack_time = False  # requests wait, and the last step had no prefill tokens left
        self.nobody_fits = False  # no waiting request can start before a running one ends
        self._holds_up = False  # the first waiting request could not start despite free rows
        self.num_away = 0  # sequences that hold blocks because they move between engines

    @property
    def has_work(self) -> bool:
        """True while any request has not ended."""
        return bool(self.running.requests) or len(self.waiting) > 0

    @property
    def num_held_up(self) -> int:
        """Number of requests that wait although rows are free: all preempted requests.

        The others also count while the first of them lacks blocks or would slow running requests down too
        much, but not while it waits for prefill tokens or for a prefix that another request computes.
        """
        return len(self.waiting if self._holds_up else self.waiting.preempted)

    def requests(self) -> list[Request]:
        """Return every request that has not ended."""
        return [*self.running.requests, *self.waiting.requests()]

    def snapshot(self) -> Snapshot:
        """Return counts of requests, tokens and blocks."""
        return take_snapshot(self.counters, self.running, self.waiting, held_up=self.num_held_up)

    def check(self, request: Request) -> int:
        """Return the number of tokens that a request may generate. Changes nothing.

        Raises:
            RequestError: the request can never fit; the message has the numbers.
        """
        return resolve_max_tokens(
            request.prompt_length,
            request.max_tokens,
            self.shape,
            self.config,
            most_tokens=request.most_tokens,
            num_branches=request.num_branches,
        )

    def add(self, request: Request, now: float) -> None:
        """Queue a request.

        Raises:
            RequestError: the request can never fit; the message has the numbers.
            ConfigError: the request was added before, or has no tokens.
        """
        if request.state is not RequestState.WAITING or request.branches:
            raise ConfigError(f"request {request.id!r} was added before; make a new one")
        if not request.tokens:
            raise ConfigError(f"request {request.id!r} has no prompt tokens; give at least one")
        request.make_branches(max_tokens=self.check(request), now=now)
        self.waiting.queue.age(now)  # requests that have waited long enough precede this one
        self.waiting.queue.append(request)
        self.counters.added += 1
        self.nobody_fits = False

    def schedule(self, now: float) -> StepPlan | None:
        """Plan the next step. Return None if nothing can run.

        Slots are allocated here, so every plan must be committed before the next call. Only `schedule_ahead`
        may be called earlier.
        """
        self.nobody_fits, self.manager.misses.now = False, now
        if self.loading or self.manager.blocks.ladder.has_rungs:
            self.loading.advance(now, self.running.num_sequences)
        step = Step(now)
        self._decode(step)
        some_wait = len(self.waiting) > 0
        if some_wait or step.unfinished:
            step.unfinished = [branch for branch in step.unfinished if branch in self.running.active]
            step.unfinished.sort(key=lambda branch: branch.request.place)
            oldest = step.unfinished[0].request if step.unfinished else self.waiting.first(now, None)
            step.budget = prefill_budget(step, self.config, self.costs, oldest=oldest, last=self._last_chunk)
            for branch in step.unfinished:
                if branch.sequence is not None and step.budget:
                    self._prefill(step, branch)
            self.waiting.queue.age(now)
            self.waiting.wake()
            self._admit(step)
        # D258: no drafts while prompts wait for their share
        self.prompts_lack_time = some_wait and step.budget <= 0 and len(self.waiting) > 0
        plan = pack_step(step, self.running.active, self.manager, self.counters)
        if plan is not None and plan.num_decodes and plan.prefill_tokens:
            self._last_chunk = max(plan.prefill_tokens, self.config.min_chunk)
        return plan

    def schedule_ahead(self, plan: StepPlan) -> StepPlan | None:
        """Plan the step after `plan` before `plan` has tokens. Return None if the step depends on them.

        The step doesn't depend on these tokens if every branch continues with one token. Branches that reach
        their last token in `plan` are left out; a branch that ends for another reason computes one token that
        is not used. Commit `plan` first, then the plan returned here.
        """
        waits = (len(self.waiting) > 0 and not self.nobody_fits) or plan.num_drafts > 0
        running = [i for i, branch in enumerate(plan.branches) if not branch.is_done]
        if waits or not all(plan.samples) or len(running) != len(self.running.active):
            return None
        is_forked = all(plan.branches[i].request.is_forked for i in running)
        follows = [i for i in running if not plan.branches[i].is_last]
        branches = [plan.branches[i] for i in follows]
        if not branches or not is_forked:
            return None
        try:
            self.manager.extend([(held(branch), 1) for branch in branches])
        except OutOfBlocks:
            return None
        return pack(
            [(branch, 1) for branch in branches], len(branches), self.manager, self.counters, follows=follows
        )

    def commit(self, plan: StepPlan, tokens: Sequence[Sequence[int]], *, bad: Collection[int] = ()) -> None:
        """Record the results of a plan: for each branch, its accepted drafts and the next token.

        A branch without tokens is in the middle of a prefill, or is about to be continued by `branch_out`.
        `bad`: indices of branches with non-finite K, V or logits; call `fail` for them afterwards.
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
                    self.running.keep_drafts(branch, ends[i] - plan.drafts[i], new)
                else:
                    work.append((sequence, new[0], ends[i]))
                continue
            manager.commit(sequence)
            if sequence.length == branch.goal and not branch.is_sampled:
                self.running.fork_again(branch)
        manager.commit_each(work, known=self.config.prefix_caching)

    def branch_out(self, request: Request, picks: list[tuple[int, int]]) -> None:
        """Continue branches according to `picks`: for each new branch, (index of its parent, next token).

        After a prompt, all branches continue branch 0. In beam search, a branch may be continued several
        times or not at all. Blocks are shared until one of the branches writes. If there are fewer picks than
        branches, the last branches end.
        """
        self.running.branch_out(request, picks)

    def finish(self, branch: Branch) -> None:
        """End one branch. A request ends when its last branch ends."""
        request = branch.request
        if branch.is_done:
            return
        if request.state in (RequestState.WAITING, RequestState.PREEMPTED) and len(request.live) == 1:
            self.waiting.remove(request)
        self.waiting.queue.tenants.charge(request.tenant, branch.num_generated)
        if branch.sequence is not None:
            self.manager.scrub_uncommitted(branch.sequence)
        self.running.close(branch)
        self.nobody_fits = False
        if request.state is RequestState.ENDED:
            self.counters.ended += 1
            self.loading.let_go(request)

    def end(self, request: Request) -> None:
        """End a request in any state, because it was cancelled or is finished."""
        for branch in request.live:
            self.finish(branch)

    def fail(self, request: Request, error: KVQError) -> None:
        """End a request whose values can't be trusted: zero its blocks, and remove them from the index."""
        request.error = error
        for branch in request.live:
            if branch.sequence is not None:
                self.manager.scrub(branch.sequence)
            self.finish(branch)  # one by one: the last branch is the sole owner of shared blocks

    def take_failed(self) -> list[Request]:
        """Return the requests, each with its error, that the scheduler has given up since the last call."""
        failed, self._failed = self._failed, []
        return failed

    def preempt(self, request: Request, now: float) -> None:
        """Preempt a running request. It releases its blocks, keeps its place in the order and resumes later.

        What the index and the tiers then still have of its tokens is not computed again.

        Raises:
            ConfigError: the request is not running.
        """
        if request not in self.running.requests:
            raise ConfigError(f"request {request.id!r} is {request.state.value}, not running")
        self.running.drop(request)
        self.counters.preemptions += 1
        request.preempted_s, request.preemptions = now, request.preemptions + 1
        self.waiting.put_back(request)

    def _decode(self, step: Step) -> None:
        """Collect the branches that compute one token, and the branches that have more tokens to compute.

        Branches may be preempted to make room.
        """
        decodes, work, drafts, most = step.decodes, [], 0, self.config.max_num_batched_tokens
        for branch in self.running.active:
            sequence = held(branch)
            left = branch.goal - sequence.length
            if left == 1 or (left == 1 + branch.rewound and step.decode_tokens + left <= most):
                decodes.append(branch)
                work.append((sequence, left))
                step.decode_tokens += left
                drafts += branch.num_drafts
            elif left:
                step.unfinished.append(branch)
        if drafts and extend_with_drafts(step, work, self.manager, most):
            return
        try:
            self.manager.extend(work)
        except OutOfBlocks:
            counts = {branch: count for branch, (_, count) in zip(decodes, work, strict=True)}
            decodes.sort(key=lambda branch: branch.request.place)
            done = [b for b in decodes if self._make_room(b, counts[b], step.now, is_decode=True)]
            step.decodes = [branch for branch in done if branch in self.running.active]

    def _make_room(self, branch: Branch, count: int, now: float, *, is_decode: bool = False) -> bool:
        """Append to a branch, preempting requests if needed. Return False if it must wait or lost its blocks.

        The oldest request is never preempted, so at least one request makes progress. A prefill preempts only
        younger requests; a decode preempts the request that is cheapest to resume, possibly its own.
        """
        while branch in self.running.active:
            try:
                self.manager.extend([(held(branch), count)])
            except OutOfBlocks as error:
                if self.loading.give_back():
                    continue
                below = may_preempt(branch, self.running, is_decode=is_decode)
                victim = choose_victim(below, self.manager, self.costs)
                if victim is not None:
                    self.preempt(victim, now)
                elif len(self.running.requests) == 1 and not self.num_away and not self.loading:
                    if not self.running.release_idle(self.waiting.preempted):
                        self._give_up(branch.request, error)
                else:
                    return False
            else:
                return True
        return False

    def _give_up(self, request: Request, error: KVQError) -> None:
        """End a request that can't continue although it is the only one running and no pins are left."""
        request.error = error
        self._failed.append(request)
        self.end(request)

    def _prefill(self, step: Step, branch: Branch) -> None:
        """Add the next chunk of a running prefill to the step."""
        count = min(branch.goal - held(branch).length, step.budget, branch.request.max_chunk or step.budget)
        if self._make_room(branch, count, step.now):
            step.prefills.append((branch, count))
            step.budget -= count

    def _admit(self, step: Step) -> None:
        """Start or resume requests without blocks, in order, as long as there is room."""
        below: Priority | None = None
        step.promised = self._admission.promised(step)
        while step.budget > 0 and (request := self.waiting.first(step.now, below)) is not None:
            if self._start(step, request):
                self._holds_up = False
                continue
            self._holds_up = self.running.has_rows(request) and not self.waiting.num_parked
            is_moving = bool(self.waiting.num_parked or self.loading or self.num_away)
            if not self.running.requests and not is_moving:
                if self.loading.give_back() or self.running.release_idle(self.waiting.preempted):
                    continue
                what = f"request {request.id!r} does not fit although nothing else runs"
                self._give_up(
                    request, OutOfBlocks(f"{what}: sequences beside the scheduler's hold blocks; free them")
                )
            elif request.is_preempted and self.waiting.rank(request, step.now) is Priority.BATCH:
                below = Priority.BATCH  # a more urgent request may still fit
            else:
                self.nobody_fits = not is_moving
                break

    def _start(self, step: Step, request: Request) -> bool:
        """Start, resume or park a request. Return False if the request has to keep waiting."""
        admission, is_back = self._admission, request.is_preempted
        if not admission.has_rows(request):
            return False
        if request.live[0].sequence is not None:
            self.waiting.remove(request)
            self.running.resume(request)
            return True
        prompt = self.running.prompt(request)
        match = self.manager.lookup(prompt) if self.config.prefix_caching else Match(0, None)
        owner = match.waits_for
        if owner is None:
            if not admission.can_start(step, request, prompt, match.length):
                return False
            owner = self.loading.begin(request, prompt, match.length, step.now)
        if owner is not None:
            if is_back or self.waiting.num_parked >= self.config.max_num_seqs:
                return False
            self.waiting.park(request, owner)
            return True
        self.waiting.remove(request)
        if is_back:
            step.forget(request)
        branch = self.running.start(request, prompt)
        self.loading.let_go(request)
        if request.admitted_s is None:
            self._count_admission(branch, step.now)
        if self.manager.blocks.ladder.has_rungs or self.manager.blocks.tier_rungs:
            request.cold_tokens = max(request.cold_tokens, self.manager.below.cold_tokens(held(branch)))
        self._prefill(step, branch)
        if branch.sequence is not None:  # otherwise the request was given up
            step.promised = added(step.promised, admission.taken(branch.sequence.length, len(prompt.tokens)))
        return True

    def _count_admission(self, branch: Branch, now: float) -> None:
        request, reused = branch.request, held(branch).length
        request.admitted_s, request.cached_tokens = now, reused
        request.miss = self.running.explain(branch)
        self.counters.admit(request)
        self.waiting.queue.tenants.charge(request.tenant, request.prompt_length - reused)
