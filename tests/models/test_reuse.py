"""KV that is shared, copied, moved, damaged or kept in a file gives the logits of KV computed anew.

Two models. The embedded one, whose steps give the same bits however they are cut: compared bit for
bit. And a random one with layers that slide over 16 tokens beside layers that don't, at odd sizes for
which BLAS sums in another order now and then: compared closely enough that one wrong block shows.
"""

import numpy as np
import pytest
import torch

from kvq.blockmgr import BlockManager
from kvq.cache import KVCache
from kvq.cache.prefix_file import load_prefix, save_prefix
from kvq.models import load
from kvq.models.prove.probe import relative_error
from kvq.tiers.tiers import Tiers
from tests.helpers_models import changed_embedding, load_fp32, random_tokens, save_model

BLOCK = 8
CASES = {  # (model, kv): largest relative error
    ("tiny", "fp32"): 0.0,
    ("tiny", "int8"): 0.0,
    ("tiny", "int4"): 0.0,
    ("tiny", "int4_g64_rot"): 0.0,
    ("gemma3_text", "fp32"): 1e-5,
    ("gemma3_text", "int8"): 2e-2,
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Both models over blocks of 8 tokens."""
    folder = save_model(tmp_path_factory.mktemp("models"), "gemma3_text")
    return {"tiny": load("tiny", block_size=BLOCK), "gemma3_text": load_fp32(folder, block_size=BLOCK)}


@pytest.fixture(params=CASES, ids="-".join)
def model(request, models):
    """One of them over one KV format."""
    name, kv = request.param
    return models[name].with_kv(kv)


def check_same(model, logits, tokens):
    """The logits are those of the last token, computed without any reuse."""
    limit = CASES[("tiny" if model.geometry.model_type == "llama" else "gemma3_text", model.recipe.name)]
    expected = model.logits(tokens)[-1]
    assert relative_error(logits, expected) <= limit


def session_for(model, *, blocks=40):
    """A session whose pools have just that many blocks per layer group, above enough host memory."""
    session = model.session(max_tokens=128, max_sequences=2)
    groups = len(model.layout.groups)
    session.manager = BlockManager(
        num_blocks=[blocks] * groups,
        block_size=BLOCK,
        windows=[group.group.window for group in model.layout.groups],
        identity=b"the model and the recipe",
    )
    session.cache = KVCache(
        model.layout,
        num_blocks=[blocks] * groups,
        device=model.weights.device,
    )
    session.manager.blocks.tiers = session.cache.tiers = Tiers(1 << 30, None)
    for group in range(groups):  # bytes that nobody wrote must not matter
        session.cache.pool(group).fill_(0xFF)
    return session


def run(session, sequence, tokens):
    """Compute a sequence's next tokens and tell the manager their ids; returns the last logits."""
    known = len(sequence.tokens) - sequence.length
    logits = session.forward([(sequence, tokens)])[0].trusted_logits()[-1]
    session.manager.commit(sequence, tokens[known:])
    session.manager.check_integrity()
    return logits


def start(session, tokens, **options):
    """Start a prompt and compute what its prefix hit leaves; returns (sequence, reused, logits)."""
    sequence = session.manager.start(session.manager.prompt(tokens, **options))
    reused = sequence.length
    return sequence, reused, run(session, sequence, tokens[reused:])


def test_a_prefix_hit_gives_the_same_bits_as_computing_it(model):
    session = session_for(model)
    prompt = random_tokens(45, seed=1)
    first, reused, logits = start(session, prompt)
    assert reused == 0
    check_same(model, logits, prompt)
    same_start = prompt[:43] + random_tokens(9, seed=2)
    second, reused, logits = start(session, same_start)  # while the first still runs
    assert reused >= 40
    check_same(model, logits, same_start)
    session.free(first)
    session.free(second)
    third, reused, logits = start(session, same_start)  # all of it is cached now
    assert reused >= 48
    check_same(model, logits, same_start)
    check_same(model, run(session, third, [7]), [*same_start, 7])


def test_a_block_that_matches_in_its_first_tokens_is_copied(model):
    session = session_for(model)
    prompt = random_tokens(48, seed=3)
    first, _, _ = start(session, prompt)
    other = prompt[:37] + random_tokens(6, seed=4)
    _, reused, logits = start(session, other)
    assert reused == 37
    check_same(model, logits, other)
    check_same(model, run(session, first, [5]), [*prompt, 5])  # its block is untouched


def test_forks_write_apart(model):
    session = session_for(model)
    prompt = random_tokens(21, seed=5)
    first, _, _ = start(session, prompt)
    twins = [first, session.manager.fork(first), session.manager.fork(first)]
    for token, twin in enumerate(twins, start=10):
        for i in range(5):
            logits = run(session, twin, [token + i])
        check_same(model, logits, [*prompt, *range(token, token + 5)])


def test_rejected_drafts_leave_no_trace(model):
    session = session_for(model)
    prompt = random_tokens(30, seed=6)
    sequence, _, _ = start(session, prompt)
    slots = session.manager.append([(sequence, 4)])
    for layer in model.geometry.layers:  # drafts: whatever they were, they are dropped
        k, v = (torch.full((4, layer.kv_heads, d), 9.0) for d in (layer.k_head_dim, layer.v_head_dim))
        session.cache.write(layer.index, k, v, torch.tensor(slots[session.cache.group_of[layer.index]]))
    session.manager.truncate(sequence, 30)
    check_same(model, run(session, sequence, [8, 9]), [*prompt, 8, 9])


@pytest.mark.parametrize("damage", [False, True])
def test_a_preempted_sequence_goes_on_as_if_nothing_had_been(model, damage):
    session = session_for(model, blocks=12)
    manager, tiers = session.manager, session.manager.blocks.tiers
    tokens = [*random_tokens(61, seed=7), 11]
    sequence, _, _ = start(session, tokens[:61])
    session.free(sequence)
    prompt = manager.prompt(tokens)
    manager.below.give_up(prompt, to_tiers=True)
    session.cache.carry_out(manager.take_orders())
    other, _, _ = start(session, random_tokens(80, seed=8))  # overwrites every block it can get
    session.free(other)
    if damage:
        for held in list(tiers._host.values())[::2]:
            held.content = np.array(held.content)
            held.content[::97] ^= 4
    assert manager.below.restorable(prompt) == 56
    restore = manager.below.restore(prompt, 56)
    fetch = tiers.fetch([key for _, key in restore.missing])
    found = [fetch.take(i) for i in range(len(restore.missing))]
    assert (None in found) == damage
    for i, content in enumerate(found):
        if content is not None:
            manager.below.fill(restore, i, *content)
    manager.below.end(restore, is_complete=not damage)
    if not damage:
        session.free(restore.sequence)
    sequence, reused, logits = start(session, tokens)
    assert reused == (0 if damage else 56)
    check_same(model, logits, tokens)


def test_a_prefix_from_a_file_gives_the_same_bits(model, tmp_path):
    session = session_for(model)
    prompt = random_tokens(53, seed=9)
    start(session, prompt)
    path = tmp_path / "prefix.safetensors"
    assert save_prefix(path, session.cache, session.manager, session.manager.prompt(prompt)) == 48
    later = session_for(model)
    assert load_prefix(path, later.cache, later.manager, later.manager.prompt(prompt)) == 48
    _, reused, logits = start(later, prompt)
    assert reused == 48
    check_same(model, logits, prompt)
    assert start(later, prompt, tenant="somebody else")[1] == 0


def test_a_failed_request_leaves_zeros_and_no_prefix(model):
    session = session_for(model)
    prompt = random_tokens(24, seed=10)

    def poison(ids, rows):
        return rows.masked_fill((ids == prompt[3])[..., None], float("nan"))

    with changed_embedding(model, poison):
        sequence = session.manager.start(session.manager.prompt(prompt))
        assert not session.forward([(sequence, prompt)])[0].finite
    held = [table[:] for table in sequence.tables]
    for group, table in enumerate(held):
        assert all(not session.cache.read_block(group, block).any() for block in table)
    session.free(sequence)
    assert start(session, prompt)[1] == 0
