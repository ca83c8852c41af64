"""Step plan: the work of one step, and the number of prefill tokens that the step may take."""

from collections.abc import Container, Sequence
from dataclasses import dataclass, field, replace
from math import ceil

from kvq.blockmgr import BlockId, BlockManager, Order, StateMove
from kvq.blockmgr.sequence import Work
from kvq.errors import OutOfBlocks
from kvq.scheduler.config import SchedulerConfig
from kvq.scheduler.costs import CostModel
from kvq.scheduler.request import Branch, Priority, Request
from kvq.scheduler.running import held
from kvq.scheduler.snapshot import Counters


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StepPlan:
    """Plan of one step. All lists are in the order in which the branches' tokens are packed, decodes first.

    `ends[i]` is the length of branch i including the step's tokens, which start at position `ends[i] -
    counts[i]`. Only branches with `samples[i]` need a token; the others are in the middle of a prefill. A
    step may be planned while the previous one runs: `token_ids` are then zeros, and the token of branch i is
    sampled for branch `follows[i]` of the previous step.
    """

    number: int
    branches: list[Branch]
    num_decodes: int  # leading branches, which add one token and their drafts
    counts: list[int]  # new tokens
    drafts: list[int] = field(default_factory=list)  # drafts among them, zeros until `guess`
    ends: list[int] = field(default_factory=list)
    samples: list[bool] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)  # all new tokens
    moves: list[StateMove | None] = field(default_factory=list)  # of recurrent states
    orders: list[Order]  # carried out before the forward pass, in this order
    # (row, layer group, first index, entries)
    table_changes: list[tuple[int, int, int, list[BlockId]]] = field(default_factory=list)
    follows: list[int] | None = None  # for a step planned ahead: indices in the previous step

    def part(self, index: int) -> "StepPlan":
        """Return a step for one branch alone. Its orders and table changes are already carried out."""
        count, before = self.counts[index], sum(self.counts[:index])
        tokens = self.token_ids[before : before + count]
        return replace(self._only([index], tokens), num_decodes=int(index < self.num_decodes))

    def after_all(self) -> "StepPlan":
        """Return a step planned ahead, with its tokens now known and its orders already carried out."""
        left = [i for i, branch in enumerate(self.branches) if not branch.is_done]
        tokens = [self.branches[i].tokens[-1] for i in left]
        return replace(self._only(left, tokens), num_decodes=len(left), follows=None)

    def _only(self, indices: list[int], token_ids: list[int]) -> "StepPlan":
        return replace(
            self,
            branches=[self.branches[i] for i in indices],
            counts=[self.counts[i] for i in indices],
            drafts=[self.drafts[i] for i in indices],
            ends=[self.ends[i] for i in indices],
            samples=[self.samples[i] for i in indices],
            moves=[self.moves[i] for i in indices],
            token_ids=token_ids,
            orders=[],
            table_changes=[],
        )

    @property
    def prefill_context(self) -> int:
        """Number of pairs of a prefill token and a token that it attends to, ignoring windows."""
        chunks = zip(self.counts[self.num_decodes :], self.ends[self.num_decodes :], strict=True)
        return sum([count * (2 * end - count + 1) // 2 for count, end in chunks])

    @property
    def num_tokens(self) -> int:
        """Number of new tokens in the step, including drafts."""
        return len(self.token_ids)

    @property
    def num_drafts(self) -> int:
        """Number of draft tokens in the step."""
        return sum(self.drafts)

    @property
    def prefill_tokens(self) -> int:
        """Number of prompt tokens in the step."""
        return sum(self.counts[self.num_decodes :])

    def guess(self, index: int, tokens: Sequence[int]) -> None:
        """Fill in the drafts of a branch."""
        assert len(tokens) == self.drafts[index], "there is room for exactly those"
        end = sum(self.counts[: index + 1])
        self.token_ids[end - len(tokens) : end] = tokens


@dataclass(slots=True, eq=False)
class Step:
    """Step that is being planned."""

    now: float
    decodes: list[Branch] = field(default_factory=list)
    unfinished: list[Branch] = field(default_factory=list)  # prefills in progress
    decode_tokens: int = 0  # of the decodes, including drafts
    budget: int = 0  # prefill tokens left
    promised: list[int] = field(default_factory=list)  # blocks per layer group that prefills will still need
    prefills: list[tuple[Branch, int]] = field(default_factory=list)

    def forget(self, request: Request) -> None:
        """Drop the branches of a request that was preempted earlier in the step and is starting again."""
        self.decodes = [branch for branch in self.decodes if branch.request is not request]
        self.prefills = [(branch, count) for branch, count in self.prefills if branch.request is not request]


def extend_with_drafts(step: Step, work: Work, manager: BlockManager, most_tokens: int) -> bool:
    """Append the decodes of a step and their drafts to their sequences.

    If there are no drafts, or they don't fit, append nothing and return False.
    """
    longer, left = [], most_tokens - step.decode_tokens
    for branch, (sequence, count) in zip(step.decodes, work, strict=True):
        if branch.num_drafts:
            branch.num_drafts = min(branch.num_drafts, branch.most_drafts, left)
            left -= branch.num_drafts
        longer.append((sequence, count + branch.num_drafts))
    drafts = most_tokens - step.decode_tokens - left
    if not drafts:
        return False
    try:
        manager.extend(longer)
    except OutOfBlocks:  # no request is preempted for a draft
        for branch in step.decodes:
            branch.num_drafts = 0
        return False
    step.decode_tokens += drafts
    return True


def pack(
    chosen: list[tuple[Branch, int]],
    num_decodes: int,
    manager: BlockManager,
    counters: Counters,
    *,
    follows: list[int] | None = None,
) -> StepPlan:
    """Return the plan for (branch, number of tokens) pairs whose slots are already allocated."""
    plan = StepPlan(
        number=counters.steps,
        branches=[branch for branch, _ in chosen],
        num_decodes=num_decodes,
        counts=[count for _, count in chosen],
        orders=manager.take_orders(),
        follows=follows,
    )
    counters.steps += 1
    ends, samples, token_ids = plan.ends, plan.samples, plan.token_ids
    for i, (branch, count) in enumerate(chosen):
        sequence = held(branch)
        end = sequence.length
        drafts = branch.num_drafts if i < num_decodes else 0
        plan.drafts.append(drafts)
        branch.num_drafts = 0
        ends.append(end)
        plan.moves.append(sequence.move)
        if follows is not None:
            samples.append(True)
            token_ids.append(0)
        else:
            samples.append((i < num_decodes or end == branch.goal) and branch.is_sampled)
            if count == 1:
                token_ids.append(branch.tokens[end - 1])
            else:
                token_ids.extend(branch.tokens[end - count : end - drafts])
                token_ids.extend([0] * drafts)
        if sequence.is_changed:
            row = branch.row
            assert row is not None, "a branch with blocks has a row"
            plan.table_changes.extend((row, *change) for change in sequence.take_changes())
    return plan


def pack_step(
    step: Step, active: Container[Branch], manager: BlockManager, counters: Counters
) -> StepPlan | None:
    """Return the plan for a step's branches that are still active, or None if there is nothing to do."""
    decodes = [branch for branch in step.decodes if branch in active]
    chosen = [(branch, held(branch).length - held(branch).committed) for branch in decodes]
    num_decodes = len(chosen)
    chosen += [(branch, count) for branch, count in step.prefills if branch in active]
    if not chosen and not manager.blocks.orders:
        return None
    return pack(chosen, num_decodes, manager, counters)


def prefill_budget(
    step: Step, config: SchedulerConfig, costs: CostModel, *, oldest: Request | None, last: int
) -> int:
    """Return the number of prefill tokens for this step.

    Without interactive streams, the limit is the step's capacity. With streams, it is the number of tokens
    that the inter-token goal leaves time for: the SLO, or the usual step time multiplied by
    `max_step_stretch`. If the fixed cost of prefill nearly uses up this time, prefill tokens may take the
    same time again, since smaller chunks would delay the streams more often for little progress.

    `oldest`: the request that has waited longest for its first token; prefill gets a larger share if this
    request's TTFT goal is at risk. `last`: prefill tokens of the last step with streams; a step takes at most
    twice as many, since the cost of larger steps is unknown.
    """
    num_decodes, unfinished = len(step.decodes), step.unfinished
    most = config.max_num_batched_tokens - step.decode_tokens
    if all(branch.request.priority is not Priority.INTERACTIVE for branch in step.decodes):
        return most
    usual = costs.decode_s(num_decodes)
    fixed = costs.prefill_step_s()
    goal = config.itl_slo_s or max(usual * config.max_step_stretch, usual + 2 * fixed)
    depth = held(unfinished[0]).length if unfinished else 0  # position of the next prefill token
    token_s = max(costs.prefill_token_s(depth), 1e-9)
    tokens = min(int((goal - usual - fixed) / token_s), 2 * last)
    if config.ttft_slo_s is not None and oldest is not None:
        left = oldest.arrival_s + config.ttft_slo_s - step.now
        steps = max(1.0, left / max(goal, 1e-9))
        tokens = max(tokens, int(oldest.prompt_length / steps))
    tokens = max(tokens, config.min_chunk)
    return max(0, min(most, ceil(tokens * costs.prefill_share(num_decodes))))
