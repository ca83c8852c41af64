"""What a Linear kernel is asked to support."""

from dataclasses import dataclass

from kvq.formats.weights import WeightCode, WeightFormat

LINEAR_OPERATIONS = ("linear_w4", "linear_w8")


@dataclass(frozen=True, kw_only=True, slots=True)
class LinearSpec:
    """The shape of one quantized Linear layer."""

    fmt: WeightFormat
    in_features: int
    out_features: int

    @property
    def operation(self) -> str:
        """The operation that runs it."""
        return "linear_w4" if self.fmt.code in (WeightCode.INT4, WeightCode.INT3) else "linear_w8"

    def __str__(self) -> str:
        return f"{self.fmt.name} weights [{self.out_features}, {self.in_features}]"
