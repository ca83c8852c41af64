"""Models and GPUs that kvq knows, and how their parameters are counted."""

import json
import re
import runpy
import subprocess
import sys
from datetime import date
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from kvq.capacity.plan.catalogue import decode_shape, find_model, known_models
from kvq.capacity.plan.gpus import find_gpu, known_gpus, read_gpus
from kvq.errors import ConfigError
from kvq.geometry import parse_geometry
from kvq.models.observe.counted import count_module
from kvq.sizing.parameters import count_parameters


@pytest.mark.parametrize("name", known_models())
def test_a_models_geometry_has_the_parameters_that_were_published_with_it(name):
    model = find_model(name)
    counted = model.parameters
    assert model.published in (None, counted.total)
    assert counted.active <= counted.total
    if not counted.tables:
        assert (counted.active < counted.total / 2) == bool(counted.experts)


@pytest.mark.parametrize("name", known_models())
def test_a_model_has_about_as_many_parameters_as_its_name_says(name):
    """Names round, and count vision towers and modules that guess tokens ahead."""
    said = re.search(r"-(\d+(?:\.\d+)?)(b|m)(?:-a(\d+(?:\.\d+)?)(b|m))?(?:-|$)", name)
    if said is None:
        return
    size = {"b": 1e9, "m": 1e6}
    number, unit, active, of_active = said.groups()
    counted = find_model(name).parameters
    if not name.startswith("gemma-4-e"):
        assert counted.total == pytest.approx(float(number) * size[unit], rel=0.25, abs=0.7 * size[unit])
    if active is not None:
        unit = size[of_active]
        assert counted.active == pytest.approx(float(active) * unit, rel=0.25, abs=0.7 * unit)


def test_every_model_says_where_and_when_its_facts_were_read():
    models = known_models().values()
    assert len(models) >= 80
    assert len({model.model for model in models}) == len(models), "one model twice"
    for model in models:
        assert re.fullmatch(r"https://\S+/\S+", model.source), model.name
        assert date.fromisoformat(model.read) <= date.today(), model.name
        assert re.fullmatch(r"[\w.-]+/[\w.-]+", model.model), model.name


def test_models_of_every_kind_of_layer_are_known():
    geometries = {name: model.geometry for name, model in known_models().items()}
    kinds = {
        "states": [name for name, geometry in geometries.items() if geometry.states],
        "latent": [name for name, g in geometries.items() if any(x.is_latent for x in g.layers)],
        "shared": [name for name, g in geometries.items() if any(x.readers for x in g.layers)],
        "windows": [name for name, g in geometries.items() if any(x.window for x in g.layers)],
    }
    assert {kind: len(names) for kind, names in kinds.items()} | {"states": 16, "latent": 12} == {
        kind: len(names) for kind, names in kinds.items()
    }
    assert len(kinds["shared"]) >= 3
    assert len(kinds["windows"]) > 10
    state_classes = {state.kind for name in kinds["states"] for state in geometries[name].states}
    assert {"Qwen3NextGatedDeltaNet", "NemotronHMamba2Mixer", "JambaMambaMixer", "Lfm2MoeShortConv"} < (
        state_classes
    )


TOOL = Path(__file__).parents[3] / "tools" / "model_catalogue.py"


@pytest.mark.parametrize("name", ["gemma-4-e2b", "kimi-k2", "mimo-v2-flash", "nemotron-3-nano-30b-a3b"])
def test_shapes_are_written_and_read_again(name):
    geometry = find_model(name).geometry
    shape = runpy.run_path(str(TOOL))["encode_shape"](geometry)
    assert decode_shape(json.loads(json.dumps(shape))) == geometry


def test_a_latent_layer_has_576_values_a_token_and_a_state_one_size():
    v3 = find_model("deepseek-v3").geometry
    assert v3.elements_per_token == 61 * 576
    qwen = find_model("qwen3-next-80b-a3b").geometry
    heads, conv = 32 * 128 * 128 * 4, (2 * 16 + 32) * 128 * 4 * 2
    assert qwen.state_bytes(2) == 36 * (heads + conv)
    assert qwen.elements_per_token == 12 * 2 * 2 * 256
    assert (qwen.last_layer, len(qwen.layers), len(qwen.states)) == (47, 12, 36)


@pytest.mark.parametrize("name", ["gemma-4-e2b", "bamba-9b", "deepseek-v2-lite"])
def test_shapes_are_as_transformers_code_has_them(name):
    assert runpy.run_path(str(TOOL))["differs"](find_model(name)) == []


@pytest.mark.long
def test_the_whole_catalogue_is_as_transformers_code_has_it():
    run = subprocess.run([sys.executable, TOOL, "--check"], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    assert ": no differences" in run.stdout


SMALL = {
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 16,
    "vocab_size": 500,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}
EXPERTS = {"num_local_experts": 5, "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
LATENT = {
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
}
LATENT |= {
    "moe_intermediate_size": 24,
    "num_experts_per_tok": 2,
    "n_routed_experts": 8,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 2,
    "num_key_value_heads": 6,
}
CASES = {
    **{
        kind: {}
        for kind in ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "phi3", "phi")
    },
    "llama with biases": {"attention_bias": True},
    "llama, tied": {"tie_word_embeddings": True},
    "qwen2, untied": {"tie_word_embeddings": False},
    "mixtral": EXPERTS,
    "qwen3_moe": EXPERTS | {"decoder_sparse_step": 2, "mlp_only_layers": [1]},
    "gpt_oss": EXPERTS,
    "deepseek_v3": LATENT,
    "deepseek_v3 with whole queries": LATENT | {"q_lora_rank": None},
    "llama4_text": EXPERTS | {"intermediate_size_mlp": 200, "interleave_moe_layer_step": 2},
    "llama4_text with experts everywhere": EXPERTS | {"intermediate_size_mlp": 200},
}


@pytest.mark.parametrize("name", CASES)
def test_every_familys_weights_are_those_of_the_live_model(name):
    config = SMALL | CASES[name] | {"model_type": name.split()[0].strip(",")}
    with torch.device("meta"):
        live = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    # What the class's defaults decide is in the file of a real model.
    config["tie_word_embeddings"] = live.config.tie_word_embeddings
    counted = count_parameters(config, parse_geometry(config))
    buffers = sum(b.numel() for n, b in live.named_buffers() if n.endswith("e_score_correction_bias"))
    assert counted.total == sum(p.numel() for p in live.parameters()) + buffers
    assert count_module(live) == counted
    assert sorted(count_module(live).matrices) == sorted(counted.matrices), "names decide what is quantized"
    assert sum(count for _, count, _ in counted.matrices) == counted.linear + counted.experts


def test_families_without_a_formula_say_what_to_give_instead():
    config = {"model_type": "cohere", "num_hidden_layers": 2}
    with pytest.raises(ConfigError, match="give --weights"):
        count_parameters(config, parse_geometry(config))


def test_names_are_found_in_any_case_and_near_ones_are_named():
    assert find_model("Llama-3-8B").name == "llama-3-8b"
    assert find_gpu("H100").name == "h100"
    assert find_gpu("RTX 4090") == find_gpu("rtx_4090")
    with pytest.raises(ConfigError, match="did you mean 'llama-3-70b'"):
        find_model("llama-3-70")
    with pytest.raises(ConfigError, match="say which: a100-40, a100-80"):
        find_gpu("a100")


def test_gpus_have_what_drivers_tell_and_not_what_data_sheets_say():
    """Within a tenth of the sheet's number, which is GB with some makers and GiB with others."""
    for name, gpu in known_gpus().items():
        assert 0.94e9 < gpu.memory_bytes / gpu.memory_gb < 1.08e9, name
        assert (gpu.total_mib is None) or gpu.source, f"{name}: nobody can look it up"
    assert find_gpu("h100").memory_bytes == 81_009 * 2**20
    assert sum(gpu.total_mib is not None for gpu in known_gpus().values()) > 5


def test_the_gpus_are_as_their_makers_say():
    memory = {name: gpu.memory_gb for name, gpu in known_gpus().items()}
    assert memory | {"b200": 180, "l4": 24} == memory
    h100 = find_gpu("h100")
    assert (h100.bandwidth, h100.usd_per_hour) == (3.35e12, 10)
    assert h100.tflops["fp16"] == 989  # dense; with sparsity 1,979
    assert all(gpu.tflops["fp16"] < 2500 for gpu in known_gpus().values())


GOOD = {"memory_gb": 1, "bandwidth_tb_s": 1, "usd_per_hour": 1, "tflops": {"fp16": 1}}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"format_version": 2, "gpus": {"a": GOOD}}, "format_version 1"),
        ({"format_version": 1, "gpus": {}}, "must map names"),
        ({"format_version": 1, "gpus": {"a": {"memory_gb": 1}}}, "a must have"),
        (
            {"format_version": 1, "gpus": {"a": GOOD | {"memory_gb": -1}}},
            "a: memory_gb must be a number above 0, got -1",
        ),
        ({"format_version": 1, "gpus": {"a": GOOD | {"usd_per_hour": "x"}}}, "usd_per_hour"),
        ({"format_version": 1, "gpus": {"a": GOOD | {"tflops": {}}}}, "tflops"),
        ({"format_version": 1, "gpus": {"a": GOOD | {"tflops": {"fp8": 1}}}}, "tflops need fp16"),
        ([], "format_version"),
    ],
)
def test_files_of_gpus_say_what_is_wrong_with_them(tmp_path, data, message):
    path = tmp_path / "gpus.json"
    path.write_text(json.dumps(data))
    with pytest.raises(ConfigError, match=message):
        read_gpus(path)


def test_a_file_of_gpus_replaces_kvqs_own(tmp_path):
    path = tmp_path / "gpus.json"
    path.write_text(json.dumps({"format_version": 1, "gpus": {"mine": GOOD}}))
    assert find_gpu("mine", read_gpus(path)).memory_gb == 1
    with pytest.raises(ConfigError, match="no file of GPUs"):
        read_gpus(tmp_path / "none.json")


@pytest.mark.parametrize(
    "name", ["llama-4-scout", "deepseek-v3", "gpt-oss-120b", "llama-2-7b", "mistral-7b-v0.1"]
)
def test_what_is_its_classes_default_is_as_there(name):
    config = dict(find_model(name).config)
    live = AutoConfig.for_model(config.pop("model_type")).to_dict()
    config.pop("max_position_embeddings")  # defaults are shorter than what was published
    for key, value in config.items():
        default = live[key]
        assert value == (value if default is None else default), key
