"""What one step does: who computes which tokens, after which orders."""

from dataclasses import dataclass, field, replace

from kvq.blockmgr import BlockId, Order
from kvq.scheduler.request import Branch


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StepPlan:
    """One step. Lists run over the branches in the order their tokens are packed, decodes first.

    `ends[i]` is branch i's length with the step's tokens, so they take the positions from
    `ends[i] - counts[i]` on. Only branches with `samples[i]` need a token: the others are in the
    middle of a prefill. A step may be planned while the one before it runs: `token_ids` are zeros then,
    and branch i's token is the one that comes of branch `follows[i]` of the step before.
    """

    number: int
    branches: list[Branch]
    num_decodes: int  # leading branches with one token each
    counts: list[int]
    ends: list[int] = field(default_factory=list)
    samples: list[bool] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)  # all new tokens
    orders: list[Order]  # to be carried out before the forward pass, in order
    # (row, layer group, first index, entries)
    table_changes: list[tuple[int, int, int, list[BlockId]]] = field(default_factory=list)
    restored: list[Branch]  # swapped in by the orders; run from the next step on
    follows: list[int] | None = None  # of a step planned ahead: whose tokens of the step before its are

    def part(self, index: int) -> "StepPlan":
        """The same step for one of its branches alone, its orders and changes carried out already."""
        count, before = self.counts[index], sum(self.counts[:index])
        tokens = self.token_ids[before : before + count]
        return replace(self._only([index], tokens), num_decodes=int(index < self.num_decodes), restored=[])

    def after_all(self) -> "StepPlan":
        """A step that was planned ahead, its orders carried out, now that its tokens are known."""
        left = [i for i, branch in enumerate(self.branches) if not branch.is_done]
        tokens = [self.branches[i].tokens[-1] for i in left]
        return replace(self._only(left, tokens), num_decodes=len(left), follows=None)

    def _only(self, indices: list[int], token_ids: list[int]) -> "StepPlan":
        return replace(
            self,
            branches=[self.branches[i] for i in indices],
            counts=[self.counts[i] for i in indices],
            ends=[self.ends[i] for i in indices],
            samples=[self.samples[i] for i in indices],
            token_ids=token_ids,
            orders=[],
            table_changes=[],
        )

    @property
    def prefill_context(self) -> int:
        """Pairs of a prefill token and a token up to it, itself included; windows aside."""
        chunks = zip(self.counts[self.num_decodes :], self.ends[self.num_decodes :], strict=True)
        return sum([count * (2 * end - count + 1) // 2 for count, end in chunks])

    @property
    def num_tokens(self) -> int:
        """New tokens of the step."""
        return len(self.token_ids)
