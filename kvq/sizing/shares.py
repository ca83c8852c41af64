"""Shares of a device's memory for several engines: given ones first, then as many users for each other."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvq.errors import OutOfMemory
from kvq.sizes import binary
from kvq.sizing.pools import pool_budget


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineNeed:
    """Memory that an engine takes, in bytes."""

    name: str
    fixed_bytes: int  # weights, activations of a step, and the process
    user_bytes: int  # KV of one user
    most_bytes: int  # KV that all sequences together can use
    total_bytes: int | None = None  # given: everything together
    kv_bytes: int | None = None  # given: KV


def divide_memory(needs: Sequence[EngineNeed], free_bytes: int, *, on_gpu: bool) -> list[int]:  # D428
    """Return the bytes of KV for each engine.

    An engine without a given share gets KV for as many users as each of the others without one, or less if it
    can't use that. Together they get what one engine would take by default of the memory that is left.

    Raises:
        OutOfMemory: the given shares and the weights don't fit, or a given share leaves nothing for KV.
    """
    found: dict[str, int] = {}
    for need in needs:
        if need.kv_bytes is not None:
            found[need.name] = need.kv_bytes
        elif need.total_bytes is not None:
            found[need.name] = min(need.most_bytes, need.total_bytes - need.fixed_bytes)
            if found[need.name] <= 0:
                raise OutOfMemory(
                    f"memory of {need.name} is {binary(need.total_bytes)}; weights, activations and the "
                    f"process take {binary(need.fixed_bytes)} of it, which leaves nothing for KV"
                )
    taken = sum(need.fixed_bytes + found.get(need.name, 0) for need in needs)
    if taken > free_bytes:
        each = ", ".join(f"{one.name} {binary(one.fixed_bytes + found.get(one.name, 0))}" for one in needs)
        raise OutOfMemory(f"the models take more than the {binary(free_bytes)} that are free: {each}")
    left = max(0, pool_budget(free_bytes - taken, activation_bytes=0, on_gpu=on_gpu))
    rest = sorted(
        (need for need in needs if need.name not in found), key=lambda need: need.most_bytes / need.user_bytes
    )
    for at, need in enumerate(rest):  # those that can use least come first
        part = need.user_bytes / sum(one.user_bytes for one in rest[at:])
        found[need.name] = min(need.most_bytes, int(left * part))
        left -= found[need.name]
    return [found[need.name] for need in needs]
