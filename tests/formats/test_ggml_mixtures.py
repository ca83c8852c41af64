"""Types of tensors are those that llama.cpp picks for a file of a name."""

import pytest

from kvq.errors import ConfigError
from kvq.formats.ggml import GGML_TYPES
from kvq.formats.ggml_mixtures import FILE_TYPES, file_type, fitting_type, wanted_type

MORE = {0, 1, 2, 3, 6, 9, 12, 15, 18, 21, 24, 27, 28, 29, 30, 31}  # of 32 layers: Q6_K in Q4_K_M


def wanted(part: str, layer: int, mixture: str, **given: int) -> str:
    name, layers = f"blk.{layer}.{part}.weight", given.pop("layers", 32)
    return wanted_type(name, (512, 512), mixture, layers=layers, is_head=False, **given).name


@pytest.mark.parametrize("part", ["attn_v", "ffn_down", "ffn_down_exps"])
def test_some_layers_get_more_bits(part):
    for mixture, base in (("Q4_K_M", "Q4_K"), ("Q5_K_M", "Q5_K")):
        found = {layer: wanted(part, layer, mixture) for layer in range(32)}
        assert {layer for layer, kind in found.items() if kind == "Q6_K"} == MORE
        assert set(found.values()) == {"Q6_K", base}
    assert wanted(part, 0, "Q4_K_S") == "Q5_K"
    assert wanted(part, 4, "Q4_K_S") == "Q4_K"
    assert wanted(part, 0, "Q4_0") == "Q4_0"


def test_heads_vectors_and_routers():
    for mixture, kind in (("Q4_0", "Q6_K"), ("Q4_K_M", "Q6_K"), ("Q8_0", "Q8_0"), ("F16", "F16")):
        assert wanted_type("output.weight", (9, 256), mixture, layers=1, is_head=True).name == kind
    for mixture in FILE_TYPES:
        assert wanted_type("blk.0.attn_norm.weight", (64,), mixture, layers=1, is_head=False).name == "F32"
        assert wanted("ffn_gate_inp", 0, mixture) == "F32"
    assert wanted_type("token_embd.weight", (9, 256), "Q4_K_M", layers=1, is_head=False).name == "Q4_K"


def test_rows_that_blocks_do_not_divide():
    pairs = (("Q4_K", "Q5_0"), ("Q5_K", "Q5_1"), ("Q6_K", "Q8_0"), ("Q4_0", "Q4_0"))
    assert [fitting_type(GGML_TYPES[kind], 576).name for kind, _ in pairs] == [one for _, one in pairs]
    assert {fitting_type(GGML_TYPES[kind], 80).name for kind, _ in pairs} == {"F16"}
    assert fitting_type(GGML_TYPES["Q4_K"], 512).name == "Q4_K"


def test_names_are_read_as_llama_cpp_reads_them():
    assert [file_type(name) for name in ("q4_k", "Q5_K", "q8_0")] == ["Q4_K_M", "Q5_K_M", "Q8_0"]
    with pytest.raises(ConfigError, match=r"unknown GGUF type 'Q4_K_L'.*'Q4_K"):
        file_type("Q4_K_L")
