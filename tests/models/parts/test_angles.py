"""Angles from tables: the rotary module's own bits, whatever positions come in which order."""

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from kvq.models.parts import angles
from kvq.models.parts.angles import Angles

ROTARY = LlamaRotaryEmbedding(LlamaConfig(hidden_size=96, num_attention_heads=2, head_dim=48))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_they_are_the_modules_bit_for_bit(dtype):
    found, x = Angles(ROTARY, {""}), torch.zeros(1, 1, 96, dtype=dtype)
    for positions in ([3], [0, 1, 2, 3, 4], [1023, 1024, 7], [9000], [20_000, 1, 8999]):
        rows = torch.tensor([positions])
        cos, sin = found(x, rows)[""]
        for own, wanted in zip((cos, sin), ROTARY(x, rows), strict=True):
            assert own.dtype is dtype
            assert torch.equal(own, wanted[0])


def test_another_dtype_gets_angles_of_its_own():
    found, rows = Angles(ROTARY, {""}), torch.tensor([[5, 700]])
    for dtype in (torch.float32, torch.bfloat16, torch.float32):
        x = torch.zeros(1, 2, 96, dtype=dtype)
        assert torch.equal(found(x, rows)[""][0], ROTARY(x, rows)[0][0])


def test_tables_that_would_be_too_large_are_not_made(monkeypatch):
    monkeypatch.setattr(angles, "_MOST_BYTES", 3000 * 2 * 48 * 4)
    found, x = Angles(ROTARY, {""}), torch.zeros(1, 1, 96)
    for position in (1000, 2500, 1500):
        rows = torch.tensor([[position]])
        assert torch.equal(found(x, rows)[""][1], ROTARY(x, rows)[1][0])
        assert sum(len(cos) for cos, _ in found._tables.values()) <= 2048
