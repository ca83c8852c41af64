"""Whatever happens to the blocks, a router that reads the events' bytes knows exactly what is held."""

import random
from collections.abc import Sequence

import msgspec
import pytest

from kvq.blockmgr import BlockManager
from kvq.server.kv_events.stream import Change, EventStream, encode, name_of
from tests.blockmgr.drive import TENANTS, random_simulation, random_step
from tests.blockmgr.helpers import cache, manager, run
from tests.server.kv_events.router import Router, tokens_of

Held = dict[int, tuple[int | None, tuple[int, ...]]]


class Sink:
    """Hands batches to a router, as bytes; refuses some."""

    def __init__(self, blocks: BlockManager, refused: float = 0.0) -> None:
        self.router = Router()
        self.refused = refused
        self.batches = 0
        self._size = blocks.block_size
        self._rng = random.Random(5)

    def put(self, changes: Sequence[Change]) -> bool:
        if self._rng.random() < self.refused:
            return False
        self.batches += 1
        self.router.take(encode(changes, block_size=self._size, now=1.0))
        return True


def held_by(blocks: BlockManager, tenants: Sequence[str]) -> Held:
    """What a router should know, read from the index itself."""
    index = blocks.blocks.index
    roots = {index.root_digest(tenant) for tenant in tenants}
    found: Held = {}
    for node in index.nodes():
        if node.blocks[0] is not None and node.root in roots:
            assert node.parent is not None
            parent = None if node.parent.parent is None else name_of(node.parent.digest)
            found[name_of(node.digest)] = (parent, tokens_of(node.tokens))
    return found


def following(blocks: BlockManager, *tenants: str, refused: float = 0.0) -> tuple[EventStream, Sink]:
    sink = Sink(blocks, refused)
    stream = EventStream(blocks, sink.put)
    for tenant in tenants:
        stream.include(tenant)
    return stream, sink


@pytest.mark.parametrize("seed", range(12))
def test_a_router_holds_what_the_block_manager_does(seed: int) -> None:
    rng = random.Random(f"kv events {seed}")
    sim = random_simulation(rng)
    tenants = TENANTS[: 1 + seed % 2]  # of one, or of both
    refused = (0.0, 0.3)[seed % 3 == 2]
    stream, sink = following(sim.manager, *tenants, refused=refused)
    compared = stored = 0
    for _ in range(600):
        random_step(sim, rng)
        sink.refused = refused
        stream.flush()
        if not stream._is_behind:
            compared += 1
            expected = held_by(sim.manager, tenants)
            assert sink.router.held == expected
            stored += len(expected)
    assert compared > 200
    assert stored > 100
    assert (stream.dropped > 0) == (refused > 0)
    sink.refused = 0.0
    sim.close()
    stream.flush()
    assert sink.router.held == held_by(sim.manager, tenants)
    stream.close()
    assert sink.router.held == {}


def test_a_prompt_is_one_event_and_so_is_its_eviction() -> None:
    blocks = manager(8)
    stream, sink = following(blocks, "")
    stream.flush()
    cache(blocks, range(7))
    stream.flush()
    blocks.drop_cached()
    stream.flush()
    cleared, stored, removed = sink.router.events
    digests = [name_of(blocks.blocks.index.digest_at(blocks.prompt(range(7)), i)) for i in range(3)]
    assert cleared == {"type": "AllBlocksCleared"}
    assert stored == {
        "type": "BlockStored",
        "block_hashes": digests,
        "parent_block_hash": None,
        "token_ids": [0, 1, 2, 3, 4, 5],
        "block_size": 2,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "group_idx": 0,
    }
    assert removed == {
        "type": "BlockRemoved",
        "block_hashes": digests[::-1],
        "medium": "GPU",
        "group_idx": 0,
    }


def test_earlier_readers_get_the_same_fields_in_their_order() -> None:
    tokens = b"".join(token.to_bytes(4, "little") for token in (5, 6))
    changes = (None, (7, None, tokens), (8, 7, tokens), 8, 7)
    ts, events, rank = msgspec.msgpack.decode(encode(changes, block_size=2, now=1.5, form="arrays"))
    assert (ts, rank) == (1.5, 0)
    assert events == [
        ["AllBlocksCleared"],
        ["BlockStored", [7, 8], None, [5, 6, 5, 6], 2, None, "GPU", None, None, 0],
        ["BlockRemoved", [8, 7], "GPU", 0],
    ]


def test_nothing_is_sent_where_nothing_happened() -> None:
    blocks = manager(8)
    stream, sink = following(blocks, "")
    for _ in range(3):
        stream.flush()
    assert sink.batches == 1  # that nothing is held


def test_prompts_with_a_salt_are_not_told_of() -> None:
    blocks = manager(16)
    stream, sink = following(blocks, "a")
    cache(blocks, range(4), tenant="a")
    cache(blocks, range(4), tenant="a", salt="secret")
    cache(blocks, range(4), tenant="b")
    blocks.free(blocks.start(blocks.prompt(range(4), tenant="a", cache_salt="own")))
    stream.flush()
    assert len(sink.router.held) == 2


def test_who_comes_late_is_told_of_all_in_pieces() -> None:
    blocks = manager(2100)
    stream, sink = following(blocks, "")
    stream.flush()
    for first in range(1500):
        cache(blocks, (first, first + 1, first + 2))
    stream.flush()
    late = Router()
    sink.router, sink.batches = late, 0
    stream.tell_all()
    stream.flush()
    assert late.held == held_by(blocks, [""])
    assert (len(late.held), sink.batches) == (1500, 3)


def test_a_block_that_leaves_before_its_event_is_told_is_not_held() -> None:
    blocks = manager(4)
    stream, sink = following(blocks, "")
    stream.flush()
    sequence = run(blocks, range(4))
    blocks.scrub(sequence)  # takes its blocks out of the index again
    stream.flush()
    assert sink.router.held == held_by(blocks, [""]) == {}


def test_nobody_follows_an_ended_stream() -> None:
    blocks = manager(8)
    stream, sink = following(blocks, "")
    stream.close()
    assert not blocks.blocks.events.active
    cache(blocks, range(4))
    assert sink.router.held == {}
