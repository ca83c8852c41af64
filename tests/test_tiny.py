"""The embedded model: small enough to ship, and an instrument that can show damage."""

import json

import pytest

from kvq.evals import default_text, measure_perplexity
from kvq.evals.divergence import TokenPlan
from kvq.evals.perplexity import instrument_check
from kvq.models.describe.resolve import EMBEDDED

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


KV = ["fp32", "fp8", "fp8_per_head", "int8", "int8_per_head", "int4", "int4_g64_rot", "int2_g32"]


def check_limits(rows):
    """The instrument can see; 8 bits cost under 0.2%, INT4 under 0.8%."""
    check = instrument_check(rows)
    assert check["int2_format"] == "int2_g32"
    assert check["window_change"] >= 0.05
    assert check["int2_change"] >= 0.05
    cost = {row.kv: row for row in rows if row.attention_window is None}
    for kv in ("fp8", "fp8_per_head", "int8", "int8_per_head"):
        assert abs(cost[kv].perplexity_change) < 0.002, kv
    for kv, bits in (("int4", 4.625), ("int4_g64_rot", 4.5)):
        assert cost[kv].bits_per_element == bits
        assert cost[kv].perplexity_change < 0.008


def test_the_limits_hold_on_four_windows_of_wikitext(tiny, wikitext):
    check_limits(measure_perplexity(tiny, KV, wikitext[:200_000], TokenPlan(max_windows=4, instrument=True)))


@pytest.mark.long
def test_the_limits_hold_on_all_of_wikitext(tiny, wikitext):
    check_limits(measure_perplexity(tiny, KV, wikitext, TokenPlan(instrument=True)))


def test_the_default_text_is_long_enough_for_whole_windows(tiny):
    rows = measure_perplexity(tiny, ["fp32"], default_text().text, TokenPlan(context=1024, max_windows=3))
    assert rows[0].tokens == 3 * 1023
