"""What steps cost, as far as scheduling depends on it. Times in seconds."""

from typing import Protocol


class CostModel(Protocol):
    """Predicts step times; learns from measured ones if it can."""

    def decode_s(self, num_decodes: int) -> float:
        """A step of that many decodes and nothing else."""

    def prefill_token_s(self, depth: int) -> float:
        """What one more prefill token at a position near `depth` adds to a step."""

    def swap_s(self, num_blocks: int) -> float:
        """Moving blocks to host memory and back."""

    def observe(self, *, num_decodes: int, prefill_tokens: int, depth: int, seconds: float) -> None:
        """A step took that long."""

    def observe_swap(self, num_blocks: float, seconds: float) -> None:
        """Moving so many blocks out and in took that long; a move in one direction is half a block."""


class FixedCosts:
    """Costs that are known beforehand."""

    def __init__(
        self,
        *,
        step_s: float = 5e-3,
        decode_token_s: float = 1e-4,
        prefill_token_s: float = 1e-4,
        swap_block_s: float = 1e-4,
    ) -> None:
        self._step_s = step_s
        self._decode_token_s = decode_token_s
        self._prefill_token_s = prefill_token_s
        self._swap_block_s = swap_block_s

    def decode_s(self, num_decodes: int) -> float:
        """A fixed part and one per decode."""
        return self._step_s + num_decodes * self._decode_token_s

    def prefill_token_s(self, depth: int) -> float:
        """The same at any depth."""
        return self._prefill_token_s

    def swap_s(self, num_blocks: int) -> float:
        """Proportional to the blocks."""
        return num_blocks * self._swap_block_s

    def observe(self, *, num_decodes: int, prefill_tokens: int, depth: int, seconds: float) -> None:
        """Nothing to learn."""

    def observe_swap(self, num_blocks: float, seconds: float) -> None:
        """Nothing to learn."""


_SLOWLY, _QUICKLY = 0.1, 0.5  # how far an estimate follows one measurement


class MeasuredCosts:
    """Running estimates by powers of two: decode steps by their size, prefill tokens by their depth.

    No formula holds for all devices: on CPUs 16 rows cost less than 15, on GPUs 64 what one does, and
    a prefill token's attention grows with its depth. What prefill costs follows slower steps faster than
    quicker ones, and what decodes cost the other way round: too much prefill beside running streams is
    what users notice.
    """

    def __init__(self, *, prefill_token_s: float = 1e-3, swap_block_s: float = 1e-4) -> None:
        """The arguments hold until something was measured."""
        self._default_prefill_token_s = prefill_token_s
        self._swap_block_s = swap_block_s
        self._decode_s: dict[int, float] = {}
        self._decode_bounds: dict[int, float] = {}  # from steps with prefill, while there are no others
        self._prefill_token_s: dict[int, float] = {}

    def decode_s(self, num_decodes: int) -> float:
        """The estimate of the nearest size that was measured; 0 before any was."""
        known = self._decode_s if num_decodes.bit_length() in self._decode_s else self._decode_bounds
        known = known if num_decodes.bit_length() in known else self._decode_s or self._decode_bounds
        return known[_nearest(num_decodes, known)] if num_decodes and known else 0.0

    def prefill_token_s(self, depth: int) -> float:
        """The estimate of the nearest depth that was measured."""
        if not self._prefill_token_s:
            return self._default_prefill_token_s
        return self._prefill_token_s[_nearest(depth, self._prefill_token_s)]

    def swap_s(self, num_blocks: int) -> float:
        """Proportional to the blocks."""
        return num_blocks * self._swap_block_s

    def observe_swap(self, num_blocks: float, seconds: float) -> None:
        """Moving so many blocks out and in took that long; a move in one direction is half a block."""
        self._swap_block_s += _SLOWLY * (seconds / num_blocks - self._swap_block_s)

    def observe(self, *, num_decodes: int, prefill_tokens: int, depth: int, seconds: float) -> None:
        """Learn from a step of decodes alone, or from what its prefill tokens added."""
        if not prefill_tokens:
            _follow(self._decode_s, num_decodes, seconds, up=_SLOWLY, down=_QUICKLY)
            return
        if num_decodes:
            rest = seconds - prefill_tokens * self.prefill_token_s(depth)
            key = num_decodes.bit_length()
            self._decode_bounds[key] = min(self._decode_bounds.get(key, seconds), max(rest, seconds / 4))
        added = max(0.0, seconds - self.decode_s(num_decodes)) / prefill_tokens
        _follow(self._prefill_token_s, depth, added, up=_QUICKLY, down=_SLOWLY)


def _follow(estimates: dict[int, float], value: int, measured: float, *, up: float, down: float) -> None:
    """Move an estimate towards a measurement; a new one starts from its nearest neighbour's."""
    key = value.bit_length()
    before = estimates[_nearest(value, estimates)] if estimates else measured
    if key not in estimates:
        up = down = max(up, down)
    estimates[key] = before + (up if measured > before else down) * (measured - before)


def _nearest(value: int, estimates: dict[int, float]) -> int:
    key = value.bit_length()
    return key if key in estimates else min(estimates, key=lambda known: abs(known - key))
