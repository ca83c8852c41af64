"""The guard of an engine: some finished requests are computed again without quantized KV, and compared.

Of a sampled request, a fork keeps the blocks as they were served. Two sessions compute its tokens again when
there is time: one without, one with quantized KV. Their next-token distributions tell what the formats cost
here; what was served, read back and divided by what unquantized KV holds, tells of each layer whether its
scales are right.
"""

import logging
from collections import deque
from collections.abc import Generator, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from math import exp, log, sqrt
from random import Random
from statistics import fmean, stdev
from time import perf_counter
from typing import Any

import torch

from kvq.blockmgr import BlockManager, Sequence
from kvq.cache.backend import CacheBackend
from kvq.cache.kv_cache import KVCache
from kvq.engine.config import EngineConfig
from kvq.errors import ConfigError, first_lines
from kvq.formats import KVRecipe
from kvq.models import Model, Session
from kvq.scheduler import Branch

_log = logging.getLogger("kvq")
_JUDGED = 64  # last tokens of a request whose predictions are compared
_CHUNK = 64  # tokens of a piece of work
_LEAST_TOKENS = 32  # of a request
_SCALE = 0.01  # a layer's values off by more than that are a fault
_LEARNED = 16  # requests that tell what is usual
_RECENT = 8  # requests that are compared with these
_SIGMAS = 5.0
_FACTOR = 1.5  # of the usual divergence
_LEAST_SPREAD = 0.1  # of logarithms
_SHARE = 0.01  # of the time of steps
_TENANTS = 64  # at most, whose divergence is told
_LEAST_FREE = 0.5  # of a pool's blocks while requests wait, or it gives up its own


@dataclass(kw_only=True, slots=True)
class _Totals:
    """Totals of a guard since the engine's start."""

    requests: int = 0
    failed: int = 0  # requests that could not be computed again
    tokens: int = 0  # whose predictions were compared
    kl: float = 0.0  # nats, their sum
    same: int = 0  # tokens whose likeliest successor is the same
    by_depth: dict[int, list[float]] = field(default_factory=dict)  # tokens, KL; by a depth's power of 2
    by_tenant: dict[str, list[float]] = field(default_factory=dict)  # the same of some tenants
    alerts: int = 0
    last_alert: str = ""
    layers: dict[str, float] = field(default_factory=dict)  # those off at last: served / computed again


def check_guard(recipe: KVRecipe, config: EngineConfig) -> None:
    """Raise ConfigError if a guard can't tell damage of these blocks from what is meant."""
    if not recipe.is_quantized:
        raise ConfigError(
            f"guard (--guard) compares with unquantized KV, and kv is {recipe.name}; leave one out"
        )
    if config.kv_ladder or config.kv_tier_format:
        raise ConfigError(
            "guard (--guard) takes blocks that were in fewer bits for damaged ones; leave out kv_ladder "
            "and kv_tier_format (--kv-ladder, --kv-tier-format), or guard"
        )


class Guard:
    """Guard of one engine. Only the engine's thread calls it."""

    def __init__(
        self, model: Model, manager: BlockManager, cache: CacheBackend, config: EngineConfig
    ) -> None:
        """Allocate what computing again takes. `manager`, `cache`: those that serve.

        Raises:
            ConfigError: the KV is not quantized.
            OutOfMemory: the pools of both sessions don't fit.
        """
        check_guard(model.recipe, config)
        if not isinstance(cache, KVCache):
            raise ConfigError("guard (--guard) needs kvq's own blocks; leave one of guard and cache out")
        self._manager, self._served, self._share = manager, cache, config.guard
        self._max_tokens = min(config.guard_tokens, model.prepared.max_context)
        self._plain, self._again = (
            one.session(max_tokens=self._max_tokens) for one in (model.with_kv("auto"), model)
        )
        self._layers = sorted(cache.group_of)  # those with K and V
        self._random = Random(0)
        self._work: Generator[None, None, None] | None = None  # of the request that is computed again
        self._allowed_s = 0.0
        self._means: list[float] = []  # logarithms of requests' mean KL
        self._usual = 0.0, 0.0  # mean of these, and the standard error of a difference from it
        self._window: deque[float] = deque(maxlen=_RECENT)
        self._is_drifting = False
        self.totals = _Totals()

    @property
    def is_busy(self) -> bool:
        return self._work is not None

    def sample(self, branch: Branch) -> None:
        """Keep a finished request, if it is drawn and no other one is being computed."""
        sequence = branch.sequence
        if self._random.random() >= self._share or self.is_busy or sequence is None:
            return
        tokens = list(branch.tokens[: min(sequence.committed, self._max_tokens)])
        if len(tokens) < _LEAST_TOKENS:
            return
        try:
            fork = self._manager.fork(sequence)
        except ConfigError:  # more tokens are under way
            return
        with suppress(ConfigError):  # not where its blocks were released
            self._manager.truncate(fork, len(tokens))
        self._work = self._compare(tokens, fork, branch.request.tenant)
        next(self._work)  # from now on, closing it frees the fork

    def make_room(self) -> None:
        """Give up the request that is being computed if others may need its blocks."""
        if self._work is not None and any(
            pool.free + pool.cached < _LEAST_FREE * pool.total for pool in self._manager.usage()
        ):
            self.close()

    def after_step(self, seconds: float) -> None:
        """Work for a small share of a step's `seconds`."""
        if self._work is not None:
            self._allowed_s += _SHARE * seconds
            if self._allowed_s > 0:
                self._allowed_s -= self._piece()

    def when_idle(self) -> bool:
        """Work for a short time. Return False if there is nothing to do."""
        if self._work is None:
            return False
        self._piece()
        return True

    def gauges(self) -> dict[str, Any]:
        """Return what was found so far, for metrics."""
        totals = self.totals
        found = {name: getattr(totals, name) for name in ("requests", "tokens", "same", "alerts")}
        found["kl"] = {
            str(1 << power): kl / tokens for power, (tokens, kl) in sorted(totals.by_depth.items())
        }
        return {f"guard_{name}": value for name, value in found.items()}

    def facts(self) -> dict[str, Any]:
        """Return the totals as JSON, and whether a request is being computed now."""
        tenants = {name: kl / tokens for name, (tokens, kl) in self.totals.by_tenant.items()}
        gauges = {name.removeprefix("guard_"): value for name, value in self.gauges().items()}
        more = {"failed": self.totals.failed, "last_alert": self.totals.last_alert}
        return (
            gauges | more | {"kl_by_tenant": tenants, "layers": self.totals.layers, "is_busy": self.is_busy}
        )

    def close(self) -> None:
        """Forget the request that is being computed."""
        if self._work is not None:
            self._work.close()
            self._work = None

    def _piece(self) -> float:
        """Run one piece of work; return its seconds."""
        began = perf_counter()
        assert self._work is not None, "asked before"
        try:
            next(self._work)
        except StopIteration:
            self._work = None
        except Exception as error:  # noqa: BLE001 - what it computes for itself must not stop the steps
            _log.warning("the guard could not compute a request again: %s", first_lines(error))
            self.totals.failed += 1
            self._work = None
        return perf_counter() - began

    def _compare(self, tokens: list[int], fork: Sequence, tenant: str) -> Generator[None, None, None]:
        """Compute a request again in pieces, then count what was found."""
        pair = [(session, session.new_sequence()) for session in (self._plain, self._again)]
        try:
            yield
            judged = max(1, len(tokens) - _JUDGED)
            for at in range(0, judged, _CHUNK):
                for session, sequence in pair:
                    session.forward([(sequence, tokens[at : min(at + _CHUNK, judged)])])[0].trusted_logits()
                    yield
            found = []
            for session, sequence in pair:
                logits = session.forward([(sequence, tokens[judged:])], all_rows=True)[0].trusted_logits()
                found.append(torch.log_softmax(logits, dim=-1))  # [tokens, vocab]
                yield
            kl = (found[0].exp() * (found[0] - found[1])).sum(-1)
            same = int((found[0].argmax(-1) == found[1].argmax(-1)).sum())
            yield from self._check_layers(fork, pair)
            self._count(len(tokens), tenant, kl.tolist(), same)
        finally:
            for session, sequence in pair:
                session.free(sequence)
            self._manager.free(fork)

    def _check_layers(  # D411: ratios to blocks computed again
        self, fork: Sequence, pair: list[tuple[Session, Sequence]]
    ) -> Iterator[None]:
        """Compare each layer's blocks as served with those computed again, both beside unquantized ones."""
        end = (min(fork.committed, self._max_tokens) - self._manager.blocks.lag) // self._manager.block_size
        off: dict[str, float] = {}
        (plain, plain_sequence), (again, again_sequence) = pair
        read: Any = ((self._served, fork), (again.cache, again_sequence), (plain.cache, plain_sequence))
        for layer in self._layers:
            first = max(sequence.starts[cache.group_of[layer]] for cache, sequence in read)
            if first >= end:
                continue
            served, computed, wanted = (_rows(cache, own, layer, first, end) for cache, own in read)
            for part, a, b, true in zip("kv", served, computed, wanted, strict=True):
                ratio = float((a * true).sum() / (b * true).sum())
                if not abs(ratio - 1) <= _SCALE:
                    off[f"layer {layer} {part}"] = ratio
            yield
        self.totals.layers = off
        if off:
            worst = max(off, key=lambda name: abs(off[name] - 1))
            self._alert(
                f"KV of {worst} is {off[worst]:.3f} times what it should be"
                + (f", and {len(off) - 1} more are off" if len(off) > 1 else "")
            )

    def _count(self, depth: int, tenant: str, kl: list[float], same: int) -> None:
        totals, total = self.totals, sum(kl)
        totals.requests += 1
        totals.tokens += len(kl)
        totals.kl += total
        totals.same += same
        parts = [totals.by_depth.setdefault(depth.bit_length() - 1, [0, 0.0])]
        if tenant in totals.by_tenant or len(totals.by_tenant) < _TENANTS:
            parts.append(totals.by_tenant.setdefault(tenant, [0, 0.0]))
        for sums in parts:
            sums[0] += len(kl)
            sums[1] += total
        self._compared(log(max(total / len(kl), 1e-9)))

    def _compared(self, mean: float) -> None:
        """Alert if recent requests diverge more than the first ones did. `mean`: logarithm of a request's."""
        if len(self._means) < _LEARNED:
            self._means.append(mean)
            if len(self._means) == _LEARNED:
                error = max(stdev(self._means), _LEAST_SPREAD) * sqrt(1 / _RECENT + 1 / _LEARNED)
                self._usual = fmean(self._means), error
            return
        self._window.append(mean)
        if len(self._window) < _RECENT:
            return
        usual, spread = self._usual
        more, limit = fmean(self._window) - usual, max(log(_FACTOR), _SIGMAS * spread)
        if more > limit and not self._is_drifting:
            self._alert(
                f"the last {_RECENT} requests diverge {exp(more):.1f} times as much from unquantized KV as "
                f"the first {_LEARNED}"
            )
        self._is_drifting = more > (limit / 2 if self._is_drifting else limit)

    def _alert(self, words: str) -> None:
        self.totals.alerts += 1
        self.totals.last_alert = words
        _log.error("guard: %s", words)


def _rows(
    cache: Any, sequence: Sequence, layer: int, first: int, end: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return K and V of whole blocks [first, end), fp32."""
    device = cache.pool(0).device
    tables = torch.tensor([sequence.tables[cache.group_of[layer]][:end]], device=device)
    size = cache.layout.block_size
    k, v = cache.gather(layer, tables, first * size, end * size, unrotate=True)
    return k.float(), v.float()


def make_guard(core: Any) -> Guard | None:
    """Return the guard of an `EngineCore`, or None if it has none.

    Raises:
        ConfigError: the KV is not quantized.
    """
    if not core.config.guard:
        return None
    return Guard(core.model, core.scheduler.manager, core.runner.cache, core.config)
