"""`kvq bench speculation`: what it counts, what it says, and what it refuses."""

import json
import random

import pytest
from click.testing import CliRunner

from kvq.bench.speculation import check_depths, expected_tokens, share_along, verdict
from kvq.cli import root
from kvq.errors import ConfigError

SMALL = ("--requests", "2", "--input-len", "24", "--output-len", "24", "--k", "1,3", "--repeats", "1")


def run(*options: str):
    return CliRunner().invoke(root, ["bench", "speculation", "--model", "tiny", *SMALL, *options])


@pytest.mark.parametrize(("share", "k", "wanted"), [(0, 4, 1), (1, 4, 5), (0.5, 2, 1.75), (0.8, 0, 1)])
def test_expected_tokens_are_those_of_the_formula(share, k, wanted):
    assert expected_tokens(share, k) == pytest.approx(wanted)
    assert expected_tokens(share, k) == pytest.approx(sum(share**i for i in range(k + 1)))


@pytest.mark.parametrize("k", [1, 2, 5])
def test_the_share_along_texts_is_that_of_drafts_played_through(k):
    rng = random.Random(k)
    texts = [[rng.random() for _ in range(length)] for length in (1, 2, 3, 7, 20)]
    right = looked_at = 0
    for _ in range(4000):
        for kept in texts:
            at = 1
            while at < len(kept):
                draft = 0
                while draft < min(k, len(kept) - at - 1):
                    looked_at += 1
                    draft += 1
                    if rng.random() >= kept[at + draft - 1]:
                        draft -= 1
                        break
                    right += 1
                at += draft + 1
    assert share_along(texts, k) == pytest.approx(right / looked_at, abs=0.01)
    assert share_along([[0.5], [0.5, 0.5], []], k) is None, "nothing to draft"


@pytest.mark.parametrize("how", ["ngram", "draft,model=tiny-draft", "self"])
def test_every_depth_is_measured_and_counted(tmp_path, how):
    longer = ("--requests", "4", "--output-len", "48")
    path, plot = tmp_path / "found.json", tmp_path / "found.svg"
    done = run(*longer, "--kv", "fp32", "--speculation", how, "--json", str(path), "--plot", str(plot))
    assert done.exit_code == 0, done.output
    result = json.loads(path.read_text())
    rows = result["rows"]
    assert [(row["k"], row["adapts"]) for row in rows] == [(0, False), (1, False), (3, False), (3, True)]
    assert rows[0]["tokens_per_step"] == rows[0]["speedup"] == 1
    assert rows[0]["acceptance"] is None
    for row in rows[1:3]:
        assert row["kv"] == "fp32"
        assert row["runs_with_equal_tokens"] == 1, "greedy tokens are those without drafts"
        assert 0 < row["acceptance"] <= 1
        assert row["draft_acceptance"] <= row["acceptance"]
        accepted = 1 - 1 / row["tokens_per_step"]
        assert accepted == pytest.approx(
            row["draft_acceptance"] * row["drafts_per_step"] / row["tokens_per_step"]
        )
        assert 1 < row["expected_tokens_per_step"] <= 1 + row["k"]
        assert row["acceptance"] == pytest.approx(row["offline_acceptance"], abs=0.1)
    assert (rows[0]["draft_cost"] == 0) == (how == "ngram")
    assert result["verdict"] == verdict(rows)
    assert result["verdict"][0] in done.output
    assert plot.read_text().startswith("<?xml")


def test_with_a_temperature_and_a_seed_tokens_stay_those_of_the_seed(tmp_path):
    path = tmp_path / "found.json"
    how = ("--kv", "fp32", "--speculation", "self", "--temperature", "1", "--json", str(path))
    assert run(*how, "--seed", "3").exit_code == 0
    assert {row["runs_with_equal_tokens"] for row in json.loads(path.read_text())["rows"]} == {1}
    assert run(*how).exit_code == 0
    assert {row["runs_with_equal_tokens"] for row in json.loads(path.read_text())["rows"]} == {None}


def test_a_prompt_of_one_token_is_measured(tmp_path):
    assert run("--speculation", "self", "--input-len", "1", "--k", "2").exit_code == 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--k", "0"), "whole numbers of 1 to 16"),
        (("--k", ","), "whole numbers"),
        (("--speculation", "off"), "nothing to measure"),
        (("--speculation", "guess"), "no method"),
        (("--output-len", "5000"), "more than the model's context"),
        (("--input-len", "100000"), "need more"),
        (("--speculation", "heads"), "heads"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_weights_load(options, words):
    done = run(*options)
    assert done.exit_code != 0
    assert words in done.output + str(done.exception)


def test_depths_are_read_once_each():
    assert check_depths("4, 2,4", 16) == (4, 2)
    with pytest.raises(ConfigError):
        check_depths("17", 16)


def test_the_verdict_says_whether_it_pays():
    def row(k, speedup, adapts=False):
        shares = {"acceptance": 0.8 if k else None, "tokens_per_step": 2.0}
        return {"kv": "int4", "k": k, "adapts": adapts, "speedup": speedup, "batch": 1, **shares}

    assert (
        "pays at batch 1: 1.50 times" in verdict([row(0, 1), row(2, 1.2), row(4, 1.5), row(4, 1.4, True)])[0]
    )
    assert "does not pay" in verdict([row(0, 1), row(2, 0.7), row(2, 1.0, True)])[0]
