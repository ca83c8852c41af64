"""Bugs of other KV caches, kept away by name: unequal K and V dimensions, and outlying key biases."""

import pytest
import torch

from kvq.models.prove.probe import relative_error
from tests.helpers_models import (
    Decoded,
    build_model,
    load_fp32,
    mean_kl,
    random_tokens,
    run_step,
    save_model,
    small_config,
)


@pytest.mark.parametrize("v_head_dim", [12, 32])  # below and above K's 24
@pytest.mark.parametrize("kv", ["fp32", "fp8", "int8"])
def test_unequal_k_and_v_dimensions_survive_several_turns(kv, v_head_dim, tmp_path):
    """A cache that reuses K's row size for V is right in the first prefill and wrong after it."""
    folder = save_model(tmp_path, "deepseek_v3", v_head_dim=v_head_dim, first_k_dense_replace=2)  # no router
    model = load_fp32(folder, block_size=8).with_kv(kv)
    session = model.session(max_tokens=120)
    first = Decoded(session, random_tokens(21, seed=1))
    parts, fed = [], []
    for turn in range(3):
        row = first if turn == 0 else Decoded(session, random_tokens(5 + 6 * turn, seed=turn))
        row.sequence = first.sequence
        for _ in range(10):
            run_step(session, [row])
        parts.append(row.logits)
        fed.extend(row.fed)
    assert first.sequence.length == len(fed)
    turns = torch.cat(parts)
    assert relative_error(turns, model.logits(fed)) <= (1e-5 if kv == "fp32" else 0.05)
    assert mean_kl(load_fp32(folder).logits(fed), turns) <= (1e-9 if kv == "fp32" else 0.05)


@pytest.fixture(scope="module")
def biased_folder(tmp_path_factory):
    """A Qwen2 whose first and last layers add 50 to 100 to some channels of every key."""
    model = build_model(small_config("qwen2", use_sliding_window=False, num_hidden_layers=4))
    with torch.no_grad():
        for layer in (0, 3):
            bias = model.model.layers[layer].self_attn.k_proj.bias  # [kv_heads * head_dim]
            channels = torch.randperm(bias.numel())[:8]
            bias[channels] = (50 + 50 * torch.rand(8)) * torch.randn(8).sign()
    folder = tmp_path_factory.mktemp("biased")
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(("kv", "limit"), [("bf16", 0.02), ("int8", 0.02), ("k8v4", 0.15), ("int4", 0.15)])
def test_huge_key_biases_keep_eight_bit_keys_close(kv, limit, biased_folder):
    """Per channel 4 bits are fine enough for such keys; per token they are not, and it shows."""
    model = load_fp32(biased_folder)
    ids = random_tokens(90, seed=1)
    exact = model.logits(ids)
    assert mean_kl(exact, model.with_kv(kv).logits(ids, chunk=13)) <= limit
    assert mean_kl(exact, model.with_kv("int4_g8").logits(ids, chunk=13)) > 3 * limit


@pytest.mark.parametrize("kv", ["int4", "int4_g8", "int2_g16_rot", "int2", "int6", "k8v4", "fp8"])
def test_huge_key_biases_never_give_nan(kv, biased_folder):
    logits = load_fp32(biased_folder).with_kv(kv).logits(random_tokens(90, seed=1), chunk=13)
    assert torch.isfinite(logits).all()
