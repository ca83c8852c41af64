"""State of roll-outs: the weights and stopped versions in a small file beside the configuration.

`kvq rollout` and the server write it, and the server watches it. Every change is a line of the audit log.
"""

import fcntl
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kvq.errors import ConfigError, explained
from kvq.fileio import write_text
from kvq.server.models.config import Rollout

_VERSION = 1  # of the file's format


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutState:
    """Weights by name and version that replace those of the configuration, and stopped versions."""

    weights: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    stopped: tuple[str, ...] = ()

    def of(self, rollout: Rollout) -> dict[str, float]:
        """Return the weight of every version of a roll-out; that of a stopped version is 0."""
        own = self.weights.get(rollout.name, rollout.weights)
        return {one: 0.0 if one in self.stopped else own.get(one, 0.0) for one in rollout.weights}


class StateFile:
    """File of the state, and the audit log: CONFIG.rollout.json and CONFIG.audit.jsonl."""

    def __init__(self, config: Path) -> None:
        """`config`: the server's configuration file."""
        self.path = config.with_name(f"{config.name}.rollout.json")
        self.audit = config.with_name(f"{config.name}.audit.jsonl")

    def read(self) -> RolloutState:
        """Return the state; without a file, nothing differs from the configuration.

        Raises:
            ConfigError: the file can't be read, or is no state.
        """
        try:
            text = self.path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return RolloutState()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{self.path} can't be read: {error}") from error
        try:
            return _parsed(json.loads(text))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise ConfigError(
                f"{self.path} is no state of roll-outs ({error}); delete it to return to the configuration"
            ) from error

    def mark(self) -> object:
        """Return a value that changes with the file."""
        try:
            found = self.path.stat()
        except OSError:
            return None
        return found.st_mtime_ns, found.st_size, found.st_ino

    def set_weights(self, rollout: Rollout, weights: Mapping[str, float], by: str, reason: str) -> None:
        """Set the weights of a roll-out's versions. Versions that get a weight are no longer stopped.

        Raises:
            ConfigError: a file can't be read or written.
        """
        with self._changing() as (state, audit):
            running = tuple(one for one in state.stopped if not weights.get(one))
            after = RolloutState(weights={**state.weights, rollout.name: weights}, stopped=running)
            self._write(after)
            audit(by, "set", reason, _change(rollout, state, after))

    def fall_back(self, rollout: Rollout, version: str, reason: str) -> None:
        """Set the weight of one version to 0, as the server does. Raises ConfigError as `set_weights`."""
        with self._changing() as (state, audit):
            weights = {**state.weights.get(rollout.name, rollout.weights), version: 0.0}
            after = replace(state, weights={**state.weights, rollout.name: weights})
            self._write(after)
            audit("server", f"fall back from {version}", reason, _change(rollout, state, after))

    def stop(self, version: str, rollouts: Sequence[Rollout], by: str, reason: str) -> None:
        """Let a version get no new requests, under any name. Raises ConfigError as `set_weights`."""
        with self._changing() as (state, audit):
            after = replace(state, stopped=tuple(dict.fromkeys((*state.stopped, version))))
            self._write(after)
            own = [rollout for rollout in rollouts if version in rollout.weights]
            for change in [_change(rollout, state, after) for rollout in own] or [{}]:
                audit(by, f"stop {version}", reason, change)

    @contextmanager
    def _changing(self) -> Iterator[tuple[RolloutState, Callable[..., None]]]:
        """Yield the state, and a function that writes a line of the audit log; others wait meanwhile."""
        with (
            explained(ConfigError, f"can't write {self.audit}"),
            open(self.audit, "a", encoding="utf-8") as file,
        ):
            fcntl.flock(file, fcntl.LOCK_EX)

            def audit(by: str, what: str, reason: str, change: dict[str, Any]) -> None:
                time = datetime.now(UTC).isoformat(timespec="milliseconds")
                line = {"time": time, "by": by, "what": what, **change, "reason": reason}
                file.write(json.dumps(line) + "\n")
                file.flush()
                os.fsync(file.fileno())

            yield self.read(), audit

    def _write(self, state: RolloutState) -> None:
        write_text(self.path, json.dumps({"format_version": _VERSION, **asdict(state)}, indent=1) + "\n")


def _parsed(given: Any) -> RolloutState:
    if given["format_version"] != _VERSION:
        raise ValueError(f"format_version {given['format_version']!r}, and this kvq reads {_VERSION}")
    weights = {
        str(name): {str(one): float(weight) for one, weight in versions.items()}
        for name, versions in given["weights"].items()
    }
    if not all(0 <= weight <= 1e6 for versions in weights.values() for weight in versions.values()):
        raise ValueError("weights are 0 to 1,000,000")
    return RolloutState(weights=weights, stopped=tuple(map(str, given["stopped"])))


def _change(rollout: Rollout, before: RolloutState, after: RolloutState) -> dict[str, Any]:
    return {"name": rollout.name, "from": before.of(rollout), "to": after.of(rollout)}
