"""Whole models on a real GPU: layers in Triton beside transformers' code, graphs beside eager steps.

TRITON_INTERPRET=0 python -m pytest tests/gpu
"""

from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

import kvq
from kvq.models.loading.fused_layers import is_fused, unfuse_layers
from kvq.models.prove.probe import relative_error
from tests.engine.kit import one_character_tokenizer
from tests.helpers_models import random_tokens, save_model

IDS = random_tokens(60, seed=3)


def folder_of(family: str, tmp_path: Path) -> Path:
    folder = save_model(tmp_path, family)
    one_character_tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.parametrize(("dtype", "allowed"), [("fp32", 1e-4), ("bf16", 1e-1)])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "mixtral", "gpt_oss", "glm", "olmo2"])
def test_fused_layers_give_what_transformers_code_gives(
    family: str, dtype: str, allowed: float, tmp_path: Path
) -> None:
    model = kvq.load(folder_of(family, tmp_path), kv=dtype, dtype=dtype, device="cuda")
    assert is_fused(model.weights.model)
    fused, chunked = model.logits(IDS), model.logits(IDS, chunk=7)
    unfuse_layers(model.weights.model)
    own = model.logits(IDS)
    assert relative_error(fused, own) < allowed
    assert relative_error(chunked, own) < allowed


@pytest.mark.parametrize("weights", ["int8_g16", "int4_g16"])
def test_weights_in_codes_are_joined(weights: str, tmp_path: Path) -> None:
    model = kvq.load(folder_of("llama", tmp_path), kv="fp32", dtype="fp32", weights=weights, device="cuda")
    assert is_fused(model.weights.model)
    fused = model.logits(IDS)
    unfuse_layers(model.weights.model)
    assert relative_error(fused, model.logits(IDS)) < 1e-3


@pytest.mark.parametrize("family", ["qwen3", "gpt_oss"])
def test_steps_replayed_as_graphs_give_the_tokens_of_eager_ones(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = kvq.load(folder_of(family, tmp_path), kv="int8", dtype="fp32", device="cuda")
    prompts = [random_tokens(5 + 11 * i, seed=i) for i in range(5)]
    params = kvq.SamplingParams(max_tokens=12, ignore_eos=True, temperature=0)

    def tokens() -> list[list[int]]:
        with kvq.LLM(model, num_blocks=64, max_num_seqs=5, max_context=128) as llm:
            assert (llm.core.runner._graphs is None) == is_eager
            return [output.outputs[0].token_ids for output in llm.generate(prompts, params)]

    is_eager = False
    replayed = tokens()
    monkeypatch.setattr("kvq.engine.device.runner.decode_graphs", lambda *_, **__: None)
    is_eager = True
    assert tokens() == replayed
