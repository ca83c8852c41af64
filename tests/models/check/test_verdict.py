"""Figures are judged together, against what a guess would reach, and by limits that lie in one place."""

import math
from collections import Counter

import numpy as np
import pytest

from kvq.evals.report.report import render
from kvq.models.check.verdict import cautions, chance_perplexity, verdict


@pytest.mark.parametrize(
    ("kl", "change", "says"),
    [
        (0.0, 0.0, "harmless"),
        (0.0199, 0.0199, "harmless"),
        (0.0164, -0.004, "harmless"),
        (0.02, 0.0, "warning"),
        (0.0, 0.02, "warning"),
        (0.1, 0.1, "warning"),
        (0.05, -0.5, "warning"),  # perplexity that falls makes up for nothing
        (0.101, 0.0, "broken"),
        (0.3, -0.02, "broken"),
        (0.0, 0.101, "broken"),
        (math.nan, 0.0, "broken"),
        (0.0, math.nan, "broken"),
        (math.inf, 0.0, "broken"),
    ],
)
def test_divergence_and_perplexity_are_judged_together(kl, change, says):
    assert verdict(kl, change) == says


def counted(tokens, vocab):
    """The same, token by token."""
    seen, loss = Counter(), 0.0
    for n, token in enumerate(tokens):
        kinds = len(seen)
        p = (
            seen[token] / (n + kinds)
            if seen[token]
            else kinds / (n + kinds) / (vocab - kinds)
            if n
            else 1 / vocab
        )
        loss -= math.log(p)
        seen[token] += 1
    return min(math.exp(loss / len(tokens)), vocab)


@pytest.mark.parametrize("kinds", [1, 7, 63])
def test_chance_is_what_counting_the_tokens_before_reaches(kinds):
    tokens = np.random.default_rng(kinds).integers(0, kinds, 500) * 3
    assert chance_perplexity(tokens, 1000) == pytest.approx(counted(tokens.tolist(), 1000))


def test_chance_is_never_worse_than_all_of_the_vocabulary_alike_and_takes_every_token_once():
    assert chance_perplexity(np.arange(64), 1000) == 1000
    assert chance_perplexity(np.array([5]), 64) == pytest.approx(64)


def test_a_model_that_only_counts_is_at_chance_and_one_that_is_better_is_not():
    assert "no better than chance" in next(cautions(512.0, 512.0))
    assert not list(cautions(511.0, 512.0))


def look(instrument, kl, change):
    return {
        "kv": "int2", "instrument": instrument, "kl_mean": kl, "perplexity_change": change, "tokens": 255,
        "attention_window": 64 if instrument == "window" else None,
    }  # fmt: skip


def test_what_must_hurt_and_does_not_is_told():
    blind = [look("int2", 0.001, 0.0), look("window", 0.001, -0.01)]
    assert [
        "int2 looks" in line or "cut to 64 tokens looks" in line for line in cautions(9.0, 99.0, blind)
    ] == [
        True,
        True,
    ]
    assert not list(cautions(9.0, 99.0, [look("int2", 0.3, -0.01), look("window", 0.03, 0.0)]))


def page(*rows, **more):
    """The page of made-up rows (format, bytes, KL, change of perplexity) after an unquantized one."""
    made = [
        {
            "kv": kv, "kv_bytes_per_token": size, "bits_per_element": size / 8, "compression": 64 / size,
            "kl_mean": kl, "kl_p999": kl, "top1_agreement": 0.931, "perplexity": 10 * (1 + change),
            "perplexity_change": change, "seconds": 1.0, "tokens": 8 * 63, "attention_window": None,
            "instrument": "",
        }
        for kv, size, kl, change in (("fp32", 64, 0.0, 0.0), *rows)
    ]  # fmt: skip
    about = dict.fromkeys(("model", "text", "device", "date", "kvq_version", "commit", "command"), "x")
    about |= {"model_digest": "x", "text_digest": "x", "versions": {}, "context": 64}
    return render({**about, "rows": made, **more}, {})


def test_the_headline_is_not_won_by_perplexity_that_falls():
    html = page(("int8", 16, 0.0002, 0.001), ("fp8", 15, 0.0164, -0.004), ("int2", 5, 0.4, -0.03))
    assert "<b>fp8</b> is the smallest that is harmless: mean KL below 0.02" in html
    assert "mean KL 0.0164, 93.1% the same top token, perplexity -0.40%" in html
    assert "<b>int2</b>" not in html
    assert "<b>int8</b>" in page(
        ("fp8", 16, 0.0164, -0.004), ("int8", 16, 0.0002, 0.001)
    )  # of the same bytes
    assert "none smaller than fp32 is harmless" in page(("int4", 8, 0.05, -0.01))


def test_few_windows_are_told_under_the_headline():
    assert "too few" not in page(("int8", 16, 0.0002, 0.001))
    assert "Windows: 3, too few to be sure." in page(("int8", 16, 0.0002, 0.001), context=169)


def test_a_page_of_figures_that_say_nothing_begins_with_that_and_praises_nothing():
    html = page(("int4", 8, 0.0002, 0.001), cautions=["this model can't show <damage>"])
    headline = html.index("this model can&#x27;t show &lt;damage&gt;")
    assert html.index("</h1>") < headline < html.index("On x")
    assert "is the smallest" not in html
