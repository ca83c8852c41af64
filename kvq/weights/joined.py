"""Linear layers of one input as one product on CPUs: queries, keys, values; gates and what they gate."""

from collections.abc import Sequence
from dataclasses import dataclass
from threading import get_ident

from torch import Tensor

from kvq.kernels import PlainWeight, QuantizedWeight
from kvq.kernels.linear.cpu import CpuLinear


@dataclass(frozen=True, slots=True, eq=False)
class _Computed:
    """A product, the input and the thread that it is of, and where the parts begin that nobody took yet."""

    input: Tensor
    output: Tensor
    thread: int
    left: set[int]

    def has(self, part: slice, x: Tensor) -> bool:
        """True if this is what that part of the product with x is a part of."""
        known = self.input
        return (
            part.start in self.left
            and x.data_ptr() == known.data_ptr()
            and x.shape == known.shape
            and x.stride() == known.stride()
            and self.thread == get_ident()
        )


class Joined:
    """Several weights' product, computed when the first of them is asked for its part.

    The others' parts of the same input are kept until each was taken, and the input with them, so that its
    memory can't meanwhile become another's. Threads that share a model compute their own.
    """

    def __init__(self, weights: Sequence[QuantizedWeight | PlainWeight]) -> None:
        """Pack them one after the other.

        Raises:
            ConfigError: formats, inputs or their order differ.
        """
        self.kernel = CpuLinear(*weights)
        ends = [sum(weight.out_features for weight in weights[: i + 1]) for i in range(len(weights))]
        self.parts = [
            JoinedPart(self, slice(end - weight.out_features, end))
            for end, weight in zip(ends, weights, strict=True)
        ]
        self._kept: _Computed | None = None

    def take(self, part: slice, x: Tensor) -> Tensor:
        """One part of the product with x [rows, in]: a view [rows, out of that part]."""
        kept = self._kept
        if kept is None or not kept.has(part, x):
            kept = _Computed(x, self.kernel(x), get_ident(), {own.part.start for own in self.parts})
            self._kept = kept
        kept.left.discard(part.start)
        if not kept.left and self._kept is kept:
            self._kept = None
        return kept.output[:, part]


class JoinedPart:
    """One weight of several that share their input, as a kernel of its own."""

    def __init__(self, joined: Joined, part: slice) -> None:
        self.joined = joined
        self.part = part

    @property
    def nbytes(self) -> int:
        """Its share of the packed bytes."""
        return self._share(self.joined.kernel.nbytes)

    @property
    def code_bytes(self) -> int:
        """Of these, without scales."""
        return self._share(self.joined.kernel.code_bytes)

    def _share(self, nbytes: int) -> int:
        rows = self.part.stop - self.part.start
        return int(nbytes * rows // self.joined.kernel.out_features)

    def values(self) -> Tensor:
        """A copy of its rows of a weight in floats, [out, in]."""
        return self.joined.kernel.values()[self.part]

    def __call__(self, x: Tensor) -> Tensor:
        """[rows, in] -> [rows, out] of x's dtype, contiguous: of views torch rounds gelu in another way."""
        return self.joined.take(self.part, x).contiguous()
