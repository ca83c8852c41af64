"""The scheduler: fills every step with running decodes first, then with prefill."""

from array import array
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from kvq.blockmgr import BlockManager, SwapIn
from kvq.errors import ConfigError, KVQError, OutOfBlocks
from kvq.scheduler.budget import prefill_budget
from kvq.scheduler.config import SchedulerConfig
from kvq.scheduler.costs import CostModel
from kvq.scheduler.fit import PoolShape, resolve_max_tokens
from kvq.scheduler.holders import Holders, held
from kvq.scheduler.lines import Lines
from kvq.scheduler.plan import StepPlan
from kvq.scheduler.preemption import choose_victim, prefers_swap, swappable
from kvq.scheduler.request import Branch, Priority, Request, State
from kvq.scheduler.snapshot import Snapshot

_FIRST_CHUNK = 16  # prefill tokens beside streams, before anything is known of their cost


@dataclass(kw_only=True, slots=True)
class Counters:
    """Totals since the start."""

    steps: int = 0
    added: int = 0
    ended: int = 0
    swaps: int = 0  # preemptions by swapping out
    recomputes: int = 0  # preemptions whose tokens are computed again
    prompt_tokens: int = 0  # of admitted requests
    cached_tokens: int = 0  # of these, found in the prefix index


@dataclass(slots=True, eq=False)
class _Step:
    """A step in the making."""

    now: float
    decodes: list[Branch] = field(default_factory=list)
    unfinished: list[Branch] = field(default_factory=list)  # prefills under way
    budget: int = 0  # prefill tokens left
    promised: int = 0  # blocks that prefills under way will still take
    prefills: list[tuple[Branch, int]] = field(default_factory=list)
    restored: list[Branch] = field(default_factory=list)

    def forget(self, request: Request) -> None:
        """Drop what was planned for a request that was preempted since, and starts anew."""
        self.decodes = [branch for branch in self.decodes if branch.request is not request]
        self.prefills = [(branch, count) for branch, count in self.prefills if branch.request is not request]


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
        self.holders = Holders(
            manager, max_num_seqs=config.max_num_seqs, prefix_caching=config.prefix_caching
        )
        self.shape = PoolShape(
            num_blocks=[pool.num_blocks for pool in manager.pools],
            windows=manager.blocks.windows,
            block_size=manager.block_size,
        )
        self._last_chunk = _FIRST_CHUNK  # prefill tokens of the last step that had decodes beside them
        self._failed: list[Request] = []
        self._nobody_fits = False  # of those that wait, unless somebody ends
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
        counters, lines = self.counters, self.lines
        return Snapshot(
            running=len(self.holders.running),
            sequences=self.holders.num_sequences,
            waiting=lines.num_waiting,
            preempted=len(lines.preempted),
            held_up=self.num_held_up,
            queued_tokens=sum(request.prompt_length for request in lines.queue),
            preemptions=counters.swaps + counters.recomputes,
            prompt_tokens=counters.prompt_tokens,
            cached_tokens=counters.cached_tokens,
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
        if request.state is not State.WAITING or request.branches:
            raise ConfigError(f"request {request.id!r} was added before; make a new one")
        if not request.tokens:
            raise ConfigError(f"request {request.id!r} has no prompt tokens; give at least one")
        request.max_tokens = self.check(request)
        request.is_forked = request.num_branches == 1
        request.branches = [
            Branch(request=request, tokens=request.tokens[:]) for _ in range(request.num_branches)
        ]
        request.arrival_s = now
        self.lines.queue.age(now)  # who waited long enough by now goes before who comes now
        self.lines.queue.append(request)
        self.counters.added += 1
        self._nobody_fits = False

    def schedule(self, now: float) -> StepPlan | None:
        """The next step, or None if nothing can run.

        Tokens get their slots here, so every plan must be committed before the next one is made, but
        for those of `schedule_ahead`.
        """
        self._nobody_fits = False
        step = _Step(now)
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
        return self._plan(step)

    def schedule_ahead(self, plan: StepPlan) -> StepPlan | None:
        """The step after `plan`, whose tokens are not known yet; None if it depends on them.

        It does not if all there is to do is one more token for each of the branches. Who ends with
        `plan` by the number of its tokens is left out; who ends otherwise has computed one in vain.
        Commit `plan` first, then what this returned.
        """
        waits = len(self.lines) > 0 and not self._nobody_fits
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
        ahead = self._pack([(branch, 1) for branch in branches], len(branches), follows=follows)
        self.counters.steps += 1
        return ahead

    def is_settled(self) -> bool:
        """True if the next steps will be as the last one was, until somebody comes, ends or has waited long.

        Then nobody waits, or nobody who waits can be let in, and no block turns out to be there already.
        """
        if len(self.lines) and (not self._nobody_fits or self.config.itl_slo_s is not None):
            return False
        return not self.config.prefix_caching or all(
            self.manager.leads(held(branch)) for branch in self.holders.active
        )

    def repeat(self, branches: Sequence[Branch], tokens: Sequence["array[int]"]) -> None:
        """Several steps of decodes at once: each branch gets its tokens, all of them equally many.

        For simulations, which know all tokens beforehand. As if every step had been planned and
        committed, where `is_settled` holds throughout.

        Raises:
            OutOfBlocks: they don't fit; nothing changed.
        """
        count = len(tokens[0])
        self.manager.extend([(held(branch), count) for branch in branches])
        caching = self.config.prefix_caching
        for branch, new in zip(branches, tokens, strict=True):
            branch.tokens.extend(new)
            self.manager.commit(held(branch), new if caching else None)
        self.counters.steps += count

    def commit(
        self,
        plan: StepPlan,
        tokens: Sequence[int | None],
        *,
        bad: Collection[int] = (),
        failed_swaps: Iterable[SwapIn] = (),
    ) -> None:
        """Say what came of a plan: a token for each branch that wanted one.

        Where the token is None the branch is in the middle of a prefill, or `branch_out` follows.
        `bad`: indices whose KV or logits are not finite; `fail` follows. `failed_swaps`: of the
        orders to swap in, those whose bytes were damaged; their tokens are computed again.
        """
        manager, ends, work = self.manager, plan.ends, []
        for i, (branch, token) in enumerate(zip(plan.branches, tokens, strict=True)):
            sequence = branch.sequence
            if sequence is None or i in bad:
                continue
            if token is not None:
                branch.tokens.append(token)
                work.append((sequence, token, ends[i]))
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
        if request.state in (State.WAITING, State.PREEMPTED) and len(request.live) == 1:
            self.lines.remove(request)
        self.lines.queue.tenants.charge(request.tenant, branch.num_generated)
        if branch.sequence is not None and branch.sequence.ready:
            self.manager.scrub_uncommitted(branch.sequence)
        self.holders.close(branch)
        self._nobody_fits = False
        self.counters.ended += request.state is State.ENDED

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
        request.usage.preemptions += 1
        self.lines.put_back(request)

    def _decode(self, step: _Step) -> None:
        """Find the branches that compute one token, with room for it, and those with more to compute.

        Some may be preempted on the way.
        """
        decodes, work = step.decodes, []
        for branch in self.holders.active:
            sequence = held(branch)
            left = branch.goal - sequence.length
            if left == 1:
                decodes.append(branch)
                work.append((sequence, 1))
            elif left:
                step.unfinished.append(branch)
        try:
            self.manager.extend(work)
        except OutOfBlocks:
            decodes.sort(key=lambda branch: branch.request.place)
            done = [branch for branch in decodes if self._make_room(branch, 1, step.now)]
            step.decodes = [branch for branch in done if branch in self.holders.active]

    def _make_room(self, branch: Branch, count: int, now: float) -> bool:
        """Append to a branch, preempting others if need be; False if it waits or lost its blocks.

        The oldest request never gives way, so at least one always gets on. A prefill only displaces
        younger requests, a decode displaces whoever loses least, maybe itself.
        """
        running = self.holders.running
        while branch in self.holders.active:
            try:
                self.manager.extend([(held(branch), count)])
            except OutOfBlocks as error:
                oldest = min(running, key=lambda request: request.place)
                after = oldest.place if count == 1 else branch.request.place
                candidates = [r for r in running if r.place > after and self._is_settled(r)]
                victim = choose_victim(candidates, self.manager, self.costs)
                if victim is not None:
                    self._displace(victim, now)
                elif len(running) == 1:
                    if not self.manager.release_pin(branch.request.tenant):
                        self._give_up(branch.request, error)
                else:
                    return False
            else:
                return True
        return False

    def _is_settled(self, request: Request) -> bool:
        """False while a request's blocks are on their way in."""
        return any(branch in self.holders.active for branch in request.live)

    def _displace(self, request: Request, now: float) -> None:
        branch = swappable(request, self.manager)
        self.preempt(request, now, swap=branch is not None and prefers_swap(branch, self.costs))

    def _give_up(self, request: Request, error: KVQError) -> None:
        """End a request that can't go on although it is alone: a quota, say, is in its way."""
        request.error = error
        self._failed.append(request)
        self.end(request)

    def _prefill_budget(self, step: _Step) -> int:
        prefills = step.unfinished
        oldest = prefills[0].request if prefills else self.lines.first(step.now, None)
        return prefill_budget(
            self.config,
            self.costs,
            num_decodes=len(step.decodes),
            has_streams=self.holders.num_interactive > 0
            and any(branch.request.priority is Priority.INTERACTIVE for branch in step.decodes),
            depth=held(prefills[0]).length if prefills else 0,
            oldest=oldest,
            now=step.now,
            last=self._last_chunk,
        )

    def _prefill(self, step: _Step, branch: Branch) -> None:
        """Add the next chunk of a running prefill to the step."""
        count = min(branch.goal - held(branch).length, step.budget, branch.request.max_chunk or step.budget)
        if self._make_room(branch, count, step.now):
            step.prefills.append((branch, count))
            step.budget -= count

    def _admit(self, step: _Step) -> None:
        """Let requests without blocks start or come back, in turn, while there is room."""
        below: Priority | None = None
        step.promised = sum(
            self._num_blocks(branch.goal) - self._num_blocks(branch.sequence.length)
            for branch in step.unfinished
            if branch.sequence is not None
        )
        while step.budget > 0 and (request := self.lines.first(step.now, below)) is not None:
            if self._start(step, request):
                self._holds_up = False
                continue
            self._holds_up = self.holders.has_rows(request) and not self.lines.num_parked
            if not self.holders.running and not self.lines.num_parked:
                if self.manager.release_pin(request.tenant):
                    continue
                error = OutOfBlocks(
                    f"request {request.id!r} does not fit although nothing else runs: its tenant's quota "
                    f"leaves too little; raise it, or let pins expire"
                )
                self._give_up(request, error)
            elif request.state is State.PREEMPTED and self.lines.rank(request, step.now) is Priority.BATCH:
                below = Priority.BATCH  # somebody more urgent may still fit
            else:
                self._nobody_fits = not self.lines.num_parked
                break

    def _start(self, step: _Step, request: Request) -> bool:
        """Start, resume or park a request; False if it has to wait where it stands."""
        if not self.holders.has_rows(request) or not self._is_within_slo(request):
            return False
        if request.live[0].sequence is not None:
            return self._swap_in(step, request)
        prompt = self.holders.prompt(request)
        reuses = self.config.prefix_caching and request.reuse
        match = self.manager.lookup(prompt) if reuses else None
        if match is not None and match.waits_for is not None:
            if request.state is State.PREEMPTED or self.lines.num_parked >= self.config.max_num_seqs:
                return False
            self.lines.park(request, match.waits_for)
            return True
        total, reused = len(prompt.tokens), 0 if match is None else match.length
        count = min(total - reused, step.budget, request.max_chunk or total)
        later = self._num_blocks(total) - self._num_blocks(reused + count)
        can_admit = self.manager.can_admit if reuses else self.manager.can_admit_without_reuse
        if not can_admit(prompt, count, spare=self._spare(request, step.promised + later)):
            return False
        self.lines.remove(request)
        if request.state is State.PREEMPTED:
            step.forget(request)
        branch = self.holders.start(request, prompt)
        if request.admitted_s is None:
            self._count_admission(request, held(branch).length, step.now)
        self._prefill(step, branch)
        if branch.sequence is not None:  # else it was given up
            step.promised += self._num_blocks(total) - self._num_blocks(branch.sequence.length)
        return True

    def _swap_in(self, step: _Step, request: Request) -> bool:
        """Order a swapped-out request's blocks back, if there is room for them and for growth."""
        sequence = held(request.live[0])
        spare = self._spare(request, step.promised)
        need = [len(slots) for slots in sequence.swapped or []]
        pools = zip(self.manager.pools, need, spare, strict=True)
        if any(pool.num_available < blocks + left for pool, blocks, left in pools):
            return False
        if not self.manager.can_swap_in(sequence):
            return False
        self.lines.remove(request)
        step.restored.append(self.holders.swap_in(request))
        return True

    def _spare(self, request: Request, promised: int) -> list[int]:
        """Blocks per layer group that must be left over when a request starts.

        The reserve, and what others were promised. A request that was preempted also waits until
        running ones could grow by some blocks each, more after every preemption, or it would be
        preempted again at once. Alone it may have everything.
        """
        if not self.holders.running:
            return [0] * len(self.shape.windows)
        growth = 0
        if request.usage.preemptions:
            growth = self.holders.num_sequences << min(request.usage.preemptions - 1, 8)
        size = self.manager.block_size
        return [
            self.manager.reserve_blocks
            + growth
            + (promised if window is None else min(promised, -(-window // size) + 1))
            for window in self.shape.windows
        ]

    def _is_within_slo(self, request: Request) -> bool:
        goal, running = self.config.itl_slo_s, self.holders.num_sequences
        return goal is None or not running or self.costs.decode_s(running + len(request.live)) <= goal

    def _count_admission(self, request: Request, reused: int, now: float) -> None:
        request.admitted_s = now
        request.usage.cached_tokens = reused
        self.counters.prompt_tokens += request.prompt_length
        self.counters.cached_tokens += reused
        self.lines.queue.tenants.charge(request.tenant, request.prompt_length - reused)

    def _num_blocks(self, tokens: int) -> int:
        return -(-tokens // self.manager.block_size)

    def _plan(self, step: _Step) -> StepPlan | None:
        """Pack what was decided. A branch that was preempted later in the step is left out."""
        active = self.holders.active
        chosen = [(branch, 1) for branch in step.decodes if branch in active]
        num_decodes = len(chosen)
        chosen += [(branch, count) for branch, count in step.prefills if branch in active]
        plan = self._pack(chosen, num_decodes, restored=step.restored)
        if not chosen and not plan.orders and not step.restored:
            return None
        self.counters.steps += 1
        if num_decodes and plan.num_tokens > num_decodes:
            self._last_chunk = max(plan.num_tokens - num_decodes, self.config.min_chunk)
        return plan

    def _pack(
        self,
        chosen: list[tuple[Branch, int]],
        num_decodes: int,
        *,
        restored: Sequence[Branch] = (),
        follows: list[int] | None = None,
    ) -> StepPlan:
        plan = StepPlan(
            number=self.counters.steps,
            branches=[branch for branch, _ in chosen],
            num_decodes=num_decodes,
            counts=[count for _, count in chosen],
            ends=[],
            samples=[],
            token_ids=[],
            orders=self.manager.take_orders(),
            table_changes=[],
            restored=list(restored),
            follows=follows,
        )
        ends, samples, token_ids = plan.ends, plan.samples, plan.token_ids
        for i, (branch, count) in enumerate(chosen):
            sequence = held(branch)
            end = sequence.length
            ends.append(end)
            if follows is not None:
                samples.append(True)
                token_ids.append(0)
            else:
                samples.append((i < num_decodes or end == branch.goal) and branch.is_sampled)
                if count == 1:
                    token_ids.append(branch.tokens[end - 1])
                else:
                    token_ids.extend(branch.tokens[end - count : end])
            if sequence.is_changed:
                row = branch.row
                assert row is not None, "a branch with blocks has a row"
                plan.table_changes.extend((row, *change) for change in sequence.take_changes())
        return plan
