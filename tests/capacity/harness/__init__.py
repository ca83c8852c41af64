"""Simulated serving: the engine's own scheduler and block memory, with faults and without a model."""

from tests.capacity.harness.fake_model import BlindModel, FakeModel, TokenSource
from tests.capacity.harness.faults import Faults
from tests.capacity.harness.fuzz import Given, fuzz
from tests.capacity.harness.records import Gauge, Outcome, RequestRecord, SimulationResult
from tests.capacity.harness.setup import Pools, Setup
from tests.capacity.harness.simulate import simulate
from tests.capacity.harness.workload import Mix, SimulatedRequest, jobs

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
