"""How long a model's Linear layers take, measured only while somebody wants to know."""

from time import perf_counter
from typing import Any

from torch import nn

from kvq.weights import PackedLinear
from kvq.weights.install import GatedMLP


class LinearTime:
    """Adds up the time in all Linear layers of a model on a CPU."""

    def __init__(self, model: nn.Module) -> None:
        self.seconds = 0.0
        self._began = 0.0
        self._hooks = []
        fused = {
            child for module in model.modules() if isinstance(module, GatedMLP) for child in module.children()
        }
        for module in model.modules():
            if isinstance(module, nn.Linear | PackedLinear | GatedMLP) and module not in fused:
                self._hooks.append(module.register_forward_pre_hook(self._begin))
                self._hooks.append(module.register_forward_hook(self._end))

    def take(self) -> float:
        """The seconds since the last call."""
        seconds, self.seconds = self.seconds, 0.0
        return seconds

    def close(self) -> None:
        """Stop measuring."""
        for hook in self._hooks:
            hook.remove()

    def _begin(self, *_: Any) -> None:
        self._began = perf_counter()

    def _end(self, *_: Any) -> None:
        self.seconds += perf_counter() - self._began
