"""Quantized checkpoints: what transformers makes of what kvq writes, and what kvq makes of it."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import kvq
from kvq.errors import ConfigError, ModelError
from kvq.models.checkpoint import read_json, weight_files
from kvq.models.quantized import _read_weights
from kvq.models.resolve import EMBEDDED
from kvq.models.stored import StoredTensors
from kvq.weights import quantized_layers
from kvq.weights.files import parse_config
from tests.helpers_models import load_eager, random_tokens, save_model

IDS = random_tokens(70, seed=5, vocab=4096)
SMALL = {"samples": 8, "context": 64}


def quantized(out: Path, method: str, **options: object) -> Path:
    kvq.quantize("tiny", out, method=method, **options)
    return out


@torch.inference_mode()
def reference_logits(folder: Path, dtype: torch.dtype) -> torch.Tensor:
    """Of transformers' own model that holds the weights as kvq reads and dequantizes them."""
    scheme = parse_config(read_json(folder / "config.json")["quantization_config"])
    model = AutoModelForCausalLM.from_pretrained(EMBEDDED["tiny"], dtype=dtype, attn_implementation="eager")
    for name, weight in _read_weights(scheme, StoredTensors(weight_files(folder))).items():
        model.get_submodule(name).weight = torch.nn.Parameter(weight.dequantize(dtype))
    return model(torch.tensor([IDS])).logits[0]


@torch.inference_mode()
def transformers_logits(folder: Path, dtype: torch.dtype) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager")
    return model(torch.tensor([IDS])).logits[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("rtn", {"bits": 8}),
        ("rtn", {"bits": 4, "group_size": 64}),
        ("rtn", {"bits": 3}),
        ("gptq", {"bits": 4, "act_order": "static", **SMALL}),
        ("fp8", {"activations": "none"}),
    ],
    ids=["int8", "int4_g64", "int3", "gptq", "fp8"],
)
def test_transformers_gives_the_logits_of_the_dequantized_weights(
    method: str, options: dict, dtype: torch.dtype, tmp_path
) -> None:
    folder = quantized(tmp_path / "out", method, **options)
    assert torch.equal(transformers_logits(folder, dtype), reference_logits(folder, dtype))
    own = kvq.load(folder, kv="fp32", device="cpu").logits(IDS)
    wanted = reference_logits(folder, torch.float32)
    assert (own - wanted).abs().max() < 2e-4 * wanted.abs().max()


@pytest.mark.parametrize(
    ("file_format", "bits"), [("autogptq", 4), ("autogptq", 8), ("autogptq", 3), ("autoawq", 4)]
)
def test_formats_of_other_programs_are_read_back(file_format: str, bits: int, tmp_path) -> None:
    folder = quantized(tmp_path / "out", "rtn", bits=bits, file_format=file_format, group_size=128)
    model = kvq.load(folder, kv="fp32")
    wanted = reference_logits(folder, torch.float32)
    assert (model.logits(IDS) - wanted).abs().max() < 2e-4 * wanted.abs().max()
    assert len(quantized_layers(model.weights.model)) == 6 * 7


def test_formats_of_fp16_alone_refuse_another_dtype_before_any_work(tmp_path) -> None:
    with pytest.raises(ConfigError, match="autoawq keeps fp16, got dtype 'bf16'; leave --dtype out"):
        quantized(tmp_path / "out", "awq", file_format="autoawq", dtype="bf16")
    assert not list(tmp_path.iterdir())


def test_inputs_are_rounded_where_the_checkpoint_says_so(tmp_path) -> None:
    folder = quantized(tmp_path / "out", "rtn", bits=8, activations="int8")
    model = kvq.load(folder, kv="fp32")
    assert {layer.fmt.name for layer in quantized_layers(model.weights.model).values()} == {"int8_a8"}
    plain = reference_logits(folder, torch.float32)  # of the same weights
    mine, theirs = model.logits(IDS), transformers_logits(folder, torch.float32)
    assert 0 < (mine - plain).norm() < 0.02 * plain.norm()
    assert (mine - theirs).norm() < 0.02 * plain.norm()


def test_codes_of_weights_and_of_kv_are_served_and_measured_together(tmp_path) -> None:
    folder = quantized(tmp_path / "out", "rtn", bits=4)
    llm = kvq.LLM(folder, kv="int4", kv_memory="8MiB")
    outputs = llm.generate(["The quick", "import os"], kvq.SamplingParams(max_tokens=8))
    assert [len(output.outputs[0].token_ids) for output in outputs] == [8, 8]
    row = kvq.perplexity(str(folder), kv=["int4"], max_windows=1, context=256)[-1]
    assert row["kv"].startswith("int4")
    assert 1 < row["perplexity"] < 100


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "gemma2", "phi3", "olmo2", "gpt_neox"])
def test_families_load_what_was_quantized_of_them(family: str, tmp_path) -> None:
    source = save_model(tmp_path / "model", family)
    kvq.quantize(source, tmp_path / "out", method="rtn", bits=8, group_size=16)
    model = kvq.load(tmp_path / "out", kv="fp32")
    ids = random_tokens(40, seed=1)
    own = load_eager(source)(torch.tensor([ids])).logits[0].detach()
    limit = 0.5 if family in ("mixtral", "qwen3_moe") else 0.1  # a token may go to another expert
    assert (model.logits(ids) - own).norm() < limit * own.norm()


def test_what_cannot_be_read_is_named(tmp_path) -> None:
    folder = quantized(tmp_path / "out", "rtn", bits=4)
    with pytest.raises(ConfigError, match="holds quantized weights already; leave out weights='int8'"):
        kvq.load(folder, weights="int8")
    (folder / "kvq-manifest.json").unlink()
    config = json.loads((folder / "config.json").read_text())
    for change, message in (
        ({"quant_method": "hqq"}, "quant_method must be 'compressed-tensors' or 'gptq' or 'awq', got 'hqq'"),
        ({"format": "nvfp4-pack-quantized"}, "format must be .*got 'nvfp4-pack-quantized'"),
    ):
        damaged = config | {"quantization_config": config["quantization_config"] | change}
        (folder / "config.json").write_text(json.dumps(damaged))
        with pytest.raises(ModelError, match=message):
            kvq.load(folder)


def test_a_folder_with_a_manifest_loads_whole_or_not_at_all(tmp_path) -> None:
    folder = quantized(tmp_path / "out", "rtn", bits=4)
    copy = shutil.copytree(folder, tmp_path / "copy")
    path = copy / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(ModelError, match=r"model.safetensors is damaged: xxh3"):
        kvq.load(copy)
    path.unlink()
    with pytest.raises(ModelError, match=r"model.safetensors is damaged: missing"):
        kvq.load(copy)
