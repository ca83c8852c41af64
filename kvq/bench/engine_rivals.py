"""The rivals of `kvq bench engine`, opened and checked; one that can't run here says why."""

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

from kvq.bench.engine_check import compare, one_by_one
from kvq.bench.engine_continuous import ContinuousBatching
from kvq.bench.engine_hf import StaticBatches, load_rival, own_format
from kvq.bench.engine_load import LoadRequest
from kvq.bench.engine_result import Server
from kvq.bench.engine_server import KvqServer, Limits
from kvq.models import Model

RIVALS = {rival.name: rival for rival in (StaticBatches, ContinuousBatching)}


@dataclass(slots=True)
class Opened:
    """Servers that run, what their checks found, and rows of rivals that don't run."""

    servers: list[Server] = field(default_factory=list)
    checks: dict[tuple[str, str], dict[str, Any]] = field(default_factory=dict)
    refused: list[dict[str, Any]] = field(default_factory=list)

    def add(self, server: Server, check: dict[str, Any]) -> None:
        """A server that runs."""
        self.servers.append(server)
        self.checks[server.name, server.kv] = check


def open_rivals(
    opened: Opened, names: Sequence[str], model: Model, limits: Limits, requests: Sequence[LoadRequest]
) -> None:
    """Load the model as transformers runs it and compare each rival with kvq over KV of the same type.

    `requests`: a few, to check with.

    Raises:
        EngineError: a rival gives tokens that rounding doesn't explain.
    """
    with closing(KvqServer(model, "auto", Limits(), requests)) as server:
        alone = one_by_one(server, requests)
    loaded = load_rival(model)
    for name in names:
        try:
            rival = RIVALS[name](loaded, limits, model.layout.block_size)
            tokens = rival.generate(requests)
            if isinstance(rival, ContinuousBatching):
                rival.choose_attention(requests)
        except Exception as error:  # noqa: BLE001 - somebody else's engine; its row says why
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            opened.refused.append({"name": name, "kv": own_format(loaded), "reason": reason})
            continue
        check = compare(name, model, alone, tokens)
        if isinstance(rival, ContinuousBatching):
            check["attention"] = rival.attention
        opened.add(rival, check)
