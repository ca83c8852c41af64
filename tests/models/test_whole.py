"""Of checkpoints that read images or sound too, text is served: with the whole model's logits."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from kvq.cli import main
from kvq.errors import ModelError
from kvq.geometry.support import KINDS, text_name
from kvq.models import load
from kvq.models.loading.prepared import prepare
from kvq.models.loading.weights import load_plain
from kvq.models.prove.probe import relative_error
from kvq.server.admission.config import ServerConfig
from kvq.server.check import check_config
from tests.helpers_models import Decoded, random_tokens, run_step
from tools.whole_models import save_whole

# Windows; K and V that layers share; chunks; positions in three sections, without a class for text alone.
SAMPLE = ["gemma3", "gemma4", "llama4", "qwen2_5_vl"]
REST = [name for name in KINDS if name not in SAMPLE]


def check(folder, model_type):
    whole = save_whole(folder, model_type)
    model = load(folder, "fp32", device="cpu", dtype="fp32", block_size=8)
    session = model.session(max_tokens=110, max_sequences=2)
    rows = [
        Decoded(session, random_tokens(45, seed=1), chunks=[20]),
        Decoded(session, random_tokens(61, seed=2), chunks=[7, 1, 30]),
    ]
    for _ in range(30):
        run_step(session, rows)
    for row in rows:
        with torch.inference_mode():
            want = whole(input_ids=torch.tensor([row.fed]), use_cache=False).logits[0]
        assert relative_error(row.logits, want) <= 1e-5
        assert row.tokens[:-1] == want[len(row.prompt) - 1 : -1].argmax(-1).tolist()
    return model


@pytest.mark.parametrize("model_type", SAMPLE)
def test_text_has_the_whole_models_logits(model_type, tmp_path):
    check(tmp_path, model_type)


@pytest.mark.long
@pytest.mark.parametrize("model_type", REST)
def test_so_it_has_of_every_kind(model_type, tmp_path):
    check(tmp_path, model_type)


@pytest.mark.parametrize("model_type", KINDS)
def test_whether_the_head_is_tied_is_as_transformers_leaves_it(model_type):
    config = AutoConfig.for_model(model_type)
    assert KINDS[model_type].is_tied == bool(getattr(config, "tie_word_embeddings", False))
    assert KINDS[model_type].model_type == config.text_config.model_type


@pytest.mark.parametrize(
    ("stored", "is_called"),
    [
        ("model.language_model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
        ("language_model.model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
        ("language_model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
        ("model.text_model.norm.weight", "model.norm.weight"),
        ("model.embed_tokens.weight", "model.embed_tokens.weight"),
        ("language_model.lm_head.weight", "lm_head.weight"),
        ("lm_head.weight", "lm_head.weight"),
        ("model.visual.blocks.0.norm.weight", None),
        ("vision_tower.vision_model.encoder.layers.0.mlp.fc1.weight", None),
        ("multi_modal_projector.linear.weight", None),
        ("model.vision_tower.layers.0.norm.weight", None),
    ],
)
def test_tensors_are_named_as_the_text_model_names_them(stored, is_called):
    assert text_name(stored) == is_called


@pytest.fixture(scope="module")
def gemma(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gemma3")
    save_whole(folder, "gemma3")
    return folder


def test_nothing_of_a_tower_is_held(gemma):
    prepared = prepare(gemma)
    stored = load_file(gemma / "model.safetensors")
    towers = [name for name in stored if text_name(name) is None]
    assert towers
    assert prepared.stored_bytes == sum(x.nbytes for name, x in stored.items() if name not in towers)
    held = load(gemma, device="cpu").weights.model
    assert type(held).__name__ == "Gemma3ForCausalLM"
    assert not [name for name, _ in held.named_parameters() if re.search("vis|proj_", name)]


def test_older_names_and_shards_are_read_too(gemma, tmp_path):
    want = load(gemma, "fp32", dtype="fp32").logits([5, 9, 11, 100])
    tensors = load_file(gemma / "model.safetensors")
    renamed = {re.sub(r"^model\.language_model\.", "language_model.model.", n): x for n, x in tensors.items()}
    for at, part in enumerate((list(renamed)[::2], list(renamed)[1::2])):
        save_file({name: renamed[name] for name in part}, tmp_path / f"{at}.safetensors", {"format": "pt"})
    index = {name: f"{at}.safetensors" for at in (0, 1) for name in list(renamed)[at::2]}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    (tmp_path / "config.json").write_bytes((gemma / "config.json").read_bytes())
    assert torch.equal(load(tmp_path, "fp32", dtype="fp32").logits([5, 9, 11, 100]), want)


def test_a_missing_tensor_of_the_text_part_is_named(gemma, tmp_path):
    tensors = load_file(gemma / "model.safetensors")
    lost = next(name for name in tensors if name.endswith("layers.1.mlp.up_proj.weight"))
    save_file(
        {n: x for n, x in tensors.items() if n != lost}, tmp_path / "model.safetensors", {"format": "pt"}
    )
    (tmp_path / "config.json").write_bytes((gemma / "config.json").read_bytes())
    with pytest.raises(ModelError, match=r"lacks 1 tensors, first model\.layers\.1\.mlp\.up_proj\.weight"):
        load(tmp_path)


def test_a_size_that_the_weights_contradict_is_named(gemma, tmp_path):
    config = json.loads((gemma / "config.json").read_text())
    config["text_config"]["hidden_size"] *= 2
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes((gemma / "model.safetensors").read_bytes())
    with pytest.raises(ModelError, match="hidden_size 128"):
        load(tmp_path)


def test_code_that_comes_with_a_whole_model_is_refused(gemma, tmp_path):
    config = json.loads((gemma / "config.json").read_text()) | {"auto_map": {"AutoModel": "code.Model"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="auto_map"):
        prepare(tmp_path)


def test_flat_configs_of_older_qwen_are_read(tmp_path):
    save_whole(tmp_path, "qwen2_5_vl")
    want = load(tmp_path, "fp32", dtype="fp32").logits([5, 9, 11, 100])
    config = json.loads((tmp_path / "config.json").read_text())
    flat = config | config.pop("text_config") | {"model_type": "qwen2_5_vl"}
    (tmp_path / "config.json").write_text(json.dumps(flat))
    assert torch.equal(load(tmp_path, "fp32", dtype="fp32").logits([5, 9, 11, 100]), want)


def test_it_is_inspected_and_a_server_checks_it(gemma, capsys):
    with pytest.raises(SystemExit, match=r"^0?$|None"):
        main(["inspect", "--model", str(gemma)])
    assert "gemma3_text" in capsys.readouterr().out
    found = check_config(ServerConfig(model=Path(gemma), kv="int8", port=0))
    assert not [one.text for one in found if one.is_error and "tokenizer" not in one.text]


def test_a_whole_model_that_nobody_compared_is_refused_by_name(tmp_path):
    AutoConfig.for_model("paligemma").save_pretrained(tmp_path)
    with pytest.raises(
        ModelError,
        match=r"paligemma: it consists of several models \(text_config, vision_config\) and is not among",
    ):
        prepare(tmp_path)


def test_weights_of_whole_models_are_not_changed(gemma):
    with pytest.raises(ModelError, match="reads images or sound too"):
        load_plain(prepare(gemma))
