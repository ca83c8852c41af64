"""Models run on any cache backend; the dense one gives what kvq's own gives without quantization."""

import pytest
import torch

from kvq.errors import ConfigError
from kvq.models import load


def test_the_dense_backend_gives_the_logits_of_unquantized_blocks(tiny):
    ids = torch.randint(
        0, tiny.geometry.vocab_size, (70,), generator=torch.Generator().manual_seed(3)
    ).tolist()
    ours = tiny.with_kv("fp32").logits(ids, chunk=9)
    theirs = load("tiny", kv="fp32", cache="dense").logits(ids, chunk=9)
    assert (ours - theirs).abs().max() <= 1e-5 * ours.abs().max()


def test_an_unknown_cache_backend_is_refused_by_name():
    with pytest.raises(ConfigError, match=r"unknown cache backend 'densee'; did you mean 'dense'\?"):
        load("tiny", cache="densee")


def test_a_dense_cache_refuses_quantized_formats():
    with pytest.raises(ConfigError, match="fp32, bf16 or fp16"):
        load("tiny", kv="int4", cache="dense").logits([1, 2])


def test_kernels_of_one_cache_are_not_asked_of_another():
    with pytest.raises(ConfigError, match="--backend reference names kernels of kvq's own cache"):
        load("tiny", kv="fp32", cache="dense", backend="reference")
