"""Quantized checkpoints: what transformers makes of what kvq writes, and what kvq makes of it."""

import functools
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import kvq
from kvq.errors import ConfigError, ModelError
from kvq.evals import calibration_text
from kvq.models.describe.checkpoint import read_json, weight_files
from kvq.models.describe.text_part import _StoredTensors
from kvq.models.loading.quantized import read_weights
from kvq.weights import packed_experts, quantized_layers
from kvq.weights.files import parse_config
from tests.helpers_models import load_eager, random_tokens, save_model

IDS = random_tokens(70, seed=5, vocab=4096)
SMALL = {"samples": 8, "context": 64, "text": calibration_text().text[:8_000]}


@pytest.fixture(scope="module")
def quantized(two_layers: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Two layers quantized in some way, once for all tests: a folder that is not to be changed."""

    @functools.cache
    def quantize(method: str, **options: object) -> Path:
        out = tmp_path_factory.mktemp("quantized") / "out"
        kvq.quantize(two_layers, out, method=method, **options)
        return out

    return quantize


@torch.inference_mode()
def reference_logits(plain: Path, folder: Path, dtype: torch.dtype) -> torch.Tensor:
    """Of transformers' own model that holds the weights as kvq reads and dequantizes them."""
    scheme = parse_config(read_json(folder / "config.json")["quantization_config"])
    model = AutoModelForCausalLM.from_pretrained(plain, dtype=dtype, attn_implementation="eager")
    for name, weight in read_weights(scheme, _StoredTensors(weight_files(folder))).items():
        model.get_submodule(name).weight = torch.nn.Parameter(weight.dequantize(dtype))
    return model(torch.tensor([IDS])).logits[0]


@torch.inference_mode()
def transformers_logits(folder: Path, dtype: torch.dtype) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager")
    return model(torch.tensor([IDS])).logits[0]


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
    method: str, options: dict, quantized: Callable[..., Path], two_layers: Path
) -> None:
    folder = quantized(method, **options)
    half = reference_logits(two_layers, folder, torch.bfloat16)
    assert torch.equal(transformers_logits(folder, torch.bfloat16), half)
    wanted = reference_logits(two_layers, folder, torch.float32)
    assert torch.equal(transformers_logits(folder, torch.float32), wanted)
    own = kvq.load(folder, kv="fp32", device="cpu").logits(IDS)
    assert (own - wanted).abs().max() < 2e-4 * wanted.abs().max()


@pytest.mark.parametrize(
    ("file_format", "bits"), [("autogptq", 4), ("autogptq", 8), ("autogptq", 3), ("autoawq", 4)]
)
def test_formats_of_other_programs_are_read_back(
    file_format: str, bits: int, quantized: Callable[..., Path], two_layers: Path
) -> None:
    folder = quantized("rtn", bits=bits, file_format=file_format, group_size=128)
    model = kvq.load(folder, kv="fp32")
    wanted = reference_logits(two_layers, folder, torch.float32)
    assert (model.logits(IDS) - wanted).abs().max() < 2e-4 * wanted.abs().max()
    assert len(quantized_layers(model.weights.model)) == 2 * 7


def test_formats_of_fp16_alone_refuse_another_dtype_before_any_work(tmp_path) -> None:
    with pytest.raises(ConfigError, match="autoawq keeps fp16, got dtype 'bf16'; leave --dtype out"):
        kvq.quantize("tiny", tmp_path / "out", "awq", file_format="autoawq", dtype="bf16")
    assert not list(tmp_path.iterdir())


def test_inputs_are_rounded_where_the_checkpoint_says_so(
    quantized: Callable[..., Path], two_layers: Path
) -> None:
    folder = quantized("rtn", bits=8, activations="int8")
    model = kvq.load(folder, kv="fp32")
    assert {layer.fmt.name for layer in quantized_layers(model.weights.model).values()} == {"int8_a8"}
    plain = reference_logits(two_layers, folder, torch.float32)  # of the same weights
    mine, theirs = model.logits(IDS), transformers_logits(folder, torch.float32)
    assert 0 < (mine - plain).norm() < 0.02 * plain.norm()
    assert (mine - theirs).norm() < 0.02 * plain.norm()


def test_codes_of_weights_and_of_kv_are_served_and_measured_together(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    kvq.quantize("tiny", folder, "rtn", bits=4)
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
    assert {fmt.name for x in packed_experts(model.weights.model).values() for fmt in x.formats} == (
        {"int8_g16"} if family in ("mixtral", "qwen3_moe") else set()
    )
    limit = 0.5 if family in ("mixtral", "qwen3_moe") else 0.1  # a token may go to another expert
    assert (model.logits(ids) - own).norm() < limit * own.norm()


def test_what_cannot_be_read_is_named(tmp_path: Path, quantized: Callable[..., Path]) -> None:
    folder = shutil.copytree(quantized("rtn", bits=4), tmp_path / "copy")
    with pytest.raises(ConfigError, match="holds quantized weights already; leave out weights='int8'"):
        kvq.load(folder, weights="int8")
    (folder / "kvq-manifest.json").unlink()
    config = json.loads((folder / "config.json").read_text())
    for change, message in (
        (
            {"quant_method": "hqq"},
            "quant_method 'hqq', .* or in 'compressed-tensors' or 'gptq' or 'awq' or 'bitsandbytes'",
        ),
        ({"format": "nvfp4-pack-quantized"}, "format must be .*got 'nvfp4-pack-quantized'"),
    ):
        damaged = config | {"quantization_config": config["quantization_config"] | change}
        (folder / "config.json").write_text(json.dumps(damaged))
        with pytest.raises(ModelError, match=message):
            kvq.load(folder)


def test_a_folder_with_a_manifest_loads_whole_or_not_at_all(
    tmp_path: Path, quantized: Callable[..., Path]
) -> None:
    copy = shutil.copytree(quantized("rtn", bits=4), tmp_path / "copy")
    path = copy / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(ModelError, match=r"model.safetensors is damaged: xxh3"):
        kvq.load(copy)
    path.unlink()
    with pytest.raises(ModelError, match=r"model.safetensors is damaged: missing"):
        kvq.load(copy)


def test_a_weight_that_is_there_twice_is_refused(quantized, tmp_path) -> None:
    folder = shutil.copytree(quantized("rtn", bits=4), tmp_path / "out")
    (folder / "kvq-manifest.json").unlink()
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.self_attn.q_proj.weight"] = torch.zeros(256, 256)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelError, match=r"q_proj.weight in codes and as it was; keep one"):
        kvq.load(folder)


@pytest.mark.parametrize(
    ("options", "dtype"), [({"dtype": "fp32"}, "float32"), ({"file_format": "autogptq"}, "float16")]
)
def test_what_stays_has_the_dtype_that_was_asked_for_or_that_the_format_has(
    options: dict, dtype: str, quantized: Callable[..., Path]
) -> None:
    folder = quantized("rtn", bits=4, **options)
    assert read_json(folder / "config.json")["dtype"] == dtype
    kept = [x for x in load_file(folder / "model.safetensors").values() if x.is_floating_point()]
    assert {str(x.dtype) for x in kept} == {f"torch.{dtype}"}
