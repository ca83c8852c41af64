"""Configuration of a server of several models: the `models` and `rollouts` of its file, checked."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any

from kvq.errors import ConfigError, unknown
from kvq.server.admission.config import ServerConfig
from kvq.sizes import parse_bytes

EAGER, LAZY = "eager", "lazy"
APART = ("models", "rollouts")  # keys of the file that are not options of the command


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelEntry:
    """One of the `models` in the file: what the server adds to a model's options of `kvq serve`."""

    name: str
    start: str = EAGER  # with the server, or lazy: with the first request
    idle_s: float | None = None  # after which the engine is stopped; None: never
    memory: str | float | None = None  # size or share of the free memory, for weights, KV and the process

    def __post_init__(self) -> None:
        if self.start not in (EAGER, LAZY):
            raise ConfigError(f"start of {self.name} must be {EAGER} or {LAZY}, got {self.start!r}")
        if self.idle_s is not None and not _number(self.idle_s, 0, 1e9):
            raise ConfigError(f"idle_s of {self.name} must be seconds above 0, got {self.idle_s!r}")
        if self.memory is not None and not _number(self.memory, 0, 1):
            if not isinstance(self.memory, str):
                raise ConfigError(
                    f"memory of {self.name} must be a size such as 8GiB, or a share of the free memory above "
                    f"0 and at most 1; got {self.memory!r}"
                )
            parse_bytes(self.memory, f"memory of {self.name}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Shadow:
    """Version that gets copies of a share of the requests; its answers are compared, never shown."""

    model: str
    share: float

    def __post_init__(self) -> None:
        if not _number(self.share, 0, 1):
            raise ConfigError(f"share of a shadow must be above 0 and at most 1, got {self.share!r}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Limits of a version within `window_s`; past one of them, it gets no new requests. None: no limit."""

    errors: float | None = 0.1  # share of requests that failed at the server or were refused
    ttft_ratio: float | None = None  # 95th percentile of its TTFT / that of the other versions
    guard_alerts: int | None = 1
    window_s: float = 60.0
    least: int = 20  # requests of a version before its share of errors or its TTFT counts

    def __post_init__(self) -> None:
        highest = {"errors": 1.0, "ttft_ratio": 1e6, "guard_alerts": 1e6, "window_s": 86_400.0, "least": 1e6}
        for name, most in highest.items():
            value = getattr(self, name)
            if value is None and name not in ("window_s", "least"):
                continue
            if not _number(value, 0, most) or (name in ("least", "guard_alerts") and type(value) is not int):
                raise ConfigError(f"{name} of fall_back must be above 0 and at most {most:g}, got {value!r}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Rollout:
    """Name for clients that leads to versions, which are names of models, by weight."""

    name: str
    weights: Mapping[str, float]  # by version, in the file's order
    shadow: Shadow | None = None
    fall_back: Limits | None = None


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
    rollouts: tuple[Rollout, ...] = field(default=())


def read_entries(path: Path, given: object) -> list[tuple[ModelEntry, dict[str, Any]]]:
    """Return the `models` of a file, each with its options of `kvq serve`.

    Raises:
        ConfigError: an entry is no mapping, has no name, or has the name of another one.
    """
    if not isinstance(given, list) or not given or not all(isinstance(one, dict) for one in given):
        raise ConfigError(f"{path}: models is a list of mappings, each with name and model")
    own = {one.name for one in fields(ModelEntry)}
    entries = []
    for one in given:
        options = {str(key).replace("-", "_"): value for key, value in one.items()}
        entry = _made(ModelEntry, {key: options.pop(key) for key in own & options.keys()}, f"{path}: models")
        if "model" not in options:
            raise ConfigError(f"{path}: {entry.name} has no model; name its folder, such as model: ./llama")
        entries.append((entry, options))
    _check_names(path, [entry.name for entry, _ in entries])
    return entries


def read_rollouts(path: Path, given: object, models: Iterable[str]) -> tuple[Rollout, ...]:
    """Return the `rollouts` of a file. `models`: names of its models.

    Raises:
        ConfigError: a roll-out has unknown fields or versions, or no version with a weight.
    """
    if given is None:
        return ()
    models = list(models)
    if not isinstance(given, dict):
        raise ConfigError(f"{path}: rollouts maps names to versions, got a {type(given).__name__}")
    _check_names(path, [*models, *given])
    return tuple(_rollout(f"{path}: rollouts.{name}", name, one, models) for name, one in given.items())


def _rollout(where: str, name: str, given: Any, models: list[str]) -> Rollout:
    values = _fields(where, given, ("versions", "shadow", "fall_back"))
    versions = values.get("versions")
    if not isinstance(versions, list) or not versions:
        raise ConfigError(f"{where}.versions is a list of mappings, each with model and weight")
    weights: dict[str, float] = {}
    for one in versions:
        version = _fields(f"{where}.versions", one, ("model", "weight"))
        model, weight = version.get("model"), version.get("weight")
        if model not in models:
            raise ConfigError(f"{where}: {unknown('model', model, models)}")
        if model in weights:
            raise ConfigError(f"{where}: {model} is there twice; give it one weight")
        weights[model] = check_weight(weight, f"{where}: weight of {model}")
    check_weights(weights, where)
    kinds: dict[str, Callable[..., Any]] = {"shadow": Shadow, "fall_back": Limits}
    made = {
        key: None if values.get(key) is None else _made(kind, values[key], f"{where}.{key}")
        for key, kind in kinds.items()
    }
    if made["shadow"] is not None and made["shadow"].model not in models:
        raise ConfigError(f"{where}.shadow: {unknown('model', made['shadow'].model, models)}")
    return Rollout(name=name, weights=weights, **made)


def check_weight(weight: object, what: str) -> float:
    """Return a weight as a float; raise ConfigError unless it is a number of 0 to a million."""
    if weight == 0 or _number(weight, 0, 1e6):
        return float(weight)  # type: ignore[arg-type]
    raise ConfigError(f"{what} must be a number of 0 to 1,000,000, got {weight!r}")


def check_weights(weights: Mapping[str, float], where: str) -> None:
    """Raise ConfigError if no version has a weight."""
    if not any(weights.values()):
        raise ConfigError(f"{where}: no version has a weight above 0, so none would get requests")


def _number(value: object, above: float, most: float) -> bool:
    return type(value) in (int, float) and above < value <= most  # type: ignore[operator]


def _check_names(path: Path, names: list[Any]) -> None:
    for name in names:
        if not isinstance(name, str) or not name or not name.isprintable() or not name.isascii():
            raise ConfigError(f"{path}: a name is a printable ASCII text, got {name!r}")
        if names.count(name) > 1:
            raise ConfigError(f"{path}: {name} names two things; every model and roll-out has its own name")


def _fields(where: str, given: Any, known: Iterable[str]) -> dict[str, Any]:
    """Return a mapping with underscores in its keys; raise ConfigError for unknown keys."""
    known = list(known)
    if not isinstance(given, dict):
        raise ConfigError(f"{where} is a mapping with {', '.join(known)}, got {given!r:.60}")
    found = {str(key).replace("-", "_"): value for key, value in given.items()}
    for key in found.keys() - set(known):
        raise ConfigError(f"{where}: {unknown('key', key, known)}")
    return found


def _made(kind: Callable[..., Any], given: Any, where: str) -> Any:
    """Return a `kind` made from a mapping of its fields."""
    own = fields(kind)  # type: ignore[arg-type]
    values = _fields(where, given, [one.name for one in own])
    if lacking := [one.name for one in own if one.default is MISSING and one.name not in values]:
        raise ConfigError(f"{where} needs {' and '.join(lacking)}")
    return kind(**values)
