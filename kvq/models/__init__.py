"""Running Hugging Face models over kvq's blocks."""

from kvq.models.model import Model, load
from kvq.models.session import Session, StepResult

__all__ = ["Model", "Session", "StepResult", "load"]
