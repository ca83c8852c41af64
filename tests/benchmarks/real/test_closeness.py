"""Figures of the lab are those of `kvq perplexity`, from hidden states that are computed once."""

import numpy as np
import pytest
import torch

import kvq
from benchmarks.real.closeness import answers_agreement, compare, in_format, row_of, sizes
from benchmarks.real.hidden import Baseline, hidden_states, log_probs, pieces
from kvq.evals import default_text
from kvq.evals.divergence import TokenPlan
from kvq.evals.perplexity import measure_perplexity
from kvq.evals.text import token_windows

CONTEXT, WINDOWS = 192, 3
FIGURES = ("perplexity", "perplexity_change", "kl_mean", "kl_p999", "top1_agreement", "bits_per_element")


@pytest.fixture(scope="module")
def model():
    return kvq.load("tiny", kv="fp32")


@pytest.fixture(scope="module")
def windows(model):
    return token_windows(model.tokenizer, default_text().text, context=CONTEXT, max_windows=WINDOWS)


def nothing(done, total):
    pass


@pytest.mark.parametrize("kv", ["fp32", "int4", "int3_mean", "kivi-k2v2"])
def test_figures_are_those_of_kvqs_own_evaluation(model, windows, tmp_path, kv):
    one = in_format(model, kv)
    found = row_of(*compare(one, Baseline(model, tmp_path), windows, nothing))
    plan = TokenPlan(context=CONTEXT, max_windows=WINDOWS)
    _, expected = measure_perplexity(model, ["fp32", one.recipe], default_text().text, plan)
    for name in FIGURES:
        assert found[name] == pytest.approx(getattr(expected, name), abs=1e-6, rel=1e-6), name
    assert found["kl_mean"] > 0.001 or kv == "fp32"
    assert found["tokens"] == WINDOWS * (CONTEXT - 1)
    low, high = found["intervals"]["kl_mean"] or (found["kl_mean"],) * 2
    assert low <= found["kl_mean"] <= high


def test_a_baseline_is_computed_once_and_again_for_other_tokens(model, windows, tmp_path):
    baseline = Baseline(model, tmp_path)
    first = baseline.states(windows[0])
    (file,) = tmp_path.iterdir()
    before = file.stat().st_mtime_ns
    assert torch.equal(baseline.states(windows[0]), first)
    assert file.stat().st_mtime_ns == before
    assert not torch.equal(baseline.states(windows[1]), first)
    assert len(list(tmp_path.iterdir())) == 2


def test_a_baseline_that_was_cut_off_is_computed_again(model, windows, tmp_path):
    baseline = Baseline(model, tmp_path)
    first = baseline.states(windows[0])
    (file,) = tmp_path.iterdir()
    file.write_bytes(file.read_bytes()[:100])
    assert torch.equal(baseline.states(windows[0]), first)


def test_logits_of_hidden_states_are_the_models_in_whatever_pieces(model, windows):
    ids = windows[0]
    hidden = hidden_states(model.session(max_tokens=len(ids)), ids)
    expected = torch.log_softmax(model.logits(ids), dim=-1)
    for rows in (slice(0, len(ids)), slice(5, 6), slice(63, 130)):
        assert torch.allclose(log_probs(model, hidden[rows]), expected[rows], atol=1e-5)
    assert [rows for one in pieces(model, 70_000) for rows in (one.start, one.stop)][-1] == 70_000


def test_bits_held_are_those_of_the_blocks_that_a_sequence_has(model):
    for kv in ("int4", "int4_mean", "int3+sinks=4+recent=128"):
        one = in_format(model, kv)
        session = one.session(max_tokens=1024)
        sequence = session.new_sequence()
        ids = np.arange(1024) % 512
        session.forward([(sequence, ids.tolist())])
        pools = zip(session.manager.pools, one.layout.groups, strict=True)
        held = sum(pool.num_live * group.block_bytes for pool, group in pools)
        bits = 8 * held / (1024 * one.geometry.elements_per_token)
        assert sizes(one)["bits_held_1024"] == pytest.approx(bits), kv


def test_agreement_on_answers_looks_at_answers_alone(model, windows, tmp_path):
    baseline = Baseline(model, tmp_path)
    texts = [(ids[:100], ids[100:140]) for ids in windows]
    same = answers_agreement(model, baseline, texts, nothing)
    assert same == {"canonical_tokens": 120, "canonical_top1_agreement": 1.0, "canonical_kl_mean": 0.0}
    worse = answers_agreement(in_format(model, "int2"), baseline, texts, nothing)
    assert worse["canonical_top1_agreement"] < 1
    assert worse["canonical_kl_mean"] > 0
