"""How a layer weighs the keys that its queries see."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvq.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class AttentionOptions:
    """What attention is asked to do besides reading blocks.

    `scale` multiplies the scores, then `softcap` bounds them as softcap * tanh(s / softcap). `window`:
    keys that a query sees, its own position included. `sinks`: [q_heads], logits that join the softmax
    without a value.

    Raises:
        ConfigError: a window of no token, or a scale or softcap that is not above 0.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None

    def __post_init__(self) -> None:
        if not self.scale > 0:
            raise ConfigError(f"scale must be more than 0, got {self.scale}")
        if self.window is not None and self.window < 1:
            raise ConfigError(f"window must be 1 token at least, or None for no window, got {self.window}")
        if self.softcap is not None and self.softcap <= 0:
            raise ConfigError(f"softcap must be more than 0, or None for none, got {self.softcap}")

    def within(self, window: int | None) -> "AttentionOptions":
        """The same with a window at most that long."""
        if window is None or (self.window is not None and self.window <= window):
            return self
        return replace(self, window=window)

    def without_sinks(self) -> "AttentionOptions":
        """The same for a part of the keys: sinks join once, where parts are merged."""
        return self if self.sinks is None else replace(self, sinks=None)

    def oldest(self, position: int) -> int:
        """The first position that a query at `position` sees."""
        return 0 if self.window is None else max(0, position - self.window + 1)

    def hides(self, query: Tensor, key: Tensor) -> Tensor:
        """bool: True where a query at a position does not see the key at another; both broadcast."""
        later = key > query
        return later if self.window is None else later | (key <= query - self.window)

    def capped(self, scores: Tensor) -> Tensor:
        """Scaled scores within the softcap."""
        return scores if self.softcap is None else self.softcap * torch.tanh(scores / self.softcap)
