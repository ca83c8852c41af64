"""What steps cost, as far as scheduling depends on it. Times in seconds."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from math import sqrt

_FURTHEST = 3.0  # standard deviations; what lies further off counts as that far
_DRIFT = 0.05  # how far coefficients may have moved from one measurement to the next, relative


class _Regression:
    """A linear estimate that follows noisy measurements.

    Coefficients, none below 0, of which each measurement shows one weighted sum: a Kalman filter.

    What a measurement differs by is put down to the coefficients that are known least and weigh most in
    it. (R. E. Kalman, 1960, with a random walk as the state's own motion.)
    """

    def __init__(self, coefficients: Sequence[float], deviations: Sequence[float]) -> None:
        """First guesses and their standard deviations."""
        self.coefficients = list(coefficients)
        n = len(self.coefficients)
        self._covariance = [[deviations[i] ** 2 if i == j else 0.0 for j in range(n)] for i in range(n)]

    def __call__(self, weights: Sequence[float]) -> float:
        """The estimate of a weighted sum."""
        return sum(c * w for c, w in zip(self.coefficients, weights, strict=True))

    def observe(self, weights: Sequence[float], measured: float, deviation: float) -> None:
        """Learn from one measured sum and its standard deviation."""
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
    """Predicts step times. Moving blocks costs by the block, and nothing is learned, unless a model does."""

    def __init__(self, *, swap_block_s: float) -> None:
        self._swap_block_s = swap_block_s

    @abstractmethod
    def decode_s(self, num_decodes: int) -> float:
        """A step of that many decodes and nothing else."""

    def verify_s(self, num_decodes: int, num_drafts: int) -> float:
        """The same with drafts behind their tokens."""
        return self.decode_s(num_decodes + num_drafts)

    def knows_decode(self, num_decodes: int) -> bool:
        """True if such a step was measured lately, so that others may be compared with it."""
        return True

    @abstractmethod
    def prefill_token_s(self, depth: int) -> float:
        """What one more prefill token at a position near `depth` adds to a step."""

    @abstractmethod
    def prefill_step_s(self) -> float:
        """What prefill adds to a step however few its tokens."""

    def prefill_share(self, num_decodes: int) -> float:
        """How much of its prefill a step should compute, so that something is learned from its time."""
        return 1.0

    def swap_s(self, num_blocks: int) -> float:
        """Moving blocks to host memory and back."""
        return num_blocks * self._swap_block_s

    def observe(  # noqa: B027 - there may be nothing to learn
        self, *, num_decodes: int, prefill_tokens: int, depth: int, seconds: float, num_drafts: int = 0
    ) -> None:
        """A step took that long, without making the drafts."""

    def observe_swap(self, num_blocks: float, seconds: float) -> None:  # noqa: B027 - nor here
        """Moving so many blocks out and in took that long; a move in one direction is half a block."""


class FixedCosts(CostModel):
    """Costs that are known beforehand."""

    def __init__(
        self,
        *,
        step_s: float = 5e-3,
        decode_token_s: float = 1e-4,
        prefill_token_s: float = 1e-4,
        prefill_step_s: float = 0.0,
        swap_block_s: float = 1e-4,
    ) -> None:
        super().__init__(swap_block_s=swap_block_s)
        self._step_s = step_s
        self._prefill_step_s = prefill_step_s
        self._decode_token_s = decode_token_s
        self._prefill_token_s = prefill_token_s

    def decode_s(self, num_decodes: int) -> float:
        """A fixed part and one per decode."""
        return self._step_s + num_decodes * self._decode_token_s

    def prefill_token_s(self, depth: int) -> float:
        """The same at any depth."""
        return self._prefill_token_s

    def prefill_step_s(self) -> float:
        """The same for any number of tokens."""
        return self._prefill_step_s


_SLOWLY, _QUICKLY = 0.1, 0.5  # how far an estimate follows one measurement
_NOISE = 0.1  # of a step's time
_HALVE, _OMIT = 16, 64  # every so many steps with prefill, one with half of it, and one without
_SURE = 3  # times that decodes of one size are measured alone before prefill joins them
_OUTLIER = 2.0  # of what a size is believed to take; whatever takes longer counts as that long
_FADE = 0.998  # of what larger sizes are believed to take, with every step: they may never be tried again


class BySize:
    """Running estimates of how long something of a size takes, by powers of two.

    No formula holds for decode steps on all devices: on CPUs 16 rows cost less than 15, on GPUs 64 what
    one does. They follow quicker steps faster than slower ones.
    """

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}
        self._counts: dict[int, int] = {}  # measurements

    def __call__(self, size: int) -> float:
        """The estimate of the nearest size that was measured; 0 before any was."""
        known = self._seconds
        return known[_nearest(size.bit_length(), known)] if size and known else 0.0

    def count(self, size: int) -> int:
        """How often that size was measured."""
        return self._counts.get(size.bit_length(), 0)

    def took_more(self, size: int, seconds: float) -> None:
        """Something of that size took so long with more beside it: without that it had taken less."""
        key = size.bit_length()
        if key in self._seconds:
            self._seconds[key] = min(self._seconds[key], seconds)

    def observe(self, size: int, seconds: float) -> None:
        """Follow quicker ones quickly, slower ones slowly; a new size starts from its neighbour's."""
        key, known = size.bit_length(), self._seconds
        before = known[_nearest(key, known)] if known else seconds
        seconds = min(seconds, _OUTLIER * before) if before > 0 else seconds
        count = self._counts[key] = self._counts.get(key, 0) + 1
        rate = _QUICKLY if count == 1 or seconds < before else _SLOWLY
        if count <= _SURE and seconds < before:
            rate = 1.0  # the first may have been anything
        known[key] = before + rate * (seconds - before)
        for larger in known:
            if larger > key:  # twice the rows take twice the time at most
                known[larger] = min(_FADE * known[larger], known[key] * 2.0 ** (larger - key + 1))


class MeasuredCosts(CostModel):
    """Running estimates: decode steps by their size, prefill as a linear regression.

    Prefill adds a part of its own whatever its size (other kernels, no CUDA graph), one by the token, and one
    by the token and its depth (its attention). Were the first counted by the token, small chunks would look
    dear and stay small for ever. To tell the parts from each other and from the decodes', some steps take
    less prefill than they might. Drafts add a part of their own to decodes of a size, and one each.
    """

    def __init__(self, *, prefill_token_s: float = 1e-3, swap_block_s: float = 1e-4) -> None:
        """The arguments hold until something was measured."""
        super().__init__(swap_block_s=swap_block_s)
        self._decodes = BySize()
        self._drafts: dict[int, _Regression] = {}  # what drafts add to steps of a size, and each of them
        self._since: dict[int, int] = {}  # of a size, steps with drafts since one without
        self._age: dict[int, int] = {}  # of a size of decodes, the step with prefill before its last time
        self._num_prefills = 0
        deviations = 10e-3, prefill_token_s, prefill_token_s / 1000
        self._prefill = _Regression((0.0, prefill_token_s, 0.0), deviations)

    def decode_s(self, num_decodes: int) -> float:
        """The estimate of the nearest size that was measured; 0 before any was."""
        return self._decodes(num_decodes)

    def verify_s(self, num_decodes: int, num_drafts: int) -> float:
        """What was learned from steps of that size; before, as if drafts were tokens of a prompt."""
        learned = self._drafts.get(num_decodes.bit_length())
        added = num_drafts * self.prefill_token_s(0) if learned is None else learned((1, num_drafts))
        return self._decodes(num_decodes) + added

    def knows_decode(self, num_decodes: int) -> bool:
        """False before such steps were measured some times, and now and then."""
        is_sure = self._decodes.count(num_decodes) >= _SURE
        return is_sure and self._since.get(num_decodes.bit_length(), 0) < _OMIT

    def prefill_token_s(self, depth: int) -> float:
        """What was learned from all depths."""
        return self._prefill((0, 1, depth))

    def prefill_step_s(self) -> float:
        """What was learned from steps with decodes beside their prefill."""
        return self._prefill((1, 0, 0))

    def prefill_share(self, num_decodes: int) -> float:
        """Nothing while the decodes alone were not measured lately, half now and then, else all."""
        age = self._age.get(num_decodes.bit_length(), self._num_prefills)
        if self._decodes.count(num_decodes) < _SURE or self._num_prefills - age >= _OMIT:
            return 0.0
        return 0.5 if self._num_prefills % _HALVE == 0 else 1.0

    def observe_swap(self, num_blocks: float, seconds: float) -> None:
        """Follow what a block took, slowly."""
        self._swap_block_s += _SLOWLY * (seconds / num_blocks - self._swap_block_s)

    def observe(
        self, *, num_decodes: int, prefill_tokens: int, depth: int, seconds: float, num_drafts: int = 0
    ) -> None:
        """Learn from a step of decodes alone, or from what its prefill tokens added."""
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
        """Learn what they added: a part of its own whatever their number, and one by the draft."""
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
