"""Hidden states behind a model's last norm, kept for speculation that drafts from them."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from kvq.models.parts.step import PackedStep


@contextmanager
def kept_hidden(model: nn.Module, step: PackedStep) -> Iterator[None]:
    """Let a pass of a causal model fill in `step.hidden`, if the step asks for it; costs nothing else."""
    if not step.keeps_hidden:
        yield
        return

    def keep(_: nn.Module, args: tuple[Any, ...], given: dict[str, Any], output: Any) -> None:
        if given.get("kvq_step") is step:
            step.hidden = output.last_hidden_state[0]

    inner: Any = model.base_model
    hook = inner.register_forward_hook(keep, with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()
