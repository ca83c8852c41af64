"""Families on no list are served if a small twin proves them, and refused with what is wrong if not."""

import json
import logging
import re
from dataclasses import replace

import pytest
import torch
from transformers import AutoConfig

from kvq.errors import ModelError
from kvq.geometry import FAMILIES
from kvq.models import load
from kvq.models.describe.modules import config_of
from kvq.models.loading.prepared import prepare
from kvq.models.observe.tiny_copy import build_tiny_copy
from kvq.models.prove import proof
from kvq.models.prove.probe import relative_error
from kvq.models.prove.proof import TOLERANCE, prove
from kvq.server.admission.config import ServerConfig
from kvq.server.check import check_config
from tests.helpers_models import eager_logits, load_eager, random_tokens
from tests.models.test_families import check_against_transformers
from tests.models.wrong_models import HIDDEN, PLAIN, WRONG, plainly, save_wrong
from tools.model_table import GIVEN, all_names, apart

# Experts, windows beside full layers, sinks, latent attention, heads of two sizes, gates, K and V that layers
# share, chunks and scores scaled by position, sinks of some layers only, an encoder that is a decoder.
SAMPLE = ["olmoe", "cohere2_moe", "flint", "minicpm3", "gemma4_text", "afmoe"]
SAMPLE += ["gemma3n_text", "llama4_text", "mimo_v2_flash", "bert", "stablelm"]
SHARING = {"num_kv_shared_layers": 18}


def save_twin(folder, name, **given):
    config = AutoConfig.for_model(name, **(GIVEN.get(name, {}) | given)).to_dict()
    build_tiny_copy(config).save_pretrained(folder)
    return folder


@pytest.mark.daily(6)
@pytest.mark.parametrize("name", SAMPLE)
def test_a_family_on_no_list_equals_transformers_alone_and_packed(name, tmp_path):
    folder = save_twin(tmp_path, name)
    assert name not in FAMILIES
    check_against_transformers(folder, decoded=24)


def test_layers_of_several_kinds_are_told_apart(tmp_path):
    geometry = prepare(save_twin(tmp_path, "gemma4_text")).geometry
    assert [layer.window for layer in geometry.layers] == [16] * 5 + [None]
    assert {layer.k_head_dim for layer in geometry.layers} == {16, 32}
    assert prepare(save_twin(tmp_path / "sinks", "flint")).geometry.has_sinks


def test_layers_that_read_another_ones_k_and_v_store_none(tmp_path):
    geometry = prepare(save_twin(tmp_path, "gemma4_text", **SHARING)).geometry
    assert [layer.number for layer in geometry.layers] == [0, 1, 2, 3, 4, 5]
    assert [layer.readers for layer in geometry.layers[:4]] == [()] * 4
    assert geometry.layers[4].readers == (6, 7, 8, 9, 10)
    assert geometry.layers[5].readers == (11,)
    assert (geometry.place(9), geometry.stores(9), geometry.stores(4)) == (4, False, True)


def test_chunks_and_sinks_of_some_layers_are_told_apart(tmp_path):
    chunked = prepare(save_twin(tmp_path / "chunks", "llama4_text")).geometry
    assert {(layer.window, layer.is_chunked) for layer in chunked.layers} == {(16, True), (None, False)}
    some = prepare(save_twin(tmp_path / "sinks", "mimo_v2_flash")).geometry
    assert {some.has_sinks_of(place) for place in range(len(some.layers))} == {True, False}


def test_other_parts_of_a_step_see_only_their_chunk_of_quantized_blocks(tmp_path):
    folder = save_twin(tmp_path, "llama4_text")
    ids = random_tokens(75, seed=2)
    want = eager_logits(load_eager(folder), ids)
    for kv, allowed in (("int8", 0.05), ("int8+recent=24", 0.05)):
        session = load(folder, kv, dtype="fp32", block_size=8).session(max_tokens=75)
        sequence, rows = session.new_sequence(), []
        for part in (ids[:30], ids[30:31], ids[31:]):
            rows += [session.forward([(sequence, part)], all_rows=True)[0].logits]
        assert 1e-5 < relative_error(torch.cat(rows), want) < allowed


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("glm_moe_dsa", {}),
        ("deepseek_v32", {}),
        ("deepseek_v4", {}),
        ("minimax_m3_vl_text", {"layer_types": ["full_attention", "minimax_m3_sparse"] * 30}),
    ],
)
def test_layers_that_select_keys_are_refused_however_short_the_context_is(name, given, tmp_path):
    AutoConfig.for_model(name, **given).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"select keys with an indexer \(\w*Indexer\w*\)"):
        load(tmp_path)


def test_its_blocks_may_have_any_format(tmp_path):
    folder = save_twin(tmp_path, "olmoe")
    ids = random_tokens(60, seed=2)
    want = eager_logits(load_eager(folder), ids)
    session = load(folder, "int8", dtype="fp32").session(max_tokens=60)
    [result] = session.forward([(session.new_sequence(), ids)], all_rows=True)
    assert 1e-5 < relative_error(result.logits, want) < 0.05


@pytest.mark.long
def test_every_causal_model_of_transformers_is_served_rightly_or_refused():
    found = {name: apart(name) for name in all_names()}
    assert [name for name, (end, _) in found.items() if end == "WRONG"] == []
    assert sum(end in ("list", "proof") for end, _ in found.values()) >= 60
    assert {name for name, (end, _) in found.items() if end == "list"} == set(FAMILIES)


@pytest.mark.parametrize("name", ["bamba", "falcon_h1", "nemotron_h"])
def test_infinity_as_transformers_saves_it_is_read(name, tmp_path):
    AutoConfig.for_model(name).save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert {"__float__": "Infinity"} in saved["time_step_limit"]
    assert config_of(saved).time_step_limit[1] == float("inf")
    with pytest.raises(ModelError, match=r"has no model\.safetensors|none of its layers attends"):
        load(tmp_path)


def test_a_value_that_a_family_on_no_list_can_not_have_is_named(tmp_path):
    config = AutoConfig.for_model("bamba").to_dict() | {"time_step_limit": [0.0, {"__float__": "many"}]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"config\.json: time_step_limit can't be .* in a bamba model"):
        load(tmp_path)


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity"])
def test_other_fields_can_not_be_infinite_in_either_spelling(value, tmp_path):
    for text in (value, json.dumps({"__float__": value})):
        config = AutoConfig.for_model("bamba").to_dict() | {"embedding_multiplier": "here"}
        (tmp_path / "config.json").write_text(json.dumps(config).replace('"here"', text))
        with pytest.raises(ModelError, match=r"embedding_multiplier is .*, which no model's can be"):
            load(tmp_path)


@pytest.mark.daily(3)
@pytest.mark.parametrize(
    "name", [*SAMPLE, "gemma4_unified_text", "granitemoe", "qwen3_next", "longcat_flash"]
)
def test_configs_of_whole_models_are_proven(name, tmp_path):
    """Whose twins are cut from many layers; those of other tests are small from the start."""
    config = AutoConfig.for_model(name, **GIVEN.get(name, {})).to_dict()
    prove(replace(prepare(save_twin(tmp_path, name)), config=config))


def test_more_layers_than_any_model_has_are_refused_before_they_are_made(tmp_path):
    config = AutoConfig.for_model("olmoe", num_hidden_layers=10_000_000)
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()), encoding="utf-8")
    with pytest.raises(ModelError, match="num_hidden_layers may be up to 10000, got 10000000"):
        load(tmp_path)


@pytest.mark.parametrize("name", sorted(HIDDEN))
def test_what_few_layers_and_tokens_do_not_show_is_looked_for(name, tmp_path):
    eager, attend, fields, says = HIDDEN[name]
    with pytest.raises(ModelError, match=f"does not run wrong_{name}: .*{says}"):
        load(save_wrong(tmp_path, name, eager, attend, **fields), dtype="fp32")


@pytest.mark.parametrize("name", sorted(WRONG))
def test_a_model_that_attends_otherwise_is_refused_with_what_is_wrong(name, tmp_path):
    eager, attend, says = WRONG[name]
    folder = save_wrong(tmp_path, name, eager, attend)
    with pytest.raises(ModelError, match=f"wrong_{name}: .*{says}"):
        load(folder, "fp32", dtype="fp32")


def test_code_that_falls_over_in_a_small_one_is_a_model_that_does_not_run(tmp_path, monkeypatch):
    """Whatever untried code raises is told with its words, and never a traceback in place of a refusal."""

    def falls_over(*_):
        raise AttributeError("no such cache")

    monkeypatch.setattr(proof, "eager_logits", falls_over)
    with pytest.raises(ModelError, match=r"does not run olmoe: .*can't be run \(.*no such cache") as raised:
        prove(prepare(save_twin(tmp_path, "olmoe")))
    assert isinstance(raised.value.__cause__, AttributeError)


def test_a_server_that_is_only_checked_refuses_it_too(tmp_path):
    eager, attend, says = WRONG["clipped"]
    folder = save_wrong(tmp_path, "clipped", eager, attend)
    [finding] = [one for one in check_config(ServerConfig(model=folder, kv="int8", port=0)) if one.is_error]
    assert says in finding.text


def test_what_the_wrong_models_change_is_all_that_is_wrong_with_them(tmp_path, caplog):
    folder = save_wrong(tmp_path, "nothing", PLAIN, plainly)
    with caplog.at_level(logging.INFO, logger="kvq"):
        check_against_transformers(folder, decoded=24)
    [line] = [text for text in caplog.messages if "checked families" in text]
    found = re.fullmatch(
        r"wrong_nothing is not among the checked families; it agrees with its own attention to (\d+e-\d+)",
        line,
    )
    assert 0 < float(found[1]) <= TOLERANCE
