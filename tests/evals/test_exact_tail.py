"""Where an exact tail holds what queries see, a measurement says so, and refuses where it holds all of it."""

import pytest

from kvq.errors import ConfigError
from kvq.evals import default_text, measure_perplexity
from kvq.evals.divergence import TokenPlan
from kvq.evals.exact_tail import exact_keys
from kvq.evals.report.sections import exactness_warning
from kvq.evals.simulated import simulated
from kvq.formats import KVRecipe
from kvq.layout import plan_layout
from tests.kernels.kit import geometry

MODEL = geometry([(64, 64)] * 3, windows=[None, 50, None])


def counted(exact: tuple[int, int], size: int, queries: range, windows: list[int | None]) -> float:
    """The share of exact keys, key by key."""
    recent, sinks = exact[0], -(-exact[1] // size) * size
    shares = []
    for window in windows:
        seen = sealed = 0
        for query in queries:
            for key in range(query + 1):
                if window is not None and key <= query - window:
                    continue
                full = (key // size + 1) * size  # where the key's block ends
                seen += 1
                sealed += key >= sinks and query + 1 >= full + recent
        shares.append(1 - sealed / seen)
    return sum(shares) / len(shares)


@pytest.mark.parametrize("size", [1, 16, 17])
@pytest.mark.parametrize("exact", [(1, 0), (40, 0), (63, 5), (0, 33), (113, 0)])
@pytest.mark.parametrize(("queries", "cut"), [(range(113), None), (range(112, 113), None), (range(90), 37)])
def test_the_share_is_what_counting_every_key_gives(exact, size, queries, cut):
    recipe = KVRecipe.uniform(f"int4+recent={exact[0]}+sinks={exact[1]}", MODEL.head_dims)
    layout = plan_layout(MODEL, recipe, block_size=size)
    windows = [cut if window is None else min(window, cut or window) for window in (None, 50, None)]
    assert exact_keys(layout, queries, cut) == pytest.approx(counted(exact, size, queries, windows))


def test_nothing_is_exact_without_a_staging_area():
    assert exact_keys(plan_layout(MODEL, KVRecipe.uniform("int2", MODEL.head_dims)), range(60)) == 0
    means = plan_layout(MODEL, KVRecipe.uniform("int2_mean", MODEL.head_dims), block_size=16)
    assert exact_keys(means, range(60)) == pytest.approx(counted((0, 0), 16, range(60), [None, 50, None]))


def test_all_is_exact_exactly_where_no_format_can_lose_anything(tiny):
    """The logits of 2 bits are those of 8 bits until a query sees the first block sealed."""
    ids = list(range(5, 133))
    size = tiny.prepared.block_size
    for recent, is_same in ((128, True), (128 - size + 1, True), (128 - size, False)):
        two, eight = (tiny.with_kv(f"int{bits}+recent={recent}") for bits in (2, 8))
        assert bool((two.logits(ids) == eight.logits(ids)).all()) == is_same
        assert (exact_keys(two.layout, range(128)) == 1) == is_same


@pytest.mark.parametrize(
    "kv", ["int3+recent=96", "int3+recent=64", "int8/int2_mean+sinks=96", "kivi-k2v2+recent=80"]
)
def test_formats_of_which_nothing_is_seen_are_not_measured(tiny, kv):
    recipe = simulated(kv, tiny.geometry.head_dims) if "kivi" in kv else kv
    plan = TokenPlan(context=96, max_windows=1)
    with pytest.raises(
        ConfigError, match=r"keeps all of 96 tokens unquantized that are seen.*longer --context"
    ):
        measure_perplexity(tiny, ["fp32", recipe], default_text().text, plan)


def test_unquantized_formats_may_keep_all(tiny):
    plan = TokenPlan(context=96, max_windows=1)
    rows = measure_perplexity(tiny, ["fp32", "bf16+recent=96", "int4_g32"], default_text().text, plan)
    assert [row.exact_keys for row in rows] == [0, 1, 0]


def test_a_share_short_of_all_is_not_called_all():
    assert "99.9% of the keys" in exactness_warning("int2", 0.99999, 4096)
    assert "50.1% of the keys" in exactness_warning("int2", 0.5011, 4096)
