"""Events: complete, in order, without token ids, and no listener can do harm."""

import logging
from collections.abc import Callable
from dataclasses import fields

import pytest

from kvq.blockmgr import Copy, Event, Evicted, Stored
from tests.blockmgr.helpers import cache, compute, hit, manager, run


def test_a_life_of_a_block_is_told_in_order() -> None:
    blocks = manager(3)
    seen: list[Event] = []
    blocks.subscribe(seen.append)
    sequence = run(blocks, range(4))
    prompt = blocks.prompt(range(4))
    first, second = (blocks.blocks.index.digest_at(prompt, i) for i in range(2))
    assert seen == [
        Stored(group=0, block=0, digest=first, parent=prompt.root),
        Stored(group=0, block=1, digest=second, parent=first),
    ]
    seen.clear()
    blocks.truncate(sequence, 3)
    blocks.append([(sequence, 1)])
    assert [type(event) for event in seen] == [Copy]
    seen.clear()
    blocks.free(sequence)
    assert seen == []
    blocks.drop_cached()
    assert seen == [Evicted(group=0, block=1, digest=second), Evicted(group=0, block=0, digest=first)]
    seen.clear()
    run(blocks, range(4))
    assert [event.digest for event in seen if isinstance(event, Stored)] == [first, second]


def test_evictions_are_told_by_the_operation_that_caused_them() -> None:
    blocks = manager(4)
    cache(blocks, range(8))
    seen: list[Event] = []
    blocks.subscribe(seen.append)
    for operation in (
        lambda: blocks.append([(blocks.new_sequence(), 2)]),
        lambda: blocks.extend([(blocks.new_sequence(), 2)]),
        lambda: blocks.adopt(blocks.prompt([7, 7]), 2),
    ):
        seen.clear()
        operation()
        assert [type(event) for event in seen] == [Evicted]


def test_a_part_copied_at_start_is_told() -> None:
    blocks = manager(4, 4, windows=[None, None])
    cache(blocks, range(2))
    seen: list[Event] = []
    blocks.subscribe(seen.append)
    sequence = blocks.start(blocks.prompt([0, 9, 9]))
    assert seen == [Copy(group=g, source=0, target=sequence.tables[g][0]) for g in range(2)]


def test_events_carry_no_token_ids() -> None:
    for kind in (Stored, Evicted, Copy):
        names = {field.name for field in fields(kind)}
        assert names <= {"group", "block", "digest", "parent", "source", "target"}


def test_a_subscriber_that_raises_is_dropped_and_the_others_go_on(caplog: pytest.LogCaptureFixture) -> None:
    blocks = manager(9)
    seen: list[Event] = []
    calls: list[Event] = []

    def broken(event: Event) -> None:
        calls.append(event)
        raise RuntimeError("no")

    blocks.subscribe(broken)
    blocks.subscribe(seen.append)
    with caplog.at_level(logging.ERROR, logger="kvq"):
        cache(blocks, range(4))
    assert (len(calls), len(seen)) == (1, 2)
    assert "failed and is dropped" in caplog.text
    assert hit(blocks, range(5)) == 4
    blocks.check_integrity()


def test_a_subscriber_may_leave_and_raise_at_once() -> None:
    blocks = manager(9)
    leave: list[Callable[[], None]] = []

    def broken(event: Event) -> None:
        leave[0]()
        raise RuntimeError("no")

    leave.append(blocks.subscribe(broken))
    cache(blocks, range(4))
    assert hit(blocks, range(5)) == 4


def test_nobody_is_called_after_leaving() -> None:
    blocks = manager(9)
    seen: list[Event] = []
    leave = blocks.subscribe(seen.append)
    sequence = blocks.start(blocks.prompt(range(4)))
    leave()
    leave()
    compute(blocks, sequence)
    assert seen == []
    assert not blocks.blocks.events.active


def test_others_are_still_told_after_one_left() -> None:
    blocks = manager(9)
    seen: list[Event] = []
    leave = blocks.subscribe(lambda event: None)
    blocks.subscribe(seen.append)
    sequence = blocks.start(blocks.prompt(range(4)))
    leave()
    compute(blocks, sequence)
    assert [type(event) for event in seen] == [Stored, Stored]
