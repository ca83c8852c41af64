"""Hugging Face models that run on kvq's quantized KV blocks."""

from typing import TYPE_CHECKING

from kvq.lazy import lazily

if TYPE_CHECKING:
    from kvq.models.model import Model, load
    from kvq.models.run.session import Session, StepResult
else:
    __getattr__ = lazily(
        __name__, {"kvq.models.model": ("Model", "load"), "kvq.models.run.session": ("Session", "StepResult")}
    )

__all__ = ["Model", "Session", "StepResult", "load"]
