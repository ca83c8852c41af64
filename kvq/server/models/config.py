"""Configuration of a server of several models: the `models` and `rollouts` of its file, checked."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from kvq.errors import ConfigError, unknown
from kvq.server.admission.config import ServerConfig

T = TypeVar("T")
_Name = Annotated[str, Meta(pattern="^[!-~]{1,128}$")]  # it may stand in a header
_Share = Annotated[float, Meta(gt=0, le=1)]
_Count = Annotated[int, Meta(gt=0, le=10_000)]
_Seconds = Annotated[float, Meta(gt=0, le=1e6)]
Weight = Annotated[float, Meta(ge=0, le=1e6)]


class _Part(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Mapping in the file."""


class ModelEntry(_Part, frozen=True):
    """One of the `models`: what the server adds to a model's options of `kvq serve`."""

    name: _Name
    start: Literal["eager", "lazy"] = "eager"  # with the server, or with the first request
    idle_s: _Seconds | None = None  # without requests, after which the engine is stopped; None: never
    memory: str | _Share | None = None  # size or share of the free memory, for weights, KV and the process


class Shadow(_Part, frozen=True):
    """Version that gets copies of a share of the requests; its answers are compared, never shown."""

    model: _Name
    share: _Share


class Limits(_Part, frozen=True):
    """Limits of a version within `window_s`; past one of them, it gets no new requests. None: no limit."""

    errors: _Share | None = 0.1  # share of requests that failed at the server or were refused
    ttft_ratio: Annotated[float, Meta(gt=1)] | None = None  # p95 of its TTFT / that of the other versions
    guard_alerts: _Count | None = 1
    window_s: _Seconds = 60.0
    least: _Count = 20  # requests of a version before its share of errors or its TTFT counts


class _Version(_Part, frozen=True):
    model: _Name
    weight: Weight


class Rollout(_Part, frozen=True):
    """Name for clients that leads to versions, which are names of models, by weight."""

    versions: Annotated[list[_Version], Meta(min_length=1)]
    shadow: Shadow | None = None
    fall_back: Limits | None = None

    @property
    def weights(self) -> dict[str, float]:
        """Weights by version, in the file's order."""
        return {one.model: one.weight for one in self.versions}


@dataclass(frozen=True, kw_only=True, slots=True)
class HostedModel:
    """A model's entry and all of its options."""

    entry: ModelEntry
    config: ServerConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelsConfig:
    """Server of several models: what they share, in `server`, their own options, and the roll-outs."""

    path: Path  # of the file; the state of roll-outs lies beside it
    server: ServerConfig
    models: tuple[HostedModel, ...]
    rollouts: Mapping[str, Rollout]


def read_entries(path: Path, given: object) -> list[tuple[ModelEntry, dict[str, Any]]]:
    """Return the `models` of a file, each with its options of `kvq serve`.

    Raises:
        ConfigError: an entry has no name or model, the name of another one, or a value out of range.
    """
    found = []
    for one in _converted(given or [], list[dict[str, Any]], f"{path}: models"):
        options = _underscored(one)
        own = {key: options.pop(key) for key in ModelEntry.__struct_fields__ if key in options}
        entry = _converted(own, ModelEntry, f"{path}: models")
        if "model" not in options:
            raise ConfigError(f"{path}: {entry.name} has no model; name its folder, such as model: ./llama")
        found.append((entry, options))
    if not found:
        raise ConfigError(f"{path} lists no models; give each a name and a model")
    return found


def read_rollouts(
    path: Path, given: object, models: Sequence[str], aliases: Sequence[str] = ()
) -> dict[str, Rollout]:
    """Return the `rollouts` of a file by name. `models`: names of its models; `aliases`: further ones.

    Raises:
        ConfigError: a name is not unique, a version is no model, a field is unknown or a value out of range.
    """
    what = f"{path}: rollouts"
    rollouts = {
        name: _converted(_underscored(one), Rollout, f"{what}.{name}")
        for name, one in _converted(given or {}, dict[_Name, Any], what).items()
    }
    for name, rollout in rollouts.items():
        versions = [one.model for one in rollout.versions]
        for version in (*versions, *([] if rollout.shadow is None else [rollout.shadow.model])):
            if version not in models:
                raise ConfigError(f"{what}.{name}: {unknown('model', version, models)}")
        if len(set(versions)) < len(versions):
            raise ConfigError(f"{what}.{name}: a version is there twice; give it one weight")
        check_weights(rollout.weights, f"{what}.{name}")
    names = [*models, *aliases, *rollouts]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ConfigError(f"{path}: {min(twice)} names two models or roll-outs")
    return rollouts


def check_weights(weights: Mapping[str, float], where: str) -> None:
    """Raise ConfigError if no version has a weight."""
    if not any(weights.values()):
        raise ConfigError(f"{where}: no version has a weight above 0, so none would get requests")


def _underscored(given: Any) -> Any:
    """Return a value with underscores in the keys of its mappings."""
    if isinstance(given, dict):
        return {str(key).replace("-", "_"): _underscored(value) for key, value in given.items()}
    return [*map(_underscored, given)] if isinstance(given, list) else given


def _converted(given: object, kind: Any, where: str) -> Any:
    try:
        return msgspec.convert(given, kind)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}: {error}") from error
