"""Statistics of a layer's inputs over a text, for the calibrated quantizers."""

import torch
from torch import Tensor

from kvq.errors import RequestError


class InputStatistics:  # D177: second moments; memory doesn't grow with the text
    """Sums over the input tokens of Linear layers that share an input.

    `gram`: fp32 [in, in], the sum of x x^T. `gram` determines the squared output error of any weight change E
    over all tokens: sum |E x|^2 = tr(E gram E^T). `absmax` and `abssum`: fp32 [in]. `rows`: some tokens of
    every sample, fp32 [kept, in], for errors that second moments don't determine.
    """

    def __init__(
        self, name: str, in_features: int, device: torch.device, *, rows: int = 0, per_sample: int = 16
    ) -> None:
        """`rows`: maximum number of tokens to keep, up to `per_sample` per call of `add`, evenly spaced."""
        self.name = name
        self.tokens = 0
        self.gram = torch.zeros(in_features, in_features, device=device, dtype=torch.float32)
        self.absmax = torch.zeros(in_features, device=device, dtype=torch.float32)
        self.abssum = torch.zeros(in_features, device=device, dtype=torch.float32)
        self._rows: list[Tensor] = []
        self._wanted = rows
        self._per_sample = per_sample

    def add(self, x: Tensor) -> None:
        """Add inputs [..., in].

        Raises:
            RequestError: the inputs contain NaN or infinity.
        """
        x = x.reshape(-1, x.shape[-1]).float()
        magnitude = x.abs()
        largest = magnitude.amax(0)
        if not torch.isfinite(largest).all():
            raise RequestError(
                f"the inputs of {self.name} hold NaN or infinity; the model overflows on this text: is the "
                f"checkpoint whole, and its dtype the one that it was trained in?"
            )
        torch.maximum(self.absmax, largest, out=self.absmax)
        self.abssum += magnitude.sum(0)
        self.gram.addmm_(x.T, x)
        self.tokens += x.shape[0]
        if self._wanted > 0:
            kept = x[:: max(1, x.shape[0] // self._per_sample)][: min(self._per_sample, self._wanted)]
            self._rows.append(kept.clone())
            self._wanted -= kept.shape[0]

    @property
    def absmean(self) -> Tensor:
        """Mean magnitude of each input, fp32 [in]."""
        return self.abssum / max(1, self.tokens)

    @property
    def rows(self) -> Tensor:
        """Inputs of the kept tokens, fp32 [kept, in]."""
        return torch.cat(self._rows) if self._rows else self.gram.new_zeros(0, self.gram.shape[0])

    def divide(self, scale: Tensor) -> None:
        """Divide the statistics by `scale`, fp32 [in], after the layer's inputs have been divided by it."""
        self.gram /= scale
        self.gram /= scale[:, None]
        self.absmax /= scale
        self.abssum /= scale
        self._rows = [rows / scale for rows in self._rows]

    def squared(self, weight: Tensor) -> float:
        """Return the sum over tokens of |W x|^2 for a weight or a weight change, fp32 [out, in]."""
        return float(((weight @ self.gram) * weight).sum(dtype=torch.float64).clamp_min(0))

    def relative_error(self, weight: Tensor, stored: Tensor) -> float:
        """Return |(W - Q) X| / |W X| over all tokens, Frobenius norms; both fp32 [out, in]."""
        whole = self.squared(weight)
        return (self.squared(stored - weight) / whole) ** 0.5 if whole > 0 else 0.0
