"""Where rounding alone changes a model's logits by more than the probe allows, it says so and loads."""

import logging

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from kvq.errors import ModelError
from kvq.models import load
from kvq.models.describe.modules import build_random
from kvq.models.prove import probe
from tests.models.test_unlisted import save_twin
from tests.models.wrong_models import eager_with, plainly, save_wrong


@pytest.fixture
def strict(monkeypatch):
    """Limits that no rounding keeps."""
    monkeypatch.setattr(probe, "_TOLERANCE", dict.fromkeys(probe._TOLERANCE, 1e-9))


def test_a_proven_model_may_differ_as_much_as_a_rounding_of_its_embeddings_makes_it(strict, tmp_path, caplog):
    folder = save_twin(tmp_path, "olmoe")
    with caplog.at_level(logging.WARNING, logger="kvq"):
        load(folder, dtype="bf16", device="cpu")
    assert "roundings grow in it: its own attention gives results" in caplog.text


@pytest.mark.parametrize("name", ["gemma4_text", "olmoe", "gemma3n_text", "granitemoe"])
def test_models_load_in_bf16_as_in_fp32(name, tmp_path):
    folder = save_twin(tmp_path, name)
    for dtype in ("bf16", "fp32"):
        assert load(folder, dtype=dtype, device="cpu").logits([5, 6, 7]).isfinite().all()


def test_a_listed_one_may_not(strict, tmp_path):
    config = AutoConfig.for_model(
        "llama",
        vocab_size=99,
        hidden_size=32,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=2,
    )
    build_random(config.to_dict(), torch.bfloat16, torch.device("cpu")).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="its own attention differs"):
        load(tmp_path, dtype="bf16", device="cpu")


def clipped_far_out(module, q, k, v, mask, scaling, **_):
    return eager_with(lambda scores: scores.clamp(-20, 20))(module, q, k, v, mask, scaling)


def test_what_kvqs_attention_leaves_out_is_no_rounding(tmp_path):
    """A clip that only the model's own weights reach: torch's attention leaves it out as well."""
    folder = save_wrong(tmp_path, "clipped_far_out", clipped_far_out, plainly)
    path = folder / "model.safetensors"
    weights = load_file(path)
    save_file(
        {name: x * (3000 if "q_proj" in name else 1) for name, x in weights.items()}, path, {"format": "pt"}
    )
    with pytest.raises(ModelError, match="its own attention differs"):
        load(folder, dtype="fp32", device="cpu")
