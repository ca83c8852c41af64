"""What `kvq inspect`, `kvq models` and `kvq plan` say of models whose layers differ."""

import json

import pytest
from transformers import AutoConfig

from kvq.commands.quality.layer_kinds import in_words, layer_kinds
from kvq.geometry import LayerGeometry, ModelGeometry, StateGeometry, StateTensor

HYBRID = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "vocab_size": 256,
    "max_position_embeddings": 4096,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
STATE = (
    4 * 16 * 16 * 4 + (2 * 2 + 4) * 16 * 4 * 2
)  # bytes: heads in fp32, the convolution's inputs in 16 bits


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory):
    """A folder with the config.json of a model that is on no list: every fourth layer attends."""
    folder = tmp_path_factory.mktemp("hybrid")
    config = AutoConfig.for_model("qwen3_next", **HYBRID)
    config.save_pretrained(folder)
    return folder


def test_layers_are_shown_by_kind(kvq, hybrid, tmp_path):
    path = tmp_path / "i.json"
    status, out, err = kvq("inspect", "--model", hybrid, "--json", path)
    assert status == 0, err
    assert "Qwen3NextGatedDeltaNet" in out
    assert "0-2, 4-6" in out
    assert f"states: {6 * STATE:,} B a sequence" in out
    (row,) = json.loads(path.read_text())["rows"]
    assert [layer["number"] for layer in row["layers"]] == [3, 7]
    assert row["state_bytes"] == 6 * STATE
    full, states = row["layer_kinds"]
    assert (full["kind"], full["layers"], full["elements_per_token"]) == ("full", 2, 2 * 2 * 16)
    assert states["numbers"] == [0, 1, 2, 4, 5, 6]
    assert states["state_bytes"] == STATE
    assert next(x for x in row["formats"] if x["kv"] == "bf16")["kv_bytes_per_token"] == 2 * 2 * 2 * 16 * 2


def test_a_folder_of_a_family_that_is_on_no_list_is_planned(kvq, hybrid, tmp_path):
    path = tmp_path / "p.json"
    status, out, err = kvq(
        "plan", "--model", hybrid, "--gpu", "l4", "--kv", "fp16", "--context", 2048, "--json", path
    )
    assert status == 0, err
    assert "for every sequence, whatever its length" in out
    (row,) = json.loads(path.read_text())["rows"]
    assert row["state_bytes"] == 6 * STATE
    assert row["kv_bytes_per_token"] == 2 * 2 * 2 * 16 * 2
    assert {"expert weights", "linear weights"} <= {term["name"] for term in row["terms"]}
    assert f"--max-num-seqs {row['max_users']}" in row["serve"], "for whose states room was made"


def test_loads_of_a_hybrid_are_simulated(kvq):
    options = ("--gpu", "h200", "--kv", "fp16", "--rate", 2, "--requests", 4, "--input-len", 64)
    status, _, err = kvq("simulate", "--model", "qwen3.5-35b-a3b", *options, "--output-len", 8)
    assert status == 0, err


def test_known_models_are_listed_with_kinds_and_sources(kvq, tmp_path):
    path = tmp_path / "m.json"
    status, out, _ = kvq("models", "--json", path)
    assert status == 0
    assert "12 full + 36 Qwen3NextGatedDeltaNet" in out
    assert "61 latent" in out
    rows = {row["model"]: row for row in json.loads(path.read_text())["rows"]}
    assert len(rows) >= 80
    for row in rows.values():
        assert row["source"].startswith("https://")
        assert row["read"] >= "2026-11-27"
    assert rows["gemma-4-e2b"]["kinds"] == "12 sliding-512 + 3 full + 20 shared"
    assert rows["kimi-k2"]["layer_kinds"][0]["elements_per_token"] == 576


@pytest.mark.parametrize("name", ["Qwen/Qwen3-Next-80B-A3B-Instruct", "QWEN3-next-80b-a3b"])
def test_models_are_found_by_their_names_on_the_hub(kvq, monkeypatch, name):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    status, out, err = kvq("plan", "-m", name, "--gpu", "h200", "-tp", 2, "--context", 4096, "--kv", "int4")
    assert status == 0, err
    assert "states" in out


def test_what_kvq_does_not_run_is_planned_and_said(kvq, tmp_path):
    path = tmp_path / "p.json"
    options = ("--gpu", "h100", "--context", 4096, "--kv", "fp16", "--json", path)
    status, out, err = kvq("plan", "-m", "mimo-v2-flash", "-tp", 16, *options)
    assert status == 0, err
    (row,) = json.loads(path.read_text())["rows"]
    if row["refused"] is not None:
        assert f"kvq does not run mimo-v2-flash: {row['refused']}" in out
        assert row["serve"] is None


def test_misspelled_names_get_near_ones(kvq):
    status, _, err = kvq("plan", "-m", "qwen3.5-27", "--gpu", "h100", "--context", "64")
    assert status == 2
    assert "did you mean 'qwen3.5-27b'" in err


def test_vllms_blocks_of_states_and_latents_are_not_made_up(kvq):
    for name in ("qwen3.5-27b", "deepseek-v2-lite"):
        options = ("--gpu", "h200", "--context", 64, "--kv", "int4")
        status, _, err = kvq("plan", "--engine", "vllm", "-m", name, *options)
        assert status == 2
        assert name in err


def test_kinds_in_words():
    def layer(index, number, **changes):
        return LayerGeometry(index=index, number=number, kv_heads=1, k_head_dim=8, v_head_dim=8, **changes)

    tensor = StateTensor(name="conv", index=0, shape=(4, 2), dtype=None)
    geometry = ModelGeometry(
        model_type="none",
        layers=(layer(0, 0, window=64), layer(1, 2, readers=(3, 4)), layer(2, 5, is_latent=True)),
        q_heads=2,
        hidden_size=16,
        vocab_size=8,
        max_context=64,
        states=(StateGeometry(number=1, kind="Conv", tensors=(tensor,)),),
    )
    assert in_words(geometry) == "1 sliding-64 + 1 full + 1 latent + 2 shared + 1 Conv"
    shared = next(row for row in layer_kinds(geometry) if row["kind"] == "shared")
    assert (shared["numbers"], shared["reads"]) == ([3, 4], 2)
    assert sum(row["layers"] for row in layer_kinds(geometry)) == 6
