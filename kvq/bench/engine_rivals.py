"""The rivals of `kvq bench engine`, opened and checked; one that can't run here says why."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kvq.bench.engine_check import compare, one_by_one
from kvq.bench.engine_continuous import ContinuousBatching
from kvq.bench.engine_hf import load_rival, own_format
from kvq.bench.engine_load import LoadRequest
from kvq.bench.engine_result import refused_row
from kvq.bench.engine_server import KvqServer, Limits
from kvq.bench.engine_static import StaticBatches
from kvq.engine import CompletionOutput
from kvq.models import Model

RIVALS = ("hf-static", "hf-continuous")
Rival = StaticBatches | ContinuousBatching


@dataclass(slots=True)
class OpenRivals:
    """Those that run, what their checks found, and rows of those that don't."""

    servers: list[Rival] = field(default_factory=list)
    checks: dict[tuple[str, str], dict[str, Any]] = field(default_factory=dict)
    refused: list[dict[str, Any]] = field(default_factory=list)


def open_rivals(
    names: Sequence[str], model: Model, limits: Limits, requests: Sequence[LoadRequest]
) -> OpenRivals:
    """Load the model as transformers runs it and compare each rival with kvq over KV of the same type.

    `requests`: a few, to check with.

    Raises:
        EngineError: a rival gives tokens that rounding doesn't explain.
    """
    found = OpenRivals()
    if not names:
        return found
    alone = _reference(model, requests)
    loaded = load_rival(model)
    for name in names:
        try:
            rival = _make(name, loaded, limits, model.layout.block_size)
            tokens = rival.generate(requests)
            if isinstance(rival, ContinuousBatching):
                rival.choose_attention(requests)
        except Exception as error:  # noqa: BLE001 - somebody else's engine; its row says why
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            found.refused.append(refused_row(name, own_format(loaded), reason))
            continue
        check = compare(name, model, alone, tokens)
        if isinstance(rival, ContinuousBatching):
            check["attention"] = rival.attention
        found.checks[name, rival.kv] = check
        found.servers.append(rival)
    return found


def _reference(model: Model, requests: Sequence[LoadRequest]) -> list[CompletionOutput]:
    """What kvq gives one by one over unquantized KV."""
    server = KvqServer(model, "auto", Limits(), requests)
    try:
        return one_by_one(server, requests)
    finally:
        server.close()


def _make(name: str, loaded: Any, limits: Limits, block_size: int) -> Rival:
    if name == "hf-static":
        return StaticBatches(loaded, limits)
    return ContinuousBatching(loaded, limits, block_size)
