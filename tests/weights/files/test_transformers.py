"""What kvq writes as compressed-tensors, transformers loads and dequantizes to the same bits."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, CompressedTensorsConfig, LlamaConfig, LlamaForCausalLM

from kvq.formats.weights import parse_weight_format
from kvq.weights import round_weight
from kvq.weights.files import pack_linear, quantization_config
from kvq.weights.writer import CheckpointWriter

FORMATS = ["int8", "int4_g32", "int4_g32_asym", "int3_g32", "w8a8", "int4_g32_a8", "fp8", "fp8_a8"]


def small_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=63, hidden_size=96, intermediate_size=160, num_hidden_layers=2, num_attention_heads=6,
        num_key_value_heads=3, head_dim=16, tie_word_embeddings=False, dtype=torch.float32,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def written(out: Path, names: list[str], *, max_shard_bytes: int = 5 << 30) -> dict[str, torch.Tensor]:
    """Write the small model, its layers in these formats by turns; returns their dequantized weights."""
    model, formats, expected = small_model(), {}, {}
    with CheckpointWriter(out, max_shard_bytes=max_shard_bytes) as writer:
        for name, module in model.named_modules():
            if isinstance(module, torch.nn.Linear) and name != "lm_head":
                formats[name] = parse_weight_format(names[len(formats) % len(names)])
                weight = round_weight(module.weight.detach(), formats[name])
                expected[name] = weight.dequantize()
                writer.add(pack_linear("compressed-tensors", name, weight))
        left = {name: tensor for name, tensor in model.state_dict().items()
                if name.removesuffix(".weight") not in formats}  # fmt: skip
        writer.add(left)
        quantized = quantization_config("compressed-tensors", formats, ["lm_head"], kv_scales=False)
        writer.finish({**model.config.to_dict(), "quantization_config": quantized})
    return expected


@pytest.mark.filterwarnings("ignore:You passed `quantization_config`:UserWarning")
@pytest.mark.parametrize("name", FORMATS)
def test_transformers_dequantizes_to_the_same_bits(tmp_path: Path, name: str) -> None:
    expected = written(tmp_path / "model", [name])
    options = CompressedTensorsConfig(dequantize=True)
    loaded, info = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", quantization_config=options, output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    for layer, weight in expected.items():
        assert torch.equal(loaded.get_submodule(layer).weight, weight), layer


@pytest.mark.parametrize("names", [["int4_g32"], ["fp8"], ["int4_g32", "int8", "fp8"]], ids="-".join)
def test_transformers_runs_it_compressed(tmp_path: Path, names: list[str]) -> None:
    """Shards and index included, and layers in several formats, which its `dequantize=True` takes for one."""
    expected = written(tmp_path / "model", names, max_shard_bytes=20_000)
    assert len(list((tmp_path / "model").glob("*.safetensors"))) > 2
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    reference = small_model()
    for layer, weight in expected.items():
        reference.get_submodule(layer).weight.data = weight
    tokens = torch.arange(20)[None]
    with torch.no_grad():
        assert torch.allclose(loaded(tokens).logits, reference(tokens).logits, atol=1e-5)
