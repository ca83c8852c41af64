"""Sessions: steps change nothing when refused, and one broken request harms no other."""

import pytest
import torch

import kvq
from kvq.errors import ModelError, OutOfBlocks, RequestError
from kvq.models.loading.fused_layers import is_fused
from tests.helpers_models import changed_embedding


@pytest.fixture
def poisoned():
    """The embedded model with a token whose embedding is NaN, and that token."""
    model, token = kvq.load("tiny", kv="int4"), 4000

    def poison(ids, rows):
        return rows.masked_fill((ids == token)[..., None], float("nan"))

    with changed_embedding(model, poison):
        yield model, token


def test_a_nan_fails_its_own_sequence_alone_and_its_blocks_are_scrubbed(poisoned):
    model, token = poisoned
    session = model.session(max_tokens=64, max_sequences=2)
    good, bad = session.new_sequence(), session.new_sequence()
    session.forward([(good, [1, 2, 3]), (bad, [4, 5, 6])])
    broken, fine = session.forward([(bad, [7, token, 8]), (good, [9, 10])], all_rows=True)
    assert (broken.finite, fine.finite) == (False, True)
    expected = model.logits([1, 2, 3, 9, 10])[-2:]
    assert torch.equal(fine.logits, expected)
    pool = session.cache.pool(0)
    for block in bad.tables[0]:
        for run in session.cache.layout.groups[0].runs(block, session.cache.num_blocks[0]):
            assert not pool[run.offset : run.offset + run.nbytes].any()
    again = session.forward([(good, [11])])[0].logits
    assert torch.equal(again[0], model.logits([1, 2, 3, 9, 10, 11])[-1])


def test_a_step_begins_at_what_another_ones_layer_was_given(tiny):
    ids, inputs = list(range(40)), []
    whole, late, other = (tiny.with_kv("fp32").session(max_tokens=64) for _ in range(3))
    whole.shared, late.shared, other.shared = (inputs, 0), (inputs, 3), (inputs, 3)
    expected = whole.forward([(whole.new_sequence(), ids)], all_rows=True)[0].logits
    assert len(inputs) == (len(tiny.geometry.layers) if is_fused(tiny.weights.model) else 0)
    assert torch.equal(late.forward([(late.new_sequence(), ids)], all_rows=True)[0].logits, expected)
    if inputs:
        inputs[3] = -inputs[3]
        found = other.forward([(other.new_sequence(), ids)], all_rows=True)[0].logits
        assert not torch.equal(found, expected)


def test_logits_that_can_not_be_trusted_are_an_error(poisoned):
    model, token = poisoned
    with pytest.raises(RequestError, match="NaN or infinity"):
        model.logits([1, token, 2])


@pytest.mark.parametrize(
    ("ids", "says"),
    [
        ([], "no tokens"),
        ([1, 4096], "token id 4096 is outside the vocabulary of 0 to 4095"),
        ([-1], "token id -1"),
        ([1] * 4097, "4097 tokens are more than this model's context of 4096"),
    ],
)
def test_refused_steps_change_nothing(tiny, ids, says):
    session = tiny.session(max_tokens=64, max_sequences=2)
    a, b = session.new_sequence(), session.new_sequence()
    session.forward([(a, [1, 2])])
    before = session.cache.pool(0).clone()
    with pytest.raises(RequestError, match=says):
        session.forward([(a, [3]), (b, ids)])
    assert (a.length, b.length) == (2, 0)
    assert torch.equal(session.cache.pool(0), before)
    session.manager.check_integrity()


def test_a_full_pool_is_told_before_anything_is_written(tiny):
    session = tiny.session(max_tokens=40, max_sequences=2)  # four blocks of 32
    a, b, c = (session.new_sequence() for _ in range(3))
    session.forward([(a, [1] * 40), (b, [2] * 30)])
    before = session.cache.pool(0).clone()
    with pytest.raises(OutOfBlocks, match="only 1 of 4 are free"):
        session.forward([(b, [3]), (c, [4] * 40)])
    assert (b.length, c.length) == (30, 0)
    assert torch.equal(session.cache.pool(0), before)
    session.free(a)
    session.forward([(c, [4] * 40)])
    session.manager.check_integrity()


def test_a_context_beyond_the_models_is_refused_when_the_session_opens(tiny):
    with pytest.raises(RequestError, match="5000 tokens was asked for; this model takes 1 to 4096"):
        tiny.session(max_tokens=5000)


def test_freed_blocks_of_another_sequence_do_not_show(tiny):
    model = tiny.with_kv("int8")
    session = model.session(max_tokens=96, max_sequences=1)
    first = session.new_sequence()
    session.forward([(first, list(range(100, 190)))])
    session.free(first)
    second = session.new_sequence()
    logits = session.forward([(second, [5, 6, 7])], all_rows=True)[0].logits
    assert torch.equal(logits, model.logits([5, 6, 7]))


def test_block_orders_and_sizes_give_the_same_logits():
    from kvq.layout import BlockOrder
    from kvq.models import load

    ids = list(range(50, 120))
    results = [
        load("tiny", kv="int8_per_token_head/int4_g32", block_size=size, order=order).logits(ids)
        for size in (1, 16, 17, 64)
        for order in BlockOrder
    ]
    assert all(torch.equal(r, results[0]) for r in results)


def test_a_model_that_was_switched_to_another_attention_is_refused(tiny):
    session = tiny.session(max_tokens=8)
    model = tiny.weights.model
    before = model.config._attn_implementation
    try:
        model.set_attn_implementation("sdpa")
        with pytest.raises(ModelError, match="switched to attn_implementation='sdpa'"):
            session.forward([(session.new_sequence(), [1])])
    finally:
        model.set_attn_implementation(before)
