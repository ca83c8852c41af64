"""Methods of others are simulated over the path that serves."""

import pytest
import torch

from kvq.errors import ConfigError
from kvq.evals import default_text
from kvq.evals.divergence import TokenPlan
from kvq.evals.perplexity import measure_perplexity
from kvq.evals.simulated import simulated

TEXT = default_text().text
DIMS = [(64, 64)] * 6
PLAN = TokenPlan(context=320, max_windows=2)


def recipe(name):
    return simulated(name, DIMS)


def codecs(name):
    layer = recipe(name).layers[0]
    return layer.k.own, layer.v.own


def rows(tiny, names, plan=PLAN):
    return measure_perplexity(tiny, ["fp32", *map(recipe, names)], TEXT, plan)


@pytest.mark.parametrize(
    ("name", "bits", "tokens"),
    [
        ("kivi-k4v4", 5, 32),
        ("kivi-k2v2-g64+recent=128", (2.5 + 3) / 2, 64),
        ("kvarn-k4v2+sinks=4", (4.5 + 2.625) / 2, 128),
    ],
)
def test_names_say_codes_blocks_and_what_stays_exact(tiny, name, bits, tokens):
    model = tiny.with_kv(recipe(name))
    assert model.bits_per_element == bits
    assert model.kv_bytes_per_token == bits * tiny.geometry.elements_per_token / 8
    assert (model.recipe.name, model.layout.block_size) == (name, tokens)
    assert model.recipe.is_quantized
    assert model.recipe.is_staged


@pytest.mark.parametrize(
    "name", ["kivi", "kivi-k9v2", "kivi-k2v2-g0", "kvarn-k2v2-g5000", "kvarn-k4v4+old=3", "int4"]
)
def test_other_names_are_refused(name):
    with pytest.raises(ConfigError):
        recipe(name)


@pytest.mark.parametrize("family", ["kivi", "kvarn"])
def test_each_rounds_along_its_own_dimension(family):
    k, v = codecs(f"{family}-k4v4")
    x = torch.randn(2, k.tokens, 64, generator=torch.Generator().manual_seed(0))
    for codec in (k.through, v.through):
        assert (codec(x) - x).abs().mean() < 0.1 * x.abs().mean()
        assert not torch.equal(codec(x), x)
    loud = x.clone()
    loud[:, :, 5] *= 100  # an element that is loud in all tokens, as in K: nothing to a scale of its own
    quiet = torch.arange(64) != 5
    if family == "kivi":
        assert torch.equal(k.through(loud)[..., quiet], k.through(x)[..., quiet])
        assert not torch.equal(v.through(loud)[..., quiet], v.through(x)[..., quiet])


def test_normalization_evens_out_tokens_of_other_sizes():
    x = torch.randn(2, 128, 64, generator=torch.Generator().manual_seed(0))
    sizes = torch.logspace(-2, 2, 128)[:, None]
    lost = {}
    for family in ("kivi", "kvarn"):
        got = codecs(f"{family}-k4v4-g128")[0].through(x * sizes)
        lost[family] = float(((got - x * sizes) / sizes).square().mean())
    assert lost["kvarn"] < lost["kivi"] / 100


def test_more_bits_and_more_exact_tokens_lose_less(tiny):
    base, *found = rows(tiny, ["kivi-k2v2", "kivi-k4v4", "kivi-k8v8", "kivi-k2v2+recent=128"])
    two, four, eight, recent = (row.kl_mean for row in found)
    assert two > 5 * four > 25 * eight > 0
    assert recent < two / 2
    assert base.kl_mean == 0


def test_chunks_change_nothing(tiny):
    whole = rows(tiny, ["kvarn-k4v2-g64"])[1]
    parts = rows(tiny, ["kvarn-k4v2-g64"], TokenPlan(context=320, max_windows=2, chunk=7))[1]
    assert parts.kl_mean == pytest.approx(whole.kl_mean, rel=1e-3)


@pytest.mark.parametrize(
    ("name", "tokens", "bits"),
    [
        ("int4_g32_s8", 1024, 4.5),
        ("int4_g32_s8", 1000, 4.5 * 1024 / 1000),
        ("int4", 1000, (4.625 * 1024 + 16 * 64) / 1000),
        ("int3+sinks=4+recent=128", 4096, 3.625 + 16 * (160 + 32) / 4096),
        ("kivi-k4v4+sinks=4+recent=128", 4096, 5 + 16 * (160 + 32) / 4096),
        ("kivi-k4v4", 1000, 5 * 1024 / 1000 + 16 * 64 / 1000),
    ],
)
def test_what_a_sequence_holds_counts_whole_blocks_and_what_waits(tiny, name, tokens, bits):
    kv = recipe(name) if "kivi" in name else name
    assert tiny.with_kv(kv).bits_held(tokens) == pytest.approx(bits)
