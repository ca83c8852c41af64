"""What a simulated engine has: memory, limits and the time that steps take."""

from collections.abc import Callable
from dataclasses import dataclass, field

from kvq.blockmgr import BlockManager
from kvq.scheduler import CostModel, FixedCosts, SchedulerConfig
from kvq.tiers.tiers import Tiers

KEY_BYTES = 8  # of a token's KV, a number


@dataclass(frozen=True, kw_only=True, slots=True)
class Pools:
    """Block memory; one entry of each list per layer group."""

    num_blocks: list[int]
    block_size: int  # tokens
    windows: list[int | None]  # None: full attention
    host_blocks: int = 0  # that host memory holds
    has_cold_host: bool = False  # blocks of groups without windows go there in another form
    has_ladder: bool = False  # groups without windows are packed in half and then a quarter of the room
    reserve_blocks: int = 0

    def manager(self, make: Callable[..., BlockManager] = BlockManager) -> BlockManager:
        """A block manager for these pools."""
        full = [group for group, window in enumerate(self.windows) if window is None]
        manager = make(
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            windows=self.windows,
            reserve_blocks=self.reserve_blocks,
            block_bytes=[4] * len(self.windows),
            rungs={group: [2, 1] for group in full if self.has_ladder},
        )
        if self.has_cold_host:
            manager.blocks.tier_rungs = dict.fromkeys(full, 1)
        if self.host_blocks:
            manager.blocks.tiers = Tiers(self.host_blocks * self.block_size * KEY_BYTES, None)
        return manager


@dataclass(frozen=True, kw_only=True, slots=True)
class Setup:
    """One engine."""

    pools: Pools
    config: SchedulerConfig
    costs: CostModel = field(default_factory=FixedCosts)  # what steps take
    estimates: CostModel | None = None  # what the scheduler believes, told every step; None: it knows `costs`
    most_drafts: int = 0  # tokens guessed of a sequence in a step
    guessed_right: float = 0.0  # how probable a guess is right
    plans_ahead: bool = False  # steps are planned before the tokens of those before them are known

    def seconds(self, *, num_decodes: int, prefill_tokens: int, depth: int, moved: int) -> float:
        """How long a step takes that also moves blocks to or from host memory; `depth` of its prefill."""
        costs = self.costs
        seconds = costs.decode_s(num_decodes)
        if prefill_tokens:
            seconds += costs.prefill_step_s() + prefill_tokens * costs.prefill_token_s(depth)
        if moved:
            seconds += costs.move_s(moved) / 2  # which counts the way out and back
        return seconds
