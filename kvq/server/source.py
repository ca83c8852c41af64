"""Where the values of metrics come from when somebody asks."""

from collections import Counter
from collections.abc import Mapping

from kvq.server.messages import Gauges, Ready, Stepped
from kvq.server.remote import Remote, State
from kvq.server.residency import BlockTimes
from kvq.version import __version__

Value = float | Mapping[tuple[str, ...], float]  # one, or by the values of labels
_OF_GAUGES = (
    *("preemptions", "prompt_tokens", "cached_tokens"),
    *("generated_tokens", "evictions", "refused_pins"),
)
_OF_RECEIPTS = ("recomputed_tokens", "swapped_blocks")
_OF_POOLS = ("free", "cached", "live")


class Source:
    """The engine as its last step left it, and totals since the server's start: those never fall."""

    def __init__(self, model: str, remote: Remote) -> None:
        """`model`: as clients name it."""
        self.model = model
        self.block_times = BlockTimes()
        self._remote = remote
        self._before: Counter[str] = Counter()  # of the engine's lives that ended; of receipts, all
        self._now: dict[str, int] = {}  # of its present one
        self._life = 0

    def take(self, stepped: Stepped) -> None:
        """Add what a step counted."""
        if self._life != self._remote.num_restarts:
            self._before.update(self._now)
            self._life = self._remote.num_restarts
        self._now = {name: getattr(stepped.gauges, name) for name in _OF_GAUGES}
        for ended in stepped.ended:
            if ended.receipt is not None:
                for name in _OF_RECEIPTS:
                    self._before[name] += getattr(ended.receipt, name)
        if stepped.block_times is not None:
            self.block_times.add(stepped.block_times)

    def total(self, name: str) -> int:
        """The engine's `restarts`, or of what is counted in gauges and receipts."""
        if name == "restarts":
            return self._remote.num_restarts
        return self._before[name] + self._now.get(name, 0)

    def read(self) -> dict[str, Value]:
        """What is known now of the server and its engine."""
        info, is_ready = self._remote.info, self._remote.state is State.READY
        found: dict[str, Value] = {"version": {(__version__,): 1}, "is_ready": is_ready}
        if info is not None:
            numbers = (info.shape.block_size, info.max_context, info.scheduler.max_num_seqs)
            found["engine"] = {(self.model, ",".join(dict.fromkeys(info.kv)), *map(str, numbers)): 1}
            if is_ready and self._remote.gauges is not None:
                found |= _of_gauges(self._remote.gauges, info)
        return found


def _of_gauges(gauges: Gauges, info: Ready) -> dict[str, Value]:
    groups = [str(group) for group in range(len(gauges.pools))]
    pools = list(zip(groups, gauges.pools, info.kv, info.block_bytes, strict=True))
    kv_bytes: Counter[tuple[str, ...]] = Counter()
    for _, pool, kv, size in pools:
        for state in _OF_POOLS:
            kv_bytes[kv, state] += getattr(pool, state) * size
    live_bytes = sum(held for (_, state), held in kv_bytes.items() if state == "live")
    gpus = {
        name.removeprefix("cuda:"): held for name, held in gauges.memory.items() if name.startswith("cuda:")
    }
    return {
        "running": gauges.running,
        "depth": gauges.waiting + gauges.preempted,  # without blocks
        "queued_tokens": gauges.queued_tokens,
        "requests": {(state,): getattr(gauges, state) for state in ("running", "waiting", "preempted")},
        "blocks": {(group, state): getattr(pool, state) for group, pool, *_ in pools for state in _OF_POOLS},
        "pinned": {(group,): count for group, count in zip(groups, gauges.pinned, strict=True)},
        "pool_bytes": {(group, kv): pool.total * size for group, pool, kv, size in pools},
        "kv_bytes": kv_bytes,
        "kv_use": live_bytes / sum(pool.total * size for _, pool, _, size in pools),
        "memory": {(device,): held for device, held in gauges.memory.items()},
        "gpu_memory": {(gpu,): held for gpu, held in gpus.items()},
    }
