"""Running requests: starts, forks, preempts and ends the branches of requests that hold blocks.

If blocks run out, `choose_victim` selects the request to preempt.
"""

from array import array
from collections.abc import Iterable
from collections.abc import Sequence as Items

from kvq.blockmgr import BlockManager, PrefixMiss, PrefixQuery, Sequence
from kvq.blockmgr.misses import OFF
from kvq.scheduler.config import SchedulerConfig
from kvq.scheduler.costs import CostModel
from kvq.scheduler.request import Branch, Request, RequestState


class Running:
    """Executor of the scheduler's decisions. A branch's row is its index in persistent tables."""

    def __init__(self, manager: BlockManager, config: SchedulerConfig) -> None:
        self.manager = manager
        self.requests: dict[Request, None] = {}  # requests that hold blocks
        self.active: dict[Branch, None] = {}  # their branches with blocks
        self._caching = config.prefix_caching
        self._free_rows = list(range(config.max_num_seqs))[::-1]
        self._num_rows, self._max_adapters = config.max_num_seqs, config.max_adapters
        self._places = 0

    @property
    def num_sequences(self) -> int:
        """Number of branches that run at the same time."""
        return self._num_rows - len(self._free_rows)

    def has_rows(self, request: Request) -> bool:
        """Return True if there are enough free rows for all branches of a request, and its adapter fits."""
        tags = {own.tag for own in (request, *self.requests)} - {0} if request.tag else ()
        return len(request.live) <= len(self._free_rows) and len(tags) <= self._max_adapters

    def prompt(self, request: Request) -> PrefixQuery:
        """Return a query for the tokens that a request's first branch has to compute; hashed only once."""
        tokens = request.live[0].tokens if request.is_forked else request.tokens
        if request.query is None or len(request.query.tokens) != len(tokens):
            request.query = self.manager.prompt(
                request.keyed(tokens),
                tenant=request.tenant,
                shared_salt=request.shared_salt,
                cache_salt=request.cache_salt,
                max_reuse=request.max_reuse if self._caching else 0,
            )
        return request.query

    def start(self, request: Request, prompt: PrefixQuery) -> Branch:
        """Start a request's first branch, reusing the leading tokens that the prefix index contains."""
        root = request.live[0]
        if self._caching:
            root.sequence = self.manager.start(prompt)
        else:
            root.sequence = self.manager.new_sequence(tenant=request.tenant)
        root.sequence.request = request.id
        if root.lost_tokens:
            request.usage.recomputed += max(0, root.lost_tokens - root.sequence.length)
            root.lost_tokens = 0
        self._enter(request)
        self.active[root] = None
        return root

    def explain(self, branch: Branch) -> PrefixMiss | None:
        """Return where and why a branch that was just started left what is cached, or None if it did not."""
        request = branch.request
        miss = self.manager.misses.explain(self.prompt(request), held(branch)) if self._caching else OFF
        return miss and miss.placed(request.texts)

    def resume(self, request: Request) -> None:
        """Let a preempted request that still has its blocks run again."""
        self._enter(request)
        self.active[request.live[0]] = None

    def release_idle(self, preempted: Items[Request]) -> bool:
        """Free the blocks of a request that waits with them, or of a pin. Return False if there are none."""
        for request in preempted:
            if request.live[0].sequence is not None:
                self.drop(request)
                return True
        return self.manager.pins.release_first()

    def detach(self, request: Request) -> None:
        """Take a request off its rows, if it has any. It keeps its blocks."""
        for branch in request.live:
            self.active.pop(branch, None)
            self._give_row_back(branch)
        self.requests.pop(request, None)
        request.state = RequestState.PREEMPTED

    def drop(self, request: Request) -> None:
        """Free all blocks of a request. What is not found or loaded later will be computed again."""
        for branch in request.live:
            if branch.sequence is not None:
                branch.lost_tokens = branch.sequence.committed
                branch.rewound = 0
                self._free(branch)
        request.is_forked, request.num_loads = len(request.live) == 1, 0
        self.detach(request)

    def close(self, branch: Branch) -> None:
        """End one branch, freeing its blocks and its row."""
        if branch.sequence is not None:
            self._free(branch)
        self._give_row_back(branch)
        branch.is_done = True
        if not branch.request.live:
            self.requests.pop(branch.request, None)
            branch.request.state = RequestState.ENDED

    def branch_out(self, request: Request, picks: list[tuple[int, int]]) -> None:
        """Give each new branch its parent's tokens and blocks, and its next token; see `Scheduler`."""
        before = [(branch.sequence, branch.tokens) for branch in request.branches]
        keeper = {parent: i for i, (parent, _) in reversed(list(enumerate(picks)))}
        keeper |= {parent: i for i, (parent, _) in enumerate(picks) if i == parent}
        after: list[Sequence] = []
        for i, (parent, _) in enumerate(picks):
            sequence = before[parent][0]
            assert sequence is not None, "a branch can only continue one that has blocks"
            after.append(sequence if keeper[parent] == i else self.manager.fork(sequence))
        for parent, (sequence, _) in enumerate(before):
            if parent not in keeper and sequence is not None:
                request.usage.add(self.manager.free(sequence))
        for branch in request.branches[len(picks) :]:
            branch.sequence = None
            self.active.pop(branch, None)
            self.close(branch)
        for i, ((parent, token), branch) in enumerate(zip(picks, request.branches, strict=False)):
            branch.sequence, branch.tokens = after[i], before[parent][1] + array("I", (token,))
            if keeper[parent] == i != parent:
                after[i].mark_all()  # its tables must be copied to another row
            self.manager.commit(after[i], (token,) if self._caching else None)
            self.active[branch] = None
        request.is_forked = True

    def keep_drafts(self, branch: Branch, known: int, new: Items[int]) -> None:
        """Drop the drafts after the first `known` tokens, except the accepted ones, which are in `new`."""
        sequence, accepted = held(branch), len(new) - 1
        if self.manager.blocks.states is not None and known + accepted < sequence.length:
            branch.rewound, accepted = accepted, 0  # only the state after all drafts was kept
        self.manager.truncate(sequence, known + accepted, state_is_due=True)
        self.manager.commit(sequence, new if self._caching else None)

    def fork_again(self, root: Branch) -> None:
        """Fork all branches again once a preempted request's prompt has been recomputed."""
        request = root.request
        sequence = held(root)
        for branch in request.live:
            if branch is not root:
                branch.sequence = self.manager.fork(sequence)
                self._know(branch, sequence.length)
                self.active[branch] = None
        self._know(root, sequence.length)
        request.is_forked = True

    def _know(self, branch: Branch, length: int) -> None:
        """Commit the branch's tokens after the prompt, and count them as recomputed."""
        branch.request.usage.recomputed += max(0, branch.lost_tokens - length)
        branch.lost_tokens = 0
        if self._caching:
            self.manager.commit(held(branch), branch.tokens[length:])

    def _enter(self, request: Request) -> None:
        for branch in request.live:
            branch.row = self._free_rows.pop()
            if branch.sequence is not None:
                branch.sequence.mark_all()
        if request.place < 0:
            self._places += 1
            request.place = self._places
        request.state = RequestState.RUNNING
        self.requests[request] = None

    def _free(self, branch: Branch) -> None:
        self.active.pop(branch, None)
        branch.request.usage.add(self.manager.free(held(branch)))
        branch.sequence = None

    def _give_row_back(self, branch: Branch) -> None:
        if branch.row is not None:
            self._free_rows.append(branch.row)
            branch.row = None


def held(branch: Branch) -> Sequence:
    """Return the sequence of a branch, which must have one."""
    assert branch.sequence is not None, "the branch has no blocks"
    return branch.sequence


def resume_s(request: Request, manager: BlockManager, costs: CostModel) -> float:  # D406
    """Return the time to resume a request after a preemption. Tokens shared by several branches count once.

    Tokens are computed again, or come back from host memory if that takes less time: those of whole blocks,
    before the last snapshot of recurrent states, and, if there are several branches, of the prompt.
    """
    sequences = [branch.sequence for branch in request.live if branch.sequence is not None]
    depth = max((sequence.length for sequence in sequences), default=0)
    shared, token_s = min(request.prompt_length, depth), costs.prefill_token_s(depth)
    own = sum(max(0, sequence.length - request.prompt_length) for sequence in sequences)
    computed_s, tiers, states = (shared + own) * token_s, manager.blocks.tiers, manager.blocks.states
    whole = manager.block_size if states is None else states.every
    kept = (depth if len(request.live) == 1 else shared) // whole * whole
    if not kept or tiers is None or not tiers.host_bytes or tiers.groups is not None:
        return computed_s
    moved_s = costs.move_s(sequences[0].num_held * kept // depth)
    return computed_s - max(0.0, kept * token_s - moved_s)


def may_preempt(branch: Branch, running: Running, *, is_decode: bool) -> list[Request]:
    """Return the requests that a branch may preempt."""
    requests = running.requests
    after = min(request.place for request in requests) if is_decode else branch.request.place
    return [request for request in requests if request.place > after]


# D231: the oldest request is never preempted
def choose_victim(candidates: Iterable[Request], manager: BlockManager, costs: CostModel) -> Request | None:
    """Return the request that is cheapest to resume among those of the lowest priority.

    Each earlier preemption doubles a request's cost, to avoid choosing the same request every time.
    """

    def loss(request: Request) -> tuple[int, float, int]:
        cost = resume_s(request, manager, costs)
        return -request.priority, cost * 2.0 ** min(request.preemptions, 30), -request.place

    return min(candidates, key=loss, default=None)
