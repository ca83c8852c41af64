"""A config.json that doesn't fit the weights, or holds what no model has, is refused in kvq's own words."""

import json
import random
import resource
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from kvq.errors import KVQError, ModelError
from kvq.models.loading.prepared import prepare
from kvq.models.loading.skeleton import build_skeleton
from tests.helpers_models import save_model
from tests.weights import mutations

APART = "; config.json and weights belong to different models, or config.json was edited"
FOREIGN = ("report", "ignore_mismatched", "Validation error", "<class", "Traceback", "has no attribute")


def check(folder: Path) -> None:
    """All that is looked at before weights are read."""
    build_skeleton(prepare(folder, device="cpu"))


def refusal(folder: Path, **changes: Any) -> str:
    """What is said of a copy of the folder's config.json with these changes."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(ModelError) as caught:
        check(folder)
    return str(caught.value).removeprefix(f"{folder}/")


@pytest.fixture
def folder(two_layers: Path, tmp_path: Path) -> Path:
    """256 wide, 4 heads of 64, 2 KV heads, 768 inside, 4096 tokens; the head is the embedding."""
    return Path(shutil.copytree(two_layers, tmp_path / "model"))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"vocab_size": 40960}, "vocab_size 40960, but model.embed_tokens.weight has 4096 rows"),
        ({"hidden_size": 512}, "hidden_size 512, but model.embed_tokens.weight has 256 columns"),
        (
            {"num_key_value_heads": 4},
            "head_dim 64 and "
            "num_key_value_heads 4, but model.layers.0.self_attn.k_proj.weight has 128 rows, not 256",
        ),
        (
            {"num_attention_heads": 8},
            "head_dim 64 and "
            "num_attention_heads 8, but model.layers.0.self_attn.q_proj.weight has 256 rows, not 512",
        ),
        (
            {"intermediate_size": 10**15},
            f"intermediate_size {10**15}, but model.layers.0.mlp.gate_proj.weight has 768 rows",
        ),
        ({"num_hidden_layers": 1}, "num_hidden_layers 1, but the weights hold layers 0 to 1"),
        ({"num_hidden_layers": 9_999}, "num_hidden_layers 9999, but the weights hold layers 0 to 1"),
    ],
)  # fmt: skip
def test_a_field_that_does_not_fit_a_tensor_is_named_with_it(folder, changes, says):
    assert refusal(folder, **changes) == f"config.json says {says}{APART}"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"tie_word_embeddings": False}, "lacks lm_head.weight, and its config.json does not say"),
        ({"attention_bias": True}, "lacks 8 tensors, first model.layers.0.self_attn.k_proj.bias"),
        ({"head_dim": 10**12}, "2 KV heads of 1000000000000 and 1000000000000 numbers, 2000000000000 in all"),
        ({"hidden_size": 10**18}, "hidden_size is 1000000000000000000, which no model's can be"),
        ({"hidden_size": 1 << 80}, "hidden_size is a number of 81 bits"),
        ({"num_local_experts": 10**9}, "num_local_experts may be up to 10000"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
        ({"rms_norm_eps": float("inf")}, "rms_norm_eps is inf"),
        ({"rope_parameters": {"rope_theta": -1.0}}, "rope_parameters.rope_theta must be above 0, got -1.0"),
        ({"rope_theta": "x"}, "rope_theta must be a number above 0, got 'x'"),
        ({"rope_theta": "10000.0"}, "rope_theta must be a number above 0, got '10000.0'"),
        ({"rope_theta": False}, "rope_theta must be a number above 0, got False"),
        ({"rope_parameters": {"factor": "x"}}, "rope_parameters.factor must be a number above 0, got 'x'"),
        ({"architectures": "x"}, "architectures must be a list of names such as ['LlamaForCausalLM'], got"),
        ({"architectures": [7]}, "such as ['LlamaForCausalLM'], got [7]; correct it"),
        ({"rope_parameters": {"rope_type": "nope"}}, "rope_type 'nope' is none that"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_parameters can't be {'rope_type': 'yarn'}"),
        ({"hidden_size": True}, "hidden_size must be a positive number, got True"),
        ({"vocab_size": "4096"}, "vocab_size must be a positive number, got '4096'"),
        ({"intermediate_size": -1}, "intermediate_size can't be -1 in a llama model; correct it"),
        ({"use_cache": "no"}, "use_cache can't be 'no' in a llama model"),
        ({"dtype": "float7"}, "dtype must be a type of torch's such as 'bfloat16' or 'float32', got"),
        ({"eos_token_id": [0, 4096]}, "eos_token_id must be a token's id, 0 to 4095"),
        ({"pad_token_id": -2}, "pad_token_id must be a token's id, 0 to 4095"),
    ],
)  # fmt: skip
def test_values_that_no_model_has_are_refused_by_their_field(folder, changes, says):
    assert says in refusal(folder, **changes)


def test_ends_that_never_come_are_refused_in_the_generation_settings_too(folder):
    (folder / "generation_config.json").write_text('{"eos_token_id": [0, 151645]}')
    assert "generation_config.json: eos_token_id must be a token's id" in refusal(folder)


def test_a_head_of_another_size_than_the_embedding_is_named(folder):
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"][:4000].clone()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    assert refusal(folder) == f"config.json says vocab_size 4096, but lm_head.weight has 4000 rows{APART}"


def test_a_tokenizer_of_more_tokens_than_the_embedding_has_rows_is_refused(folder):
    prepared = prepare(folder, device="cpu")
    assert prepared.tokenizer.vocab_size == 4096
    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"][:4000].clone()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"vocab_size": 4000}))
    with pytest.raises(
        ModelError, match=r"its tokenizer has 4096 tokens, its config\.json says vocab_size 4000"
    ):
        _ = prepare(folder, device="cpu").tokenizer


@pytest.mark.parametrize(
    ("family", "changes", "says"),
    [
        ("gpt2", {"n_positions": 1 << 20}, "n_positions 1048576, but transformer.wpe.weight has 256 rows"),
        ("gpt2", {"n_embd": 128}, "n_embd 128, but transformer.wte.weight has 64 columns"),
        ("gpt_neox", {"vocab_size": 200}, "vocab_size 200, but gpt_neox.embed_in.weight has 199 rows"),
        ("mixtral", {"num_local_experts": 8}, "down_proj the shape [8, 64, 80], the weights [4, 64, 80]"),
        ("deepseek_v3", {"n_routed_experts": 8}, "n_routed_experts 8, but "),
        ("phi3", {"num_key_value_heads": 4}, "num_key_value_heads 4, but model.layers.0.self_attn.qkv_proj"),
    ],
)  # fmt: skip
def test_fields_of_other_families_are_found_without_a_rule_for_each(tmp_path, family, changes, says):
    assert says in refusal(save_model(tmp_path / family, family), **changes)


def test_a_hundred_mutations_load_rightly_or_are_refused_in_own_words(folder):
    """Of config.json alone; each in a hundredth of a second and without memory."""
    path, chance = folder / "config.json", random.Random(7)
    whole = path.read_bytes()
    config = json.loads(whole)
    check(folder)
    began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    texts = [json.dumps(config | {name: odd}) for name in config for odd in mutations.ODD_VALUES]
    texts = chance.sample(texts, 70)
    for _ in range(30):
        path.write_bytes(whole)
        chance.choice(mutations.IN_PLACE)(path, chance)
        texts.append(path.read_text(encoding="utf-8", errors="replace"))
    refusals = list(filter(None, map(partial(_refusal, path), texts)))
    assert len(refusals) > 60
    for said in refusals:
        assert not [part for part in FOREIGN if part in said.replace("or report this model", "")]
        assert len(said) < 1_000
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - began < 500_000  # KiB


def _refusal(path: Path, text: str) -> str:
    path.write_text(text, encoding="utf-8")
    try:
        check(path.parent)
    except KVQError as error:
        return str(error)
    return ""
