"""What runs every day and what is left to the long run.

The C++ kernels for the CPU at hand run every case; Triton's interpreter, which is slow, the C++ kernels
for lesser CPUs, whose sources are the same, and the reference, which all are compared with, run a few of each
test.
"""

import math
from collections import defaultdict
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest

from tests.kernels.backends import EXACT_NAMES, NAMES

_IN_PART = {NAMES[0], *NAMES[2:], *EXACT_NAMES}
_HERE = Path(__file__).parent
# What joins two kinds: rotation and a scale per head, say.
_JOINED = {"fp32_rot", "bf16_rot", "fp8_per_head_rot", "int8_per_head_rot", "int4/bf16", "int4_g24"}
# Poison lies around the rows of every kind in its first test, too; of these each is held to this one.
_ONE_OF_EACH = {"fp32", "fp8", "int8", "int4"}
_OF_ONE_OF_EACH = "test_what_lies_in_free_blocks_past_the_end_and_in_unused_table_entries_changes_nothing"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what comes later."""
    cases = defaultdict(list)
    for item in items:
        own = [x for x in _params(item).values() if isinstance(x, str) and x in _IN_PART]
        if own and _HERE in item.path.parents:
            cases[item.nodeid.partition("[")[0], own[0]].append(item)
    for (_, backend), same in cases.items():
        values = _values(same)
        for item in same:
            is_later = backend == "triton" and (_is_later(item) or not _is_its_turn(item, values))
            if is_later or not _is_on_the_diagonal(item, values, len(same)):
                item.add_marker(pytest.mark.long)


def _is_on_the_diagonal(item: pytest.Item, values: list[list[str]], count: int) -> bool:  # D154
    """Of a product, one case for every value of the parameter with most; the others' take turns."""
    if not values or math.prod(map(len, values)) != count:
        return True
    at = [found.index(own) for found, own in zip(values, _own(item), strict=True)]
    turn = at[max(range(len(values)), key=lambda i: len(values[i]))]
    return all(own == turn % len(found) for own, found in zip(at, values, strict=True))


def _is_its_turn(item: pytest.Item, values: list[list[str]]) -> bool:
    """Of many values, every second in one test and the others in the next."""
    if not values:
        return True
    own, found = max(zip(_own(item), values, strict=True), key=lambda pair: len(pair[1]))
    return len(found) < 8 or (found.index(own) + crc32(item.originalname.encode())) % 2 == 0


def _values(items: list[pytest.Item]) -> list[list[str]]:
    """Of every parameter, as they come."""
    return [list(dict.fromkeys(column)) for column in zip(*map(_own, items), strict=True)]


def _own(item: pytest.Item) -> list[str]:
    """An item's values but for the implementation; those of parameters that are given together are one."""
    left = {name: repr(x) for name, x in _params(item).items() if not (isinstance(x, str) and x in _IN_PART)}
    together = [
        [name.strip() for name in names.split(",")] if isinstance(names, str) else names
        for names in (mark.args[0] for mark in item.iter_markers("parametrize"))
    ]
    joined = [str([left.pop(name) for name in names if name in left]) for names in together]
    return [*left.values(), *joined]


def _is_later(item: pytest.Item) -> bool:
    kv = _params(item).get("kv")
    only = _ONE_OF_EACH if item.name.partition("[")[0] == _OF_ONE_OF_EACH else None
    return kv in _JOINED or (kv is not None and only is not None and kv not in only)


def _params(item: pytest.Item) -> dict[str, Any]:
    spec = getattr(item, "callspec", None)
    return {} if spec is None else spec.params
