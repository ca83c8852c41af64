"""Configurations of GGUF models: all that transformers needs; what kvq can't run is refused by name."""

import math
import struct
from pathlib import Path
from typing import Any

import pytest

from kvq.errors import ModelError
from kvq.models.gguf.architectures import ARCHITECTURES
from kvq.models.gguf.files import read_gguf
from tests.models.gguf.kit import Stored, pack

LLAMA: dict[str, Any] = {
    "general.architecture": "llama", "llama.block_count": 2, "llama.context_length": 4096,
    "llama.embedding_length": 64, "llama.feed_forward_length": 96, "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2, "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.freq_base": 500000.0,
}  # fmt: skip
EMBEDDING = {"token_embd.weight": Stored(0, (5, 64), bytes(4 * 5 * 64))}


def config(
    tmp_path: Path, changes: dict[str, Any], tensors: dict[str, Stored] | None = None
) -> dict[str, Any]:
    path = tmp_path / "a.gguf"
    metadata = {key: value for key, value in (LLAMA | changes).items() if value is not None}
    path.write_bytes(pack(metadata, EMBEDDING | (tensors or {})))
    return read_gguf(path).config


def test_a_llama(tmp_path):
    found = config(tmp_path, {})
    assert found["rope_parameters"] == {"rope_theta": 500000.0, "rope_type": "default"}
    assert found["tie_word_embeddings"] is True
    assert (found["head_dim"], found["vocab_size"], found["attention_bias"], found["dtype"]) == (
        16, 5, False, "float32",
    )  # fmt: skip


def test_counts_that_are_listed_for_every_layer(tmp_path):
    assert config(tmp_path, {"llama.attention.head_count_kv": [2, 2]})["num_key_value_heads"] == 2
    with pytest.raises(ModelError, match=r"head_count_kv' must be .* the same for all layers, got \[2, 1\]"):
        config(tmp_path, {"llama.attention.head_count_kv": [2, 1]})


def test_ends_of_texts_and_turns(tmp_path):
    found = config(
        tmp_path,
        {
            "tokenizer.ggml.eos_token_id": 3, "tokenizer.ggml.eot_token_id": 1,
            "tokenizer.ggml.bos_token_id": 0,
            "tokenizer.ggml.tokens": ["a", "b", "<|im_end|>", "d", "<end_of_turn>"],
            "tokenizer.ggml.token_type": [1, 1, 3, 3, 1],
        },
    )  # fmt: skip
    assert (found["eos_token_id"], found["bos_token_id"], found["pad_token_id"]) == ([3, 1, 2], 0, None)


def factors(factor: float, original: int, theta: float = 500000.0, dims: int = 16) -> list[float]:
    """As llama.cpp's converter computes them."""
    found = []
    for i in range(0, dims, 2):
        wave = 2 * math.pi * theta ** (i / dims)
        if wave < original / 4:
            found.append(1.0)
        elif wave > original:
            found.append(factor)
        else:
            smooth = (original / wave - 1) / 3
            found.append(1 / ((1 - smooth) / factor + smooth))
    return found


@pytest.mark.parametrize(("factor", "original"), [(8.0, 8192), (32.0, 8192), (16.0, 1024)])
def test_scaling_of_llama_3_from_its_factors(tmp_path, factor, original):
    rope = {"rope_freqs.weight": Stored(0, (8,), struct.pack("<8f", *factors(factor, original)))}
    found = config(tmp_path, {}, rope)["rope_parameters"]
    assert (found["rope_type"], found["factor"]) == ("llama3", factor)
    again = factors(found["factor"], found["original_max_position_embeddings"])
    assert again == pytest.approx(factors(factor, original), rel=1e-4)


def test_factors_of_no_known_scaling(tmp_path):
    rope = {"rope_freqs.weight": Stored(0, (8,), struct.pack("<8f", *range(1, 9)))}
    infinite = {"rope_freqs.weight": Stored(0, (8,), struct.pack("<8f", *[math.inf] * 8))}
    for one in (rope, infinite):
        with pytest.raises(ModelError, match=r"rope_freqs\.weight scales RoPE in a way"):
            config(tmp_path, {}, one)
    ones = {"rope_freqs.weight": Stored(0, (8,), struct.pack("<8f", *[1.0] * 8))}
    assert config(tmp_path, {}, ones)["rope_parameters"]["rope_type"] == "default"


def test_linear_and_yarn(tmp_path):
    linear = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    assert config(tmp_path, linear)["rope_parameters"]["factor"] == 4.0
    assert config(tmp_path, {"llama.rope.scale_linear": 2.0})["rope_parameters"]["rope_type"] == "linear"
    yarn = linear | {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.original_context_length": 1024}
    found = config(tmp_path, yarn | {"llama.rope.scaling.yarn_beta_fast": 16.0})["rope_parameters"]
    assert found == {
        "rope_theta": 500000.0, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024,
        "beta_fast": 16.0,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"general.architecture": "mamba"}, "kvq reads no GGUF of architecture 'mamba'.*it reads arcee"),
        ({"general.architecture": "lama"}, "did you mean 'llama'|'llama'"),
        ({"general.architecture": None}, "architecture None"),
        ({"llama.block_count": None}, "key 'llama.block_count' is missing"),
        ({"llama.block_count": -1}, "whole number above 0, .* got -1"),
        ({"llama.block_count": "2"}, "whole number above 0, .* got '2'"),
        ({"llama.rope.freq_base": "x"}, "must be a number, got 'x'"),
        ({"llama.rope.freq_base": math.inf}, "must be a number, got inf"),
        ({"llama.rope.freq_base": -1.0}, "must be above 0, got -1.0"),
        ({"llama.rope.dimension_count": 8}, "is 8, and heads have 16 numbers"),
        ({"llama.rope.dimension_count": 32}, "is 32, and heads have 16 numbers"),
        ({"tokenizer.ggml.eos_token_id": [1, 2]}, r"eos_token_id' must be a token's id, got \[1, 2\]"),
        ({"llama.rope.scaling.type": "ntk"}, "must be none, linear, yarn or longrope, got 'ntk'"),
        ({"llama.rope.scaling.type": "linear"}, "factor' must be a number, got None"),
        ({"llama.attention.value_length": 8}, "must be attention.key_length, 16"),
        ({"llama.attention.causal": False}, "is False, which kvq doesn't support"),
        ({"llama.attention.sliding_window": 512}, "is 512, which kvq doesn't support in GGUF files of llama"),
        ({"llama.logit_scale": 0.5}, "is 0.5, which"),
    ],
)
def test_what_is_refused(tmp_path, changes, message):
    with pytest.raises(ModelError, match=message):
        config(tmp_path, changes)


def test_files_without_an_embedding_hold_no_model(tmp_path):
    path = tmp_path / "vocabulary.gguf"
    path.write_bytes(pack(LLAMA, {}))
    with pytest.raises(ModelError, match=r"lacks tensor token_embd\.weight"):
        _ = read_gguf(path).config


def test_parts_have_the_names_that_gguf_gives_them():
    gguf = pytest.importorskip("gguf")
    numbers = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
    for name, own in ARCHITECTURES.items():
        number = numbers[{"mixtral": "llama", "olmo3": "olmo2"}.get(name, name)]
        names, mapped = {gguf.TENSOR_NAMES[one] for one in gguf.MODEL_TENSORS[number]}, 0
        for part, theirs in own.parts.items():
            if f"blk.{{bid}}.{part}" in names:
                found = gguf.get_tensor_name_map(number, 2).get_name(
                    f"model.layers.1.{theirs.replace('.{}', '')}"
                )
                assert found == f"blk.1.{part}", (name, part)
                mapped += 1
        assert mapped > 7


def test_sizes_that_no_model_has_are_refused_at_once(tmp_path):
    with pytest.raises(ModelError, match="block_count' may be up to 10000, got 4294967295"):
        config(tmp_path, {"llama.block_count": (1 << 32) - 1})
    with pytest.raises(ModelError, match=r"rope_freqs\.weight must be F32 of shape \[4096\]"):
        config(
            tmp_path, {"llama.attention.key_length": 8192}, {"rope_freqs.weight": Stored(0, (8,), bytes(32))}
        )
