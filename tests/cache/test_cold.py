"""Blocks in fewer bits: those that leave and come back again and again lose no more than once."""

import pytest
import torch

import kvq
from kvq.cache.cold import ColdCodec
from kvq.engine.config import EngineConfig
from kvq.engine.tiering import rungs_of

TEXT = "The import statement finds a module and binds it to a name in the local scope. " * 8


def lengths(now, before):
    """The part of what was there that is there now, of each layer's K and V."""
    return [float((a * b).sum() / (b * b).sum()) for a, b in zip(now, before, strict=True)]


@pytest.mark.parametrize("own", ["int8", "int4"])
@pytest.mark.parametrize("rung", ["int4", "int3", "int2"])
def test_passes_through_a_rung_do_not_add_up(own, rung):
    model = kvq.load("tiny", own)
    session = model.session(max_tokens=256)
    sequence = session.new_sequence()
    session.forward([(sequence, model.tokenizer(TEXT)["input_ids"][:160])])
    cache, blocks = session.cache, sequence.tables[0][:3]
    config = EngineConfig(kv_ladder=(rung,))
    first, *others = rungs_of(config, model)
    codec = ColdCodec(cache, first, others)
    layers = [layer for layer, group in cache.group_of.items() if group == 0]

    def rows():
        end = len(blocks) * model.layout.block_size
        pairs = (cache.gather(one, torch.tensor([blocks]), 0, end, unrotate=True) for one in layers)
        return [part.float() for pair in pairs for part in pair]

    before, passes = rows(), []
    for _ in range(4):
        codec.decode(0, codec.encode(0, blocks, 1), 1, blocks)
        passes.append(lengths(rows(), before))
    assert passes[0] == pytest.approx([1] * len(before), abs=0.12)
    assert passes[-1] == pytest.approx(passes[0], abs=0.01)
