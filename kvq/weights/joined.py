"""Linear layers of one input as one product on CPUs: queries, keys, values; gates and what they gate."""

from collections.abc import Sequence

from torch import Tensor

from kvq.kernels import QuantizedWeight
from kvq.kernels.linear.cpu import CpuLinear


class Joined:
    """Several weights' product, computed when the first of them is asked for its part.

    The others' parts of the same input are kept until each was taken, and the input with them, so that its
    memory can't meanwhile become another's.
    """

    def __init__(self, weights: Sequence[QuantizedWeight]) -> None:
        """Pack them one after the other.

        Raises:
            ConfigError: formats, inputs or their order differ.
        """
        self.kernel = CpuLinear.joined(weights)
        ends = [sum(weight.out_features for weight in weights[: i + 1]) for i in range(len(weights))]
        self.parts = [
            JoinedPart(self, slice(end - weight.out_features, end))
            for end, weight in zip(ends, weights, strict=True)
        ]
        self._input: Tensor | None = None
        self._output: Tensor | None = None
        self._left: set[int] = set()

    def take(self, part: slice, x: Tensor) -> Tensor:
        """One part of the product with x [rows, in]: a view [rows, out of that part]."""
        known = self._input
        if (
            known is None
            or part.start not in self._left
            or x.data_ptr() != known.data_ptr()
            or x.shape != known.shape
            or x.stride() != known.stride()
        ):
            self._input, self._output = x, self.kernel(x)
            self._left = {own.part.start for own in self.parts}
        output = self._output
        assert output is not None, "a known input has an output"
        self._left.discard(part.start)
        if not self._left:
            self._input = self._output = None
        return output[:, part]


class JoinedPart:
    """One weight of several that share their input, as a kernel of its own."""

    def __init__(self, joined: Joined, part: slice) -> None:
        self.joined = joined
        self.part = part

    @property
    def nbytes(self) -> int:
        """Its share of the packed bytes."""
        whole = self.joined.kernel
        share: int = whole.nbytes * (self.part.stop - self.part.start) // whole.out_features
        return share

    def __call__(self, x: Tensor) -> Tensor:
        """[rows, in] -> [rows, out] of x's dtype."""
        return self.joined.take(self.part, x)
