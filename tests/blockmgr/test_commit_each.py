"""Committing one token of many sequences, and knowing that a block will be new."""

import pytest

from kvq.blockmgr import BlockManager
from kvq.errors import ConfigError, RequestError


def manager(windows: list[int | None] | None = None) -> BlockManager:
    return BlockManager(num_blocks=[40] * len(windows or [None]), block_size=4, windows=windows)


def started(blocks: BlockManager, tokens: list[int]):
    sequence = blocks.start(blocks.prompt(tokens))
    blocks.append([(sequence, len(tokens) - sequence.length)])
    return sequence


@pytest.mark.parametrize("windows", [[None], [None, 3]])
def test_each_is_as_one_by_one(windows: list[int | None]):
    together, apart = manager(windows), manager(windows)
    for blocks in (together, apart):
        sequences = [started(blocks, [7 * i + j for j in range(5)]) for i in range(3)]
        for step in range(12):
            work = [(sequence, 100 + step, sequence.length) for sequence in sequences]
            if blocks is together:
                blocks.commit_each(work)
            else:
                for sequence, token, _ in work:
                    blocks.commit(sequence, [token])
            blocks.append([(sequence, 1) for sequence in sequences])
        blocks.check_integrity()
    assert together.usage() == apart.usage()
    one, other = ([(s.tokens, s.depth, s.starts) for s in blocks.sequences()] for blocks in (together, apart))
    assert one == other


@pytest.mark.parametrize("token", [-1, 1 << 32, 1.5, "x"])
def test_a_token_that_is_none_is_refused(token: object):
    blocks = manager()
    sequence = started(blocks, [1, 2, 3])
    with pytest.raises(RequestError, match="whole numbers"):
        blocks.commit_each([(sequence, token, 3)])
    blocks.check_integrity()


def test_a_sequence_that_ended_is_refused():
    blocks = manager()
    sequence = started(blocks, [1, 2, 3])
    blocks.free(sequence)
    with pytest.raises(ConfigError, match="was freed"):
        blocks.commit_each([(sequence, 4, 3)])


def test_a_block_is_new_unless_one_begins_like_it():
    blocks = manager()
    first = started(blocks, [1, 2, 3, 4, 5, 6])
    assert blocks.prefixes.leads(first)
    blocks.commit(first)
    second = started(blocks, [1, 2, 3, 4, 5])
    blocks.commit(second)
    assert blocks.prefixes.leads(second)  # nobody has indexed a block after the one that both share
    blocks.append([(first, 2)])
    blocks.commit(first, [7, 8])
    assert not blocks.prefixes.leads(second)  # it may become 5, 6, 7, 8 too
    blocks.append([(second, 1)])
    blocks.commit(second, [9])
    assert blocks.prefixes.leads(second)
