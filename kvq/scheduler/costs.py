"""Cost models that predict step times for scheduling. Times are in seconds."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from math import sqrt

_FURTHEST = 3.0  # standard deviations; larger deviations are clamped to this
_DRIFT = 0.05  # relative drift of coefficients from one measurement to the next


class _Regression:
    """Linear estimate that follows noisy measurements: a Kalman filter.

    Each measurement is a weighted sum of the coefficients, which are never negative. The deviation from the
    estimate is attributed mainly to the coefficients that are least certain and have the largest weight.
    Source: R. E. Kalman 1960, with a random walk as the state transition.
    """

    def __init__(self, coefficients: Sequence[float], deviations: Sequence[float]) -> None:
        """Start from initial estimates of the coefficients and their standard deviations."""
        self.coefficients = list(coefficients)
        n = len(self.coefficients)
        self._covariance = [[deviations[i] ** 2 if i == j else 0.0 for j in range(n)] for i in range(n)]

    def __call__(self, weights: Sequence[float]) -> float:
        """Return the estimate of a weighted sum."""
        return sum(c * w for c, w in zip(self.coefficients, weights, strict=True))

    def observe(self, weights: Sequence[float], measured: float, deviation: float) -> None:
        """Learn from one measured sum, whose standard deviation is `deviation`."""
        spread = [sum(p * w for p, w in zip(row, weights, strict=True)) for row in self._covariance]
        variance = sum(s * w for s, w in zip(spread, weights, strict=True)) + deviation**2
        furthest = _FURTHEST * sqrt(variance)
        off = min(max(measured - self(weights), -furthest), furthest)
        for i, s in enumerate(spread):
            row = self._covariance[i]
            for j, other in enumerate(spread):
                row[j] -= s * other / variance
            self.coefficients[i] = max(0.0, self.coefficients[i] + s * off / variance)
            row[i] += (_DRIFT * self.coefficients[i]) ** 2


class CostModel(ABC):
    """Predictor of step times. By default, a move takes a fixed time per block, and nothing is learned."""

    def __init__(self, *, move_block_s: float) -> None:
        self._move_block_s = move_block_s

    @abstractmethod
    def decode_s(self, num_decodes: int) -> float:
        """Return the time of a step with only `num_decodes` decodes."""

    def verify_s(self, num_decodes: int, num_drafts: int) -> float:
        """Return the time of a step that computes decodes and verifies `num_drafts` drafts."""
        return self.decode_s(num_decodes + num_drafts)

    def knows_decode(self, num_decodes: int) -> bool:
        """Return True if a step of this size was measured recently and can serve as a reference."""
        return True

    @abstractmethod
    def prefill_token_s(self, depth: int) -> float:
        """Return the time that an additional prefill token at a position near `depth` adds to a step."""

    @abstractmethod
    def prefill_step_s(self) -> float:
        """Return the fixed time that prefill adds to a step, regardless of the number of tokens."""

    def prefill_share(self, num_decodes: int) -> float:
        """Return the share of its prefill tokens that a step should compute to make its time informative."""
        return 1.0

    def move_s(self, num_blocks: int) -> float:
        """Return the time to move blocks to host memory and back again."""
        return num_blocks * self._move_block_s

    def observe(  # noqa: B027 - there may be nothing to learn
        self, *, num_decodes: int, prefill_tokens: int, depth: int, seconds: float, num_drafts: int = 0
    ) -> None:
        """Learn from a step that took `seconds`, not counting the time to make its drafts."""

    def observe_move(self, num_blocks: float, seconds: float) -> None:  # noqa: B027 - nor here
        """Learn from the time to move blocks out and back; a move in one direction counts as half a block."""


class FixedCosts(CostModel):
    """Cost model with fixed costs, specified in advance."""

    def __init__(
        self,
        *,
        step_s: float = 5e-3,
        decode_token_s: float = 1e-4,
        prefill_token_s: float = 1e-4,
        prefill_step_s: float = 0.0,
        move_block_s: float = 1e-4,
    ) -> None:
        super().__init__(move_block_s=move_block_s)
        self._step_s = step_s
        self._prefill_step_s = prefill_step_s
        self._decode_token_s = decode_token_s
        self._prefill_token_s = prefill_token_s

    def decode_s(self, num_decodes: int) -> float:
        """Return the fixed step time plus the time per decode."""
        return self._step_s + num_decodes * self._decode_token_s

    def prefill_token_s(self, depth: int) -> float:
        """Return the configured time, regardless of the depth."""
        return self._prefill_token_s

    def prefill_step_s(self) -> float:
        """Return the configured time, regardless of the number of tokens."""
        return self._prefill_step_s


_SLOWLY, _QUICKLY = 0.1, 0.5  # weight of one new measurement in an estimate
_NOISE = 0.1  # of a step's time
_HALVE, _OMIT = 16, 64  # steps with prefill until one step takes half of its prefill, or none
_SURE = 3  # measurements of decodes alone at one size before prefill is added
# D233: a single stall must not skew the estimates
_OUTLIER = 2.0  # longer measurements are clamped to this multiple of the estimate
_FADE = 0.998  # per step, for estimates of larger sizes, which otherwise might never be tried again


class BySize:  # D232: table for decode times, regression for prefill
    """Running estimates of a duration, one per size class (sizes are grouped by powers of two).

    No formula fits decode steps on all devices: on CPUs, 16 rows take less time than 15; on GPUs, 64 rows
    take as long as one. The estimates adapt more quickly to faster steps than to slower ones.
    """

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}
        self._counts: dict[int, int] = {}  # measurements

    def __call__(self, size: int) -> float:
        """Return the estimate for the nearest measured size, or 0 before the first measurement."""
        known = self._seconds
        return known[_nearest(size.bit_length(), known)] if size and known else 0.0

    def count(self, size: int) -> int:
        """Return how often this size was measured."""
        return self._counts.get(size.bit_length(), 0)

    def took_more(self, size: int, seconds: float) -> None:
        """Learn from a step with additional work, which shows that the size alone takes at most `seconds`."""
        key = size.bit_length()
        if key in self._seconds:
            self._seconds[key] = min(self._seconds[key], seconds)

    def observe(self, size: int, seconds: float) -> None:
        """Adapt quickly to faster steps and slowly to slower ones. A new size starts from its neighbor."""
        key, known = size.bit_length(), self._seconds
        before = known[_nearest(key, known)] if known else seconds
        seconds = min(seconds, _OUTLIER * before) if before > 0 else seconds
        count = self._counts[key] = self._counts.get(key, 0) + 1
        rate = _QUICKLY if count == 1 or seconds < before else _SLOWLY
        if count <= _SURE and seconds < before:
            rate = 1.0  # the first measurement may have been far off
        known[key] = before + rate * (seconds - before)
        for larger in known:
            if larger > key:  # twice the rows take at most twice the time
                known[larger] = min(_FADE * known[larger], known[key] * 2.0 ** (larger - key + 1))


class MeasuredCosts(CostModel):
    """Running estimates of step times: a table by size for decodes, and a linear regression for prefill.

    Prefill adds a fixed part (other kernels, no CUDA graph), a part per token, and a part per token and depth
    (its attention). If the fixed part were spread over the tokens, small chunks would look expensive and stay
    small forever. To separate these parts from each other and from decodes, some steps take less prefill than
    they could. For decodes of each size, drafts add a fixed part and a part per draft.
    """

    def __init__(self, *, prefill_token_s: float = 1e-3, move_block_s: float = 1e-4) -> None:
        """Start from initial estimates, which apply until steps have been measured."""
        super().__init__(move_block_s=move_block_s)
        self._decodes = BySize()
        self._drafts: dict[int, _Regression] = {}  # by size, fixed time that drafts add, and time per draft
        self._since: dict[int, int] = {}  # by size, steps with drafts since one without
        self._age: dict[int, int] = {}  # by size, `_num_prefills` when decodes alone were last measured
        self._num_prefills = 0
        deviations = 10e-3, prefill_token_s, prefill_token_s / 1000
        self._prefill = _Regression((0.0, prefill_token_s, 0.0), deviations)

    def decode_s(self, num_decodes: int) -> float:
        """Return the estimate for the nearest measured size, or 0 before the first measurement."""
        return self._decodes(num_decodes)

    def verify_s(self, num_decodes: int, num_drafts: int) -> float:
        """Return the learned time. Before the first measurement, drafts count as prompt tokens."""
        learned = self._drafts.get(num_decodes.bit_length())
        added = num_drafts * self.prefill_token_s(0) if learned is None else learned((1, num_drafts))
        return self._decodes(num_decodes) + added

    def knows_decode(self, num_decodes: int) -> bool:
        """Return False until such steps have been measured several times, and again from time to time."""
        is_sure = self._decodes.count(num_decodes) >= _SURE
        return is_sure and self._since.get(num_decodes.bit_length(), 0) < _OMIT

    def prefill_token_s(self, depth: int) -> float:
        """Return the learned time per token at this depth."""
        return self._prefill((0, 1, depth))

    def prefill_step_s(self) -> float:
        """Return the fixed part learned from steps with both decodes and prefill."""
        return self._prefill((1, 0, 0))

    def prefill_share(self, num_decodes: int) -> float:
        """Return 0 if decodes alone were not measured recently, 0.5 from time to time, and otherwise 1."""
        age = self._age.get(num_decodes.bit_length(), self._num_prefills)
        if self._decodes.count(num_decodes) < _SURE or self._num_prefills - age >= _OMIT:
            return 0.0
        return 0.5 if self._num_prefills % _HALVE == 0 else 1.0

    def observe_move(self, num_blocks: float, seconds: float) -> None:
        """Adapt the estimated time per block slowly to a new measurement."""
        self._move_block_s += _SLOWLY * (seconds / num_blocks - self._move_block_s)

    def observe(
        self, *, num_decodes: int, prefill_tokens: int, depth: int, seconds: float, num_drafts: int = 0
    ) -> None:
        """Learn from a step with decodes only, or from the time that prefill tokens added."""
        if not prefill_tokens:
            key = num_decodes.bit_length()
            if num_drafts:
                self._observe_drafts(num_decodes, num_drafts, seconds)
            else:
                self._decodes.observe(num_decodes, seconds)
                self._age[key] = self._num_prefills
                self._since[key] = 0
            return
        if num_decodes:
            self._decodes.took_more(num_decodes, seconds)
        self._num_prefills += num_decodes > 0
        weights = num_decodes > 0, prefill_tokens, prefill_tokens * depth
        usual = self.verify_s(num_decodes, num_drafts) if num_drafts else self.decode_s(max(1, num_decodes))
        self._prefill.observe(weights, max(0.0, seconds - usual), _NOISE * seconds)

    def _observe_drafts(self, num_decodes: int, num_drafts: int, seconds: float) -> None:
        """Learn the time added by drafts: a fixed part and a part per draft."""
        key = num_decodes.bit_length()
        self._since[key] = self._since.get(key, 0) + 1
        self._decodes.took_more(num_decodes, seconds)
        if key not in self._drafts:
            each = self.prefill_token_s(0)
            self._drafts[key] = _Regression((0.0, each), (seconds, each))
        added = max(0.0, seconds - self._decodes(num_decodes))
        self._drafts[key].observe((1, num_drafts), added, _NOISE * seconds)


def _nearest(key: int, estimates: dict[int, float]) -> int:
    return key if key in estimates else min(estimates, key=lambda known: abs(known - key))
