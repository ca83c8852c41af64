"""Generated sessions: conversations in small simulated worlds, where each request has one right call."""

from kvq.traces.tasks.compare import fits, same_call
from kvq.traces.tasks.generate import TASKS, generated

__all__ = ["TASKS", "fits", "generated", "same_call"]
