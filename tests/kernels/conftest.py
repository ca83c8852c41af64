"""What Triton's interpreter, which is slow, runs every day and what it leaves to the long run."""

from typing import Any

import pytest

from kvq.layout import BlockOrder

# Held to every promise under every order and window; of the other kinds one of each is.
_CORE = {"fp32", "fp8", "int8", "int4"}
# What joins two kinds: rotation and a scale per head, say.
_JOINED = {"fp32_rot", "bf16_rot", "fp8_per_head_rot", "int8_per_head_rot", "int4/bf16", "int4_g24"}
# Shapes that only INT4 has to hold every day.
_HEADS = {(4, 2), (3, 3), (8, 8), (16, 8)}
_DIMS = {(80, 80), (192, 128), (64, 256)}


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark what comes later."""
    params = getattr(item, "callspec", None) and item.callspec.params
    if params and "triton" in params.values() and "kv" in params and _is_later(params["kv"], params):
        item.add_marker(pytest.mark.long)


def _is_later(kv: str, params: dict[str, Any]) -> bool:
    if kv not in _CORE and (
        params.get("order") is BlockOrder.BLOCK_MAJOR or params.get("window") is not None
    ):
        return True
    if kv != "int4" and (params.get("heads") in _HEADS or params.get("dims") in _DIMS):
        return True
    return kv in _JOINED
