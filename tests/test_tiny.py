"""The embedded model: small enough to ship, and an instrument that can show damage."""

import json

import pytest

from kvq.evals import default_text, measure_perplexity
from kvq.evals.perplexity import instrument_check
from kvq.models.resolve import EMBEDDED

FOLDER = EMBEDDED["tiny"]


def test_it_ships_in_at_most_16_mb_with_its_provenance():
    assert sum(p.stat().st_size for p in FOLDER.iterdir()) <= 16_000_000
    card = (FOLDER / "README.md").read_text(encoding="utf-8")
    for source in ("WikiText-2", "Shakespeare", "Brown", "pydoc_data.topics", "tools/train_tiny.py"):
        assert source in card


def test_every_matrix_dimension_is_a_multiple_of_128():
    config = json.loads((FOLDER / "config.json").read_text())
    for key in ("hidden_size", "intermediate_size", "vocab_size"):
        assert config[key] % 128 == 0
    assert config["num_key_value_heads"] * config["head_dim"] % 128 == 0


@pytest.fixture(scope="module")
def on_wikitext(tiny, wikitext):
    """Eight windows of 1,024 tokens; the whole split is measured under benchmarks/."""
    kv = ["fp32", "fp8", "fp8_per_head", "int8", "int8_per_head", "int4", "int2_g32"]
    rows = measure_perplexity(tiny, kv, wikitext[:200_000], context=1024, max_windows=8, instrument=True)
    return rows, {row.kv: row for row in rows if row.attention_window is None}


def test_the_instrument_can_see_on_wikitext(on_wikitext):
    rows, _ = on_wikitext
    check = instrument_check(rows)
    assert check["int2_format"] == "int2_g32"
    assert check["window_change"] >= 0.05
    assert check["int2_change"] >= 0.05


@pytest.mark.parametrize("kv", ["fp8", "fp8_per_head", "int8", "int8_per_head"])
def test_eight_bits_cost_under_a_fifth_of_a_percent(on_wikitext, kv):
    assert abs(on_wikitext[1][kv].perplexity_change) < 0.002


def test_rotated_int4_at_4_and_a_half_bits_costs_under_0_8_percent(on_wikitext):
    row = on_wikitext[1]["int4"]
    assert row.bits_per_element == 4.5
    assert row.perplexity_change < 0.008


def test_the_default_text_is_long_enough_for_whole_windows(tiny):
    rows = measure_perplexity(tiny, ["fp32"], default_text().text, context=1024, max_windows=3)
    assert rows[0].tokens == 3 * 1023


@pytest.mark.long
def test_the_limits_hold_on_all_of_wikitext(tiny, wikitext):
    kv = ["fp32", "fp8", "fp8_per_head", "int8", "int8_per_head", "int4", "int2_g32"]
    rows = measure_perplexity(tiny, kv, wikitext, context=1024, instrument=True)
    cost = {row.kv: row.perplexity_change for row in rows if row.attention_window is None}
    assert all(abs(cost[name]) < 0.002 for name in ("fp8", "fp8_per_head", "int8", "int8_per_head")), cost
    assert cost["int4"] < 0.008
    assert instrument_check(rows)["passed"]
