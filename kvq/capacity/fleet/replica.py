"""Simulated replica: the real scheduler and block manager, with a clock advanced by modelled step times."""

import random
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf, isnan

from kvq.blockmgr import BlockManager
from kvq.capacity.fleet.arrivals import Call
from kvq.capacity.fleet.closed_form import is_settled, repeat
from kvq.capacity.fleet.drafting import Drafting, Guesser
from kvq.capacity.fleet.faults import NONE, Faults
from kvq.capacity.fleet.memory import TierSpec
from kvq.capacity.fleet.records import Fate, Gauges, Records
from kvq.capacity.plan.step_time import StepTime
from kvq.errors import RequestError
from kvq.scheduler.config import SchedulerConfig
from kvq.scheduler.costs import CostModel, FixedCosts, MeasuredCosts
from kvq.scheduler.request import Branch, Request
from kvq.scheduler.scheduler import Scheduler
from kvq.scheduler.step import StepPlan
from kvq.sizing.pools import reserve_blocks

_IDLE_S = 1e-3  # until the next attempt if nothing can run


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineSpec:
    """Configuration of one replica; `num_blocks` has one entry per layer group."""

    num_blocks: list[int]
    block_size: int  # tokens
    config: SchedulerConfig
    time: StepTime  # includes the sliding windows
    computes_prompts: bool = True  # False: prompts arrive with their KV
    drafting: Drafting | None = None
    tiers: TierSpec = field(default_factory=TierSpec)

    @property
    def can_leap(self) -> bool:
        """True if several steps may be simulated at once, because no block leaves a window or a pool."""
        has_tiers = self.tiers.host_bytes or self.tiers.disk_bytes or self.tiers.rungs
        return not has_tiers and all(window is None for window in self.time.windows)


@dataclass(slots=True, eq=False)
class _Ticket:
    """An unfinished request."""

    call: Call
    left: int  # remaining tokens
    first_token: int
    last_s: float | None = None  # when the latest token was ready

    def next_token(self) -> int:
        """Return the next token."""
        self.left -= 1
        return self.first_token + self.call.tokens_taken - self.left - 1

    def take(self, count: int) -> "array[int]":
        """Return the next `count` tokens."""
        first = self.call.tokens_taken - self.left
        self.left -= count
        return self.call.answer(first, count)


class _ArrivedCosts(MeasuredCosts):
    """Costs of an engine whose prompts arrive with their KV, so that prompts never wait for a measurement."""

    def prefill_share(self, num_decodes: int) -> float:
        """Return 1.0, since prompts may take up an entire step."""
        return 1.0


class Replica:
    """Simulated engine that serves calls in order of arrival.

        replica.advance(call.arrival_s)  # every step that begins before then
        replica.add(call, call.arrival_s)
        ...
        replica.advance(inf)

    If only sequence lengths change from step to step, many steps are simulated at once, with the same results
    as separate steps (`leaps=False`).
    """

    def __init__(
        self,
        index: int,
        spec: EngineSpec,
        records: Records,
        *,
        leaps: bool = True,
        faults: Faults = NONE,
        hand_over: Callable[[Call, float], bool] = lambda call, now: False,
    ) -> None:
        """`hand_over` is called with each finished request and returns True if it continues elsewhere."""
        self.index = index
        self.now = self.ready_s = 0.0
        self.gauges = Gauges()
        self.live: dict[Request, _Ticket] = {}
        self._spec = spec
        self._records = records
        self._hand_over = hand_over
        self._trouble = faults.of_replica(index)
        self._leaps = leaps and spec.can_leap
        self._rng = random.Random(f"drafts/{spec.drafting.seed if spec.drafting else 0}/{index}")
        self._disk = spec.tiers.disk()  # outlives the engine
        self._begin()

    def _begin(self) -> None:
        """Start an empty engine."""
        spec = self._spec
        self.manager = BlockManager(
            num_blocks=spec.num_blocks,
            block_size=spec.block_size,
            windows=list(spec.time.windows),
            limits=list(spec.time.limits or [None] * len(spec.time.windows)),
            lag=spec.time.lag,
            state_group=spec.time.state_group,
            reserve_blocks=reserve_blocks(spec.num_blocks),
            block_bytes=spec.tiers.block_bytes or [1] * len(spec.num_blocks),
            rungs=spec.tiers.rungs,
        )
        self.manager.blocks.tiers = self._disk.tiers()
        most = spec.config.max_num_batched_tokens
        self._costs: CostModel = FixedCosts()
        if spec.computes_prompts:
            self._costs = MeasuredCosts(prefill_token_s=spec.time.linear_s(most) / most)
        elif spec.drafting is not None:  # fixed costs don't include drafts
            self._costs = _ArrivedCosts(prefill_token_s=spec.time.linear_s(most) / most)
        self.scheduler = Scheduler(self.manager, spec.config, self._costs)
        self._guesser: Guesser | None = None
        if spec.drafting is not None:
            self._guesser = Guesser(spec.drafting, self.scheduler, spec.time, self._rng)
        self._steady: list[Branch] = []  # running branches if the next step repeats the last one; else empty

    @property
    def num_waiting(self) -> int:
        """Number of requests that wait for blocks."""
        return len(self.scheduler.waiting)

    def cached(self, call: Call) -> int:
        """Return the number of tokens of a prompt that are cached on this replica."""
        if not self._spec.config.prefix_caching:
            return 0
        return self.manager.lookup(self.manager.prompt(call.prompt, tenant=call.tenant)).length

    def add(self, call: Call, now: float) -> None:
        """Add a request, or record it as refused if the scheduler rejects it."""
        records, number = self._records, call.number
        records.replica[number] = self.index
        request = Request(
            id=str(number),
            tokens=call.prompt,
            max_tokens=call.output_tokens,
            priority=call.priority,
            tenant=call.tenant,
        )
        if not self.live:
            self.now = max(self.now, now)
        try:
            self.scheduler.add(request, now)
        except RequestError:
            records.close(number, Fate.REFUSED, now)
            return
        self.live[request] = _Ticket(call, call.tokens_taken, call.answer(0, 1)[0])
        self._steady = []
        self.gauges.peak_waiting = max(self.gauges.peak_waiting, self.num_waiting)

    def advance(self, until: float, *, once: bool = False) -> None:
        """Run every step that begins before `until`; with `once`, at most until a request ends."""
        while self.live and self.now < until:
            if self.now >= self._trouble.death_s:
                self._die(self.now)
            elif not (self._steady and self._leaps and self._leap(until)):
                self._step()
            if once:
                return
        while not self.live and self._trouble.death_s < until < inf:
            self._die(max(self.now, self._trouble.death_s))

    def _die(self, now: float) -> None:
        """Crash the engine: all its requests fail, and a new engine starts."""
        for request in list(self.live):
            self._end(request, Fate.FAILED, now)
        self.now = self.ready_s = self._trouble.die(now)
        self.gauges.restarts += 1
        self._begin()

    def _step(self) -> None:
        scheduler, began = self.scheduler, self.now
        if self._guesser is not None:
            self._guesser.plan(is_steady=bool(self._steady))
        self._steady = []
        self._disk.advance(began)
        plan = scheduler.schedule(began)
        for request in scheduler.take_failed():
            self._end(request, Fate.FAILED, began)
        if plan is None:
            self.now += _IDLE_S
            return
        seconds = self._seconds(plan) if plan.branches else 1e-9
        if moved := self._spec.tiers.carry_out(plan.orders, self.manager.blocks.tiers):
            self._costs.observe_move(len(moved) / 2, moving_s := self._spec.tiers.host_s * sum(moved))
            seconds += moving_s
        end = self.now = began + seconds
        tickets = [self.live[branch.request] for branch in plan.branches]
        tokens = [
            [ticket.next_token()] if sampled else []
            for ticket, sampled in zip(tickets, plan.samples, strict=True)
        ]
        if self._guesser is not None:
            self._accept(self._guesser, plan, tickets, tokens)
        scheduler.commit(plan, tokens)
        ended = self._mark(tickets, list(map(len, tokens)), began, end)
        self._count(
            seconds, len(tickets), max(pool.num_live / pool.num_blocks for pool in self.manager.pools)
        )
        for i in ended:
            self._finish(plan.branches[i], end)
        is_quiet = plan.num_decodes == len(plan.branches) == len(scheduler.running.active)
        is_quiet = is_quiet and not plan.num_drafts
        if is_quiet and not ended and not plan.orders and is_settled(scheduler):
            self._steady = plan.branches

    def _seconds(self, plan: StepPlan) -> float:
        """Return the seconds that a step takes, and report them to the scheduler's cost model."""
        time, num_decodes = self._spec.time, plan.num_decodes
        decode_tokens = tokens = sum(plan.counts[:num_decodes])
        attention_s = 0.0
        for i in range(num_decodes, len(plan.branches)):
            count, end = plan.counts[i], plan.ends[i]
            if self._spec.computes_prompts or plan.branches[i].request.preemptions:
                tokens += count
                attention_s += time.prefill_attention(end - count, end)
            else:  # the KV of all tokens but the newest was sent along
                tokens += 1
        seconds = time.linear_s(tokens) + time.read(time.seen(plan.ends[:num_decodes]))
        seconds += attention_s
        seconds += time.sequence_s * sum(plan.samples)
        if self.gauges.steps == self._trouble.slow_step:
            seconds *= self._trouble.slowness()
            self.gauges.slow_steps += 1
        if plan.branches:
            self._costs.observe(
                num_decodes=num_decodes,
                num_drafts=plan.num_drafts,
                prefill_tokens=tokens - decode_tokens,
                depth=plan.ends[-1],
                seconds=seconds,
            )
        if self._guesser is not None:
            seconds += self._guesser.drafting_s(plan)
        return max(seconds, 1e-9)

    def _accept(
        self, guesser: Guesser, plan: StepPlan, tickets: list[_Ticket], tokens: list[list[int]]
    ) -> None:
        """Append accepted drafts to a step's tokens, but no more than each request has left."""
        gauges = self.gauges
        for i, (branch, drafts) in enumerate(zip(plan.branches, plan.drafts, strict=True)):
            if drafts:
                right, ticket = guesser.right(branch, drafts), tickets[i]
                tokens[i].extend(ticket.take(min(right, ticket.left)))
                gauges.drafted_tokens += drafts
                gauges.accepted_tokens += right
            if i < plan.num_decodes:
                gauges.decodes += 1
                gauges.decoded_tokens += len(tokens[i])

    def _mark(self, tickets: list[_Ticket], counts: list[int], began: float, end: float) -> list[int]:
        """Record when tokens were ready; a request's tokens from one step share the preceding gap equally.

        Returns the positions within the step of the requests that are complete.
        """
        gaps, records = self.gauges.gaps, self._records
        neighbours, ended = 0, []
        for i, (ticket, count) in enumerate(zip(tickets, counts, strict=True)):
            if not count:
                continue
            if ticket.last_s is None:
                records.begin(ticket.call.number, end)
            elif count > 1:
                gaps.add((end - ticket.last_s) / count, count)
            elif ticket.last_s == began:
                neighbours += 1
            else:
                gaps.add(end - ticket.last_s)
            ticket.last_s = end
            if not ticket.left:
                ended.append(i)
        if neighbours:
            gaps.add(end - began, neighbours)
        return ended

    def _leap(self, until: float) -> bool:  # D282: the real scheduler, with equal steps simulated at once
        """Simulate all equal steps at once; return False if too few steps can be combined."""
        branches, scheduler = self._steady, self.scheduler
        tickets = [self.live[branch.request] for branch in branches]
        lengths = [len(branch.tokens) for branch in branches]
        most = min(min(ticket.left for ticket in tickets), self._trouble.slow_step - self.gauges.steps)
        if self._guesser is not None:
            most = min(most, self._guesser.depth.rests)
        most = self._fitting(lengths, most)
        if most < 2:
            return False
        bound = min(until, self._trouble.death_s)
        if len(scheduler.waiting):
            bound = min(bound, scheduler.waiting.next_aging_s())
        number, time, costs, gauges = len(branches), self._spec.time, self._costs, self.gauges
        linear_s, sequences_s = time.linear_s(number), time.sequence_s * number
        seen, size, now, count = sum(lengths), self._spec.block_size, self.now, 0
        opens = [0] * size  # blocks opened by each step, indexed by step number
        for length in lengths:
            opens[(1 - length) % size] += 1
        pools, opened = [(pool.num_live, pool.num_blocks) for pool in self.manager.pools], 0
        while count < most and now < bound:
            seconds = max(linear_s + time.read([seen] * len(pools)) + sequences_s, 1e-9)
            costs.observe(num_decodes=number, prefill_tokens=0, depth=lengths[-1] + count, seconds=seconds)
            end = now + seconds
            gauges.gaps.add(end - now, number)
            opened += opens[count % size]
            self._count(seconds, number, max([(live + opened) / total for live, total in pools]))
            now = end
            seen += number
            count += 1
        if not count:
            return False
        if self._guesser is not None:
            self._guesser.depth.rest(count)
            gauges.decodes += count * number
            gauges.decoded_tokens += count * number
        repeat(scheduler, branches, [ticket.take(count) for ticket in tickets])
        self.now = now
        for ticket in tickets:
            ticket.last_s = now
        for branch, ticket in zip(branches, tickets, strict=True):
            if not ticket.left:
                self._steady = []
                self._finish(branch, now)
        return True

    def _fitting(self, lengths: list[int], most: int) -> int:
        """Return how many steps, up to `most`, fit in the free blocks; 0 or 1 means too few."""
        size = self._spec.block_size
        available = min([pool.num_available for pool in self.manager.pools])
        held = sum([-(-(length - 1) // size) for length in lengths])
        while most > 1 and sum([(length + most - 2) // size + 1 for length in lengths]) - held > available:
            most //= 2
        return most

    def _count(self, seconds: float, sequences: int, live: float) -> None:
        gauges = self.gauges
        gauges.steps += 1
        gauges.busy_s += seconds
        gauges.running_s += sequences * seconds
        gauges.live_s += live * seconds
        if live > gauges.peak_live:
            gauges.peak_live = live

    def _finish(self, branch: Branch, now: float) -> None:
        """Finish a request that has all its tokens, or all tokens before its client disconnects."""
        self.scheduler.finish(branch)
        stays = self.live[branch.request].call.kept_tokens is None
        self._end(branch.request, Fate.SERVED if stays else Fate.CANCELLED, now)

    def _end(self, request: Request, fate: Fate, now: float) -> None:
        ticket, records = self.live.pop(request), self._records
        if self._guesser is not None:
            for branch in request.branches:
                self._guesser.depth.forget(branch)
        number = ticket.call.number
        if request.admitted_s is not None and isnan(records.admitted_s[number]):
            records.admitted_s[number] = request.admitted_s
        records.cached_tokens[number] += request.cached_tokens
        records.preemptions[number] += request.preemptions
        self.gauges.recomputed_tokens += request.usage.recomputed
        if fate is not Fate.SERVED or not self._hand_over(ticket.call, now):
            records.close(number, fate, now)
