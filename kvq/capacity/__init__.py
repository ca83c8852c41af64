"""Simulated serving: the engine's own scheduler and block memory, with faults and without a model."""

from kvq.capacity.fake_model import BlindModel, FakeModel, TokenSource
from kvq.capacity.faults import Faults
from kvq.capacity.fuzz import Given, fuzz
from kvq.capacity.records import Gauge, Outcome, RequestRecord, SimulationResult
from kvq.capacity.setup import Pools, Setup
from kvq.capacity.simulate import simulate
from kvq.capacity.workload import Mix, SimulatedRequest, jobs

__all__ = [
    "BlindModel",
    "FakeModel",
    "Faults",
    "Gauge",
    "Given",
    "Mix",
    "Outcome",
    "Pools",
    "RequestRecord",
    "Setup",
    "SimulatedRequest",
    "SimulationResult",
    "TokenSource",
    "fuzz",
    "jobs",
    "simulate",
]
