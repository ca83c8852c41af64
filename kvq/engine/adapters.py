"""Adapters of an engine: their names and folders, and room in memory for those in use."""

import logging
from collections import OrderedDict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from weakref import WeakSet

import numpy as np

from kvq.engine.config import EngineConfig
from kvq.engine.requests.named_adapter import NamedAdapter
from kvq.engine.requests.request_state import Job, as_job
from kvq.errors import ConfigError, ModelError, RequestError, unknown
from kvq.kernels.uploads import upload_all
from kvq.models import Model
from kvq.models.adapters.folder import StoredAdapter, read_adapter
from kvq.models.adapters.place import adaptable, place
from kvq.models.parts.adapters import Adapter, StepAdapters
from kvq.scheduler import StepPlan

_log = logging.getLogger("kvq")
_MOST_IDS = 1 << 20  # tokens of a vocabulary that leaves room for tags


@dataclass(slots=True, eq=False)
class Adapters:
    """Adapters by name; the least recently used ones leave memory, and come back from their folders."""

    model: Model
    config: EngineConfig
    named: dict[str, NamedAdapter] = field(default_factory=dict)
    held: OrderedDict[bytes, Adapter] = field(default_factory=OrderedDict)  # in memory, latest use last
    _last: tuple[Any, StepAdapters] | None = None  # D424: what the last step had, usually that of the next
    _cores: WeakSet[Any] = field(default_factory=WeakSet)  # engines whose requests name them

    @classmethod
    def of(cls, model: Model, config: EngineConfig) -> "Adapters":
        """Return the adapters of an engine, each read once.

        Raises:
            ModelError, ConfigError: see `load`.
        """
        made = cls(model, config)
        for name, folder in config.adapters.items():
            made.load(name, folder)
        return made

    def serve(self, core: Any) -> None:
        """Let the requests of an `EngineCore` name these adapters."""
        core.adapters, core.intake.find_adapter = self, self.find
        core.runner.adapters = self.of_step
        self._cores.add(core)

    def load(self, name: str, folder: str | Path) -> None:
        """Read an adapter, so that requests may name it.

        Raises:
            ConfigError: the name is taken or empty, or adapters can't be used with this engine.
            ModelError: the adapter is damaged, of another model, or of a kind that kvq would run incorrectly.
        """
        if not name or not isinstance(name, str) or name in self.named:
            raise ConfigError(f"an adapter needs a name of its own, got {name!r}; unload the other one first")
        if self.model.geometry.vocab_size > _MOST_IDS:
            raise ConfigError(f"adapters need a vocabulary of at most {_MOST_IDS} tokens")
        if self.config.hand_over_to is not None or self.config.hand_over_listen is not None:
            raise ConfigError("requests with adapters can't be handed over; leave adapters or hand_over out")
        stored = self._read(name, Path(folder))
        self.named[name] = NamedAdapter(
            name=name, folder=Path(folder), digest=stored.digest, invocation=stored.config.invocation
        )
        self._hold(stored)
        _log.info("adapter %s: %d layers, from %s", name, len(stored.factors), folder)

    def unload(self, name: str) -> None:
        """Forget a name. Requests that have the adapter keep it.

        Raises:
            RequestError: there is no adapter of that name.
        """
        gone = self.find(name)
        del self.named[name]
        self._let_go(gone)

    def find(self, name: str) -> NamedAdapter:
        """Return the adapter of a name; raise RequestError if there is none."""
        if name not in self.named:
            raise RequestError(unknown("adapter", name, self.named))
        return self.named[name]

    def leave(self, job: Job) -> None:
        """Let go of the adapter of a job that has ended."""
        if job.adapter is not None:
            self._let_go(job.adapter)

    def of_step(self, plan: StepPlan) -> StepAdapters | None:
        """Return the adapters of a step's branches, or None if all are the base model's.

        Raises:
            ModelError: an adapter left memory, and its folder is gone or has changed.
        """
        jobs = [as_job(branch.request) for branch in plan.branches]
        used = {job.adapter.digest: job.adapter for job in jobs if job.adapter is not None}
        if not used:
            return None
        held, index = [self._take(named) for named in used.values()], {own: i for i, own in enumerate(used)}
        choices: list[int] = []
        counts: list[int] = []
        for job, new, end in zip(jobs, plan.counts, plan.ends, strict=True):
            base = new if job.adapter is None else min(new, max(0, job.adapted_from - (end - new)))
            choices += (-1, -1 if job.adapter is None else index[job.adapter.digest])
            counts += (base, new - base)
        if self._last is None or self._last[0] != (held, choices, counts):
            rows = np.repeat(np.array(choices, np.int32), counts)
            (chosen,) = upload_all([rows], self.model.weights.device)
            self._last = (held, choices, counts), StepAdapters(held, chosen)
        return self._last[1]

    def _read(self, name: str, folder: Path) -> StoredAdapter:
        return read_adapter(name, folder, adaptable(self.model.weights.model))

    def _take(self, named: NamedAdapter) -> Adapter:
        if named.digest not in self.held:
            stored = self._read(named.name, named.folder)
            if stored.digest != named.digest:
                raise ModelError(f"adapter {named.name!r}: files in {named.folder} have changed; unload it")
            self._hold(stored)
        self.held.move_to_end(named.digest)
        return self.held[named.digest]

    def _hold(self, stored: StoredAdapter) -> None:
        self.held[stored.digest] = place(stored, self.model.weights)
        while len(self.held) > self.config.max_adapters:
            self.held.popitem(last=False)
        self._last = None

    def _let_go(self, named: NamedAdapter) -> None:
        """Free an adapter's memory if no name and no job has it."""
        jobs = (job.adapter for core in self._cores for job in core.jobs)
        if all(user is None or user.digest != named.digest for user in (*self.named.values(), *jobs)):
            self.held.pop(named.digest, None)
            self._last = None
