"""State of roll-outs: the weights and stopped versions in a small file beside the configuration.

`kvq rollout` and the server write it, and the server watches it. Every change is a line of the audit log.
"""

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

import msgspec
from msgspec.structs import replace

from kvq.errors import ConfigError, explained
from kvq.fileio import write_bytes
from kvq.server.models.config import Rollout, Weight


class RolloutState(msgspec.Struct, frozen=True, kw_only=True):
    """Weights by name and version that replace those of the configuration, and stopped versions."""

    format_version: Literal[1] = 1
    weights: dict[str, dict[str, Weight]] = {}
    stopped: list[str] = []

    def of(self, name: str, rollout: Rollout) -> dict[str, float]:
        """Return the weight of every version of a roll-out; that of a stopped version is 0."""
        own = self.weights.get(name, rollout.weights)
        return {one: 0.0 if one in self.stopped else own.get(one, 0.0) for one in rollout.weights}


class StateFile:  # D427: a file that is watched, not a route: no client's key can change it
    """File of the state, and the audit log: CONFIG.rollout.json and CONFIG.audit.jsonl."""

    def __init__(self, config: Path, rollouts: Mapping[str, Rollout]) -> None:
        """`config`: the server's configuration file, with these roll-outs."""
        self.path = config.with_name(f"{config.name}.rollout.json")
        self.audit = config.with_name(f"{config.name}.audit.jsonl")
        self._rollouts = rollouts

    def read(self) -> RolloutState:
        """Return the state; without a file, nothing differs from the configuration.

        Raises:
            ConfigError: the file can't be read, or is no state.
        """
        try:
            return msgspec.json.decode(self.path.read_bytes(), type=RolloutState)
        except FileNotFoundError:
            return RolloutState()
        except (OSError, msgspec.MsgspecError) as error:
            raise ConfigError(f"{self.path}: {error}; delete it to return to the configuration") from error

    def mark(self) -> object:
        """Return a value that changes with the file."""
        try:
            found = self.path.stat()
        except OSError:
            return None
        return found.st_mtime_ns, found.st_size, found.st_ino

    def set_weights(self, name: str, weights: Mapping[str, float], by: str, reason: str) -> None:
        """Set the weights of some of a roll-out's versions. Those that get a weight are no longer stopped.

        Raises:
            ConfigError: a file can't be read or written.
        """
        with self._locked() as state:
            own = {**state.weights.get(name, self._rollouts[name].weights), **weights}
            stopped = [one for one in state.stopped if not weights.get(one)]
            after = replace(state, weights={**state.weights, name: own}, stopped=stopped)
            self._write(state, after, {"by": by, "what": f"set {name}", "reason": reason})

    def stop(self, version: str, by: str, reason: str) -> None:
        """Let a version get no new requests, under any name. Raises ConfigError as `set_weights`."""
        with self._locked() as state:
            after = replace(state, stopped=[*dict.fromkeys([*state.stopped, version])])
            self._write(state, after, {"by": by, "what": f"stop {version}", "reason": reason})

    @contextmanager
    def _locked(self) -> Iterator[RolloutState]:
        """Yield the state, and let other processes wait before they change it."""
        with explained(ConfigError, f"can't write {self.audit}"), open(self.audit, "ab") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield self.read()

    def _write(self, before: RolloutState, after: RolloutState, why: dict[str, str]) -> None:
        """Write a line about the weights that changed to the audit log, and the state."""
        weights = [
            {name: one.of(name, own) for name, own in self._rollouts.items()} for one in (before, after)
        ]
        changed = [name for name in self._rollouts if weights[0][name] != weights[1][name]]
        both = {
            key: {name: one[name] for name in changed}
            for key, one in zip(("from", "to"), weights, strict=True)
        }
        line = {"time": datetime.now(UTC).isoformat(timespec="milliseconds"), **why, **both}
        with open(self.audit, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
            file.flush()
            os.fsync(file.fileno())
        write_bytes(self.path, msgspec.json.format(msgspec.json.encode(after), indent=1) + b"\n")
