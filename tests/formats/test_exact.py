"""Tokens that stay unquantized: how they are spelled, saved, and refused."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvq.errors import ConfigError
from kvq.formats import ExactTokens, KVRecipe, split_exact

DIMS = [(64, 64), (80, 48)]
DIGEST = "0123456789abcdef" * 4


@pytest.mark.parametrize(
    ("given", "formats", "exact"),
    [
        ("int3", "int3", ExactTokens()),
        ("int3+sinks=4+recent=128", "int3", ExactTokens(sinks=4, recent=128)),
        ("int3+recent=128+sinks=4", "int3", ExactTokens(sinks=4, recent=128)),
        (" INT8/INT4_mean + Recent=64 ", "int8/int4_mean ", ExactTokens(recent=64)),
        ("k8v4+sinks=65536", "k8v4", ExactTokens(sinks=65536)),
        ("bf16+sinks=0+recent=00", "bf16", ExactTokens()),
    ],
)
def test_sinks_and_recent_follow_the_formats_in_either_order(
    given: str, formats: str, exact: ExactTokens
) -> None:
    assert split_exact(given) == (formats, exact)
    recipe = KVRecipe.uniform(given, DIMS)
    assert (recipe.exact, recipe.layers) == (exact, KVRecipe.uniform(formats, DIMS).layers)
    assert recipe.is_staged is ("_mean" in given or exact != ExactTokens())


@pytest.mark.parametrize("exact", [ExactTokens(), ExactTokens(sinks=4), ExactTokens(recent=9, sinks=1)])
def test_what_is_shown_reads_back(exact: ExactTokens) -> None:
    assert split_exact(f"int4{exact}") == ("int4", exact)
    assert ("+sinks=" in str(exact), "+recent=" in str(exact)) == (exact.sinks > 0, exact.recent > 0)


@pytest.mark.parametrize(
    ("given", "part"),
    [
        ("int4+", ""),
        ("int4+sinks", "sinks"),
        ("int4+sinks=", "sinks="),
        ("int4+sinks=-1", "sinks=-1"),
        ("int4+sinks=4.5", "sinks=4.5"),
        ("int4+sink=4", "sink=4"),
        ("int4+sinks=4+sinks=4", "sinks=4"),
        ("int4+recent=1000000", "recent=1000000"),
        ("int4+int8", "int8"),
        ("int4+recent=8/int8", "recent=8/int8"),
    ],
)
def test_anything_else_after_a_plus_is_refused_with_what_may_come(given: str, part: str) -> None:
    with pytest.raises(ConfigError) as refused:
        KVRecipe.uniform(given, DIMS)
    assert "+sinks=N and +recent=N, each at most once, in tokens" in str(refused.value)
    assert f"got {part!r} in {given!r}" in str(refused.value)


@pytest.mark.parametrize("name", ["sinks", "recent"])
@pytest.mark.parametrize("value", [-1, 65537, 4.0, "4", True, None, [4]])
def test_a_number_of_tokens_out_of_range_is_refused_wherever_it_stands(
    name: str, value: Any, tmp_path: Path
) -> None:
    reason = f"{name} must be 0 to 65536 tokens, got "
    with pytest.raises(ConfigError) as refused:
        ExactTokens(**{name: value})
    assert str(refused.value) == f"{reason}{value!r}"
    data = {**KVRecipe.uniform("int4+sinks=4", DIMS).to_json(), name: value}
    (tmp_path / "odd.json").write_text(json.dumps(data), encoding="utf-8")
    with pytest.raises(ConfigError, match=rf"odd\.json: {reason}"):
        KVRecipe.load(tmp_path / "odd.json")
    if value == 65537:
        with pytest.raises(ConfigError, match=reason):
            KVRecipe.uniform(f"int4+{name}={value}", DIMS)


@pytest.mark.parametrize("exact", [{}, {"sinks": 4}, {"recent": 128}, {"sinks": 1, "recent": 65536}])
def test_a_kvq_json_holds_them_only_where_there_are_any(exact: dict[str, int], tmp_path: Path) -> None:
    made = replace(KVRecipe.uniform("int4", DIMS), exact=ExactTokens(**exact), model_digest=DIGEST)
    made.save(tmp_path / "kvq.json")
    data = json.loads((tmp_path / "kvq.json").read_text(encoding="utf-8"))
    assert {name: data[name] for name in ("sinks", "recent") if name in data} == exact
    loaded = KVRecipe.load(tmp_path / "kvq.json")
    assert loaded.exact == made.exact
    assert loaded.digest() == made.digest()
    assert (loaded.digest() == replace(made, exact=ExactTokens()).digest()) is not bool(exact)


def test_a_misspelled_key_is_refused_with_the_nearest(tmp_path: Path) -> None:
    data = {**KVRecipe.uniform("int4", DIMS).to_json(), "recents": 4}
    (tmp_path / "odd.json").write_text(json.dumps(data), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"odd\.json: unknown key 'recents'; did you mean 'recent'"):
        KVRecipe.load(tmp_path / "odd.json")


@pytest.mark.parametrize("kv", ["int4_mean", "int8/int3_mean", "int4+recent=1", "bf16+sinks=1"])
def test_who_cannot_hold_waiting_tokens_refuses_by_name_with_a_way_out(kv: str) -> None:
    with pytest.raises(ConfigError) as refused:
        KVRecipe.uniform(kv, DIMS).check_unstaged("LMCache")
    assert str(refused.value).startswith(f"{kv} keeps tokens unquantized")
    assert "LMCache can't do; use formats without _mean, and no sinks or recent tokens" in str(refused.value)


@pytest.mark.parametrize("kv", ["int4", "int2/int8", "int4_g8_s8", "bf16"])
def test_other_recipes_are_held_everywhere(kv: str) -> None:
    KVRecipe.uniform(kv, DIMS).check_unstaged("LMCache")


@pytest.mark.parametrize("edited", [{"sinks": 8}, {"recent": 127}, {"recent": 0}])
def test_editing_them_in_a_file_of_one_model_is_found_and_the_layer_named(
    edited: dict[str, int], tmp_path: Path
) -> None:
    path = tmp_path / "kvq.json"
    recipe = replace(KVRecipe.uniform("int3+sinks=4+recent=128", [(64, 64)]), model_digest="a model's")
    recipe.save(path)
    assert KVRecipe.load(path) == replace(recipe, label="")
    path.write_text(json.dumps(json.loads(path.read_text()) | edited))
    with pytest.raises(ConfigError, match=r"layers\[0\]"):
        KVRecipe.load(path)
