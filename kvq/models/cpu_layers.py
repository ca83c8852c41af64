"""Decoder layers in C++: two calls and attention each."""

from collections.abc import Sequence

from torch import Tensor, nn

from kvq.kernels.decoder.cpu import CpuDecoder
from kvq.kernels.decoder.parts import DecoderParts
from kvq.models.step import PackedStep


class CpuLayers:
    """All layers of a model and its last norm."""

    def __init__(self, layers: Sequence[DecoderParts], norm: nn.Module) -> None:
        self._layers = [CpuDecoder(parts) for parts in layers]
        self._norm = norm

    def __call__(self, x: Tensor, angles: dict[str, tuple[Tensor, Tensor]], step: PackedStep) -> Tensor:
        """[rows, hidden] -> the same, normed."""
        for layer in self._layers:
            parts = layer.parts
            heads = layer.before(x, *angles[parts.angles])
            q, k, v = heads.split(parts.heads.counts, 1)
            attended = step.attend(parts.index, q, k, v, parts.options)
            x = layer.after(x, attended.flatten(1))
        normed: Tensor = self._norm(x)
        return normed
