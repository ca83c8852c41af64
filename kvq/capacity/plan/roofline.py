"""Speed from bytes and operations: what a GPU's bandwidth and arithmetic allow, less what is lost of them.

A decode step reads the weights once and every running sequence's KV; a prefill multiplies. Either may be
the limit of either (Williams et al., 2009, "Roofline").
"""

from dataclasses import dataclass

from kvq.capacity.plan.cost import check_share
from kvq.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class Efficiency:
    """What of a GPU's figures an engine reaches. Assumed, until a benchmark has measured yours.

    `measured`: (tokens, share) of steps' linear layers, in rising order: what of the roofline they reach
    there. It takes the place of the assumed shares of bandwidth and arithmetic for them.
    """

    bandwidth: float = 0.8  # of the data sheet's, by kernels that read weights or KV
    step: float = 0.7  # of a step's time, in such kernels
    arithmetic: float = 0.5  # of the dense peak, in prefill
    measured: tuple[tuple[int, float], ...] = ()
    kv: float | None = None  # of the bandwidth, by decodes that read KV; None: as weights
    attention: float | None = None  # of the dense peak, by prefill's attention; None: as linear layers
    sequence_s: float = 0.0  # for every sequence that gets a token, beside all that

    def __post_init__(self) -> None:
        for name in ("bandwidth", "step", "arithmetic"):
            check_share(name, getattr(self, name))
        for name in ("kv", "attention"):
            if getattr(self, name) is not None:
                check_share(name, getattr(self, name))
        for tokens, share in self.measured:
            check_share(f"the efficiency of {tokens} tokens", share)
        if not 0 <= self.sequence_s < 60:
            raise ConfigError(f"seconds a sequence must be 0 to 60, got {self.sequence_s}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """What one step runs on: one GPU, with its own share of the bytes and operations."""

    bandwidth: float  # bytes a second
    flops: float  # operations a second, dense
    efficiency: Efficiency

    def __post_init__(self) -> None:
        for name in ("bandwidth", "flops"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be above 0, got {getattr(self, name)}")

    def linear_s(self, weight_bytes: float, flops: float, *, tokens: int) -> float:
        """Seconds of linear layers for so many tokens."""
        reached = self.efficiency
        if reached.measured:
            return self._measured_s(weight_bytes, flops / tokens, tokens)
        read = weight_bytes / (self.bandwidth * reached.bandwidth * reached.step)
        return max(read, flops / (self.flops * reached.arithmetic))

    def _measured_s(self, weight_bytes: float, token_flops: float, tokens: int) -> float:
        """A line between the points that were measured; beyond them as efficient as at the nearest."""

        def at(number: int, share: float) -> float:
            return max(weight_bytes / self.bandwidth, token_flops * number / self.flops) / share

        before, *rest = self.efficiency.measured
        if tokens <= before[0]:
            return at(tokens, before[1])
        for after in rest:
            if tokens <= after[0]:
                way = (tokens - before[0]) / (after[0] - before[0])
                return at(*before) + way * (at(*after) - at(*before))
            before = after
        return at(tokens, before[1])

    def read_s(self, kv_bytes: float) -> float:
        """Seconds of reading so much KV."""
        reached = self.efficiency
        share = reached.bandwidth * reached.step if reached.kv is None else reached.kv
        return kv_bytes / (self.bandwidth * share)

    def attention_s(self, flops: float) -> float:
        """Seconds of so many operations of a prefill's attention."""
        reached = self.efficiency
        share = reached.arithmetic if reached.attention is None else reached.attention
        return flops / (self.flops * share)


def expert_share(experts: float, chosen: float, tokens: int) -> float:
    """Of the routed experts, those that a step of so many tokens reads on average, chosen evenly."""
    return 1 - (1 - chosen / experts) ** tokens if experts else 0.0
