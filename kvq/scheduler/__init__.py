"""Continuous batching: chooses the requests and tokens of each step. Plain Python; no clock, no torch."""

from kvq.scheduler.config import SchedulerConfig
from kvq.scheduler.costs import CostModel, FixedCosts, MeasuredCosts
from kvq.scheduler.fit import PoolShape, Reach, most_blocks, resolve_max_tokens
from kvq.scheduler.request import Branch, Priority, Request
from kvq.scheduler.scheduler import Scheduler
from kvq.scheduler.snapshot import Snapshot
from kvq.scheduler.step import StepPlan

__all__ = [
    "Branch", "CostModel", "FixedCosts", "MeasuredCosts", "PoolShape", "Priority", "Reach", "Request",
    "Scheduler", "SchedulerConfig", "Snapshot", "StepPlan", "most_blocks", "resolve_max_tokens",
]  # fmt: skip
