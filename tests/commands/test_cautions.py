"""What a model can't show is said first, unasked, wherever formats are judged by a text."""

import json
import re

import pytest
from safetensors.torch import load_file, save_file

from tests.helpers_models import save_first_layers

FEW = ("--context", 64, "--max-windows", 2)
HEDGES = (
    "chance",
    "guess",
    "random",
    "uniform",
    "can't show",
    "cannot show",
    "can't tell",
    "too weak",
    "untrained",
)


def changed(folder, name, change):
    """The first two layers of the embedded model, with all weights of that name changed."""
    save_first_layers(folder, 2)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    assert any(name in key for key in tensors)
    save_file({key: change(x) if name in key else x for key, x in tensors.items()}, path, {"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def guessing(tmp_path_factory):
    """A model whose tokens are others than its tokenizer's."""
    return changed(tmp_path_factory.mktemp("guessing") / "m", "embed_tokens", lambda x: x.roll(7, 0))


@pytest.fixture(scope="module")
def deaf(tmp_path_factory):
    """A model that hears nothing of what its cache holds."""
    return changed(tmp_path_factory.mktemp("deaf") / "m", "o_proj", lambda x: x * 0)


def first_line(said):
    return said.strip().split("\n")[0]


def test_a_model_at_chance_is_told_first_on_page_terminal_and_in_json(kvq, guessing, tmp_path):
    page, path = tmp_path / "p.html", tmp_path / "p.json"
    status, said, _ = kvq(
        "perplexity", "--model", guessing, "--kv", "bf16,int8,int4", *FEW, "--html", page, "--json", path
    )
    assert status == 0
    assert re.match(
        r"caution: this model can't show damage .* no better than chance \([\d.,]+ by counting",
        first_line(said),
    )
    result = json.loads(path.read_text())
    assert first_line(said) == f"caution: {result['cautions'][0]}"
    assert list(result).index("cautions") < list(result).index("model")
    assert result["rows"][0]["perplexity"] >= result["rows"][0]["chance_perplexity"]
    html = page.read_text()
    assert html.index("no better than chance") < html.index("<table")
    assert "is the smallest" not in html


def test_a_model_that_hears_nothing_of_its_cache_is_told_first(kvq, deaf, tmp_path):
    page = tmp_path / "e.html"
    options = ("--kv", "bf16,int8,int2", "--context", 256, "--max-windows", 2, "--tasks", "kl,attention")
    status, said, _ = kvq("eval", deaf, *options, "--attention-windows", 1, "--html", page)
    assert status == 0
    assert "int2 looks harmless over its first 255 tokens (mean KL 0, perplexity +0.0%)" in said
    assert "attention cut to 64 tokens looks harmless" in said
    assert said.index("looks harmless") < said.index("model   ")
    assert "what that says" not in said
    assert "harmless: KL" not in re.sub(r"(?s).*</h1>", "", page.read_text())
    told = json.loads(page.with_suffix(".json").read_text())["cautions"]
    assert all(any(word in line for line in told) for word in ("int2 looks", "attention cut to 64"))


def test_the_thorough_check_that_fails_is_told_first_too(kvq, tmp_path):
    page, path = tmp_path / "p.html", tmp_path / "p.json"
    outputs = ("--html", page, "--json", path)
    status, said, _ = kvq("perplexity", "--kv", "fp32,int8", *FEW, "--instrument", *outputs)
    assert status == 1  # windows of 64 tokens lose nothing at 64
    assert "can NOT show damage" in first_line(said)
    result = json.loads(path.read_text())
    assert "can NOT show damage" in result["cautions"][0]
    assert "look" not in result
    assert page.read_text().count("can NOT show damage") == 1


def test_tune_says_it_of_its_recipe(kvq, deaf, tmp_path):
    out, path, page = (tmp_path / name for name in ("kvq.json", "t.json", "t.html"))
    few = ("--context", 96, "--max-windows", 2, "--verify-windows", 2, "--formats", "int8,int4")
    status, said, _ = kvq(
        "tune", deaf, "--budget", "5bits", *few, "--out", out, "--json", path, "--html", page
    )
    assert status == 0
    assert first_line(said).startswith("caution: this model can't show damage on this text: ")
    result = json.loads(path.read_text())
    assert any("int2 looks harmless" in line for line in result["cautions"])
    assert "harmless" not in result["verdict"]
    html = page.read_text()
    assert html.index("int2 looks harmless") < html.index("bits per element")


def test_calibrate_does_not_call_scales_fit_by_such_a_text(kvq, deaf, tmp_path):
    text, path = tmp_path / "other.txt", tmp_path / "c.json"
    text.write_text("Words of another kind, which the model reads or does not. " * 400)
    options = ("--context", 64, "--max-windows", 4, "--out", tmp_path / "kvq.json", "--json", path)
    status, said, _ = kvq("calibrate", deaf, "--check", text, *options)
    assert status == 0
    check = json.loads(path.read_text())["check"]
    assert check["is_fit"] is None
    assert any("int2 looks harmless" in line for line in check["cautions"])
    assert said.index("caution: this model can't show damage") < said.index(
        "may or may not be fit (see above)"
    )


def test_quantize_says_it_of_perplexity_before_and_after(kvq, guessing, tmp_path):
    options = (
        "--method",
        "rtn",
        "--bits",
        8,
        "--out",
        tmp_path / "q",
        "--eval",
        "--json",
        tmp_path / "q.json",
    )
    status, said, _ = kvq("quantize", guessing, *options)
    assert status == 0
    assert said.index("no better than chance") < said.index(" before, ")
    assert json.loads((tmp_path / "q.json").read_text())["perplexity"]["cautions"]


def test_compare_passes_it_on(kvq, guessing, tmp_path):
    paths = [tmp_path / name for name in ("a.json", "b.json")]
    for path in paths:
        assert kvq("perplexity", "--model", guessing, "--kv", "bf16,int8", *FEW, "--json", path)[0] == 0
    status, _, err = kvq("compare", *paths)
    assert status == 0
    for name in "AB":
        assert f"kvq: warning: {name}: this model can't show damage" in err
    damaged = json.loads(paths[0].read_text()) | {"cautions": [1]}
    paths[0].write_text(json.dumps(damaged))
    status, _, err = kvq("compare", *paths)
    assert status == 2
    assert "cautions must be a list of texts or null" in err


@pytest.mark.parametrize("context", [64, 256])
@pytest.mark.parametrize("command", ["perplexity", "eval"])
def test_nothing_of_the_kind_is_said_of_a_model_that_shows_damage(kvq, tmp_path, command, context):
    path = tmp_path / "p.json"
    sizes = ("--max-windows", 4, "--context", context)
    status, said, err = kvq(command, "--model", "tiny", "--kv", "bf16,int8", *sizes, "--json", path)
    assert status == 0
    assert not [hedge for hedge in HEDGES if hedge in (said + err).lower()]
    result = json.loads(path.read_text())
    assert result["cautions"] == []
    assert [row["instrument"] for row in result["look"]] == ["int2", "window"][
        : 1 + (context == 256)
    ] or context
