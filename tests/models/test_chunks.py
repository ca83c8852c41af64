"""A prompt gives the same logits however it is cut into steps, on a trained model and real text.

Over quantized KV one thing can differ: a Linear over one row and one over many add in another
order, and a value next to a rounding boundary then takes the neighbouring code. So there are two
promises. Where the codes are equal, logits agree as they do over unquantized KV. Left free, up to
a few codes in ten thousand flip in the first layer and each flip disturbs the layers above it; the
difference stays well below the format's own error.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvq.models import Model
from kvq.models.probe import relative_error
from tests.helpers_models import load_fp32

MODEL = Path(__file__).parents[3] / "shared" / "tiny-lm" / "model"
TOKENS = 220
CHUNKS = [1, 7, 64]
QUANTIZED = ["bf16", "fp8", "int8", "int4", "k8v4"]
_runs: dict[tuple[str, int], tuple[Any, Tensor]] = {}


@pytest.fixture(scope="module")
def model() -> Model:
    if not MODEL.is_dir():
        pytest.skip("the trained tiny model is not at hand")
    return load_fp32(MODEL)


@pytest.fixture(scope="module")
def ids(model) -> list[int]:
    path = MODEL.parents[1] / "data" / "wikitext-2" / "test.txt"
    if not path.is_file():
        pytest.skip("WikiText-2 is not at hand")
    text = path.read_text(encoding="utf-8")[:3000]
    return model.tokenizer(text, return_attention_mask=False)["input_ids"][:TOKENS]


def run(model: Model, ids: list[int], chunk: int, *, codes_of: Any = None) -> tuple[Any, Tensor]:
    """Prefill in chunks; return the session and all logits.

    `codes_of` is another session over the same tokens: after every write its bytes replace those
    just written. Both sessions are new, so that equal tokens lie in equal slots.
    """
    session = model.session(max_tokens=len(ids))
    if codes_of is not None:
        write = session.cache.write

        def write_then_replace(*arguments: Any) -> Tensor:
            bad = write(*arguments)
            for group in range(len(session.cache.num_blocks)):
                session.cache.pool(group).copy_(codes_of.cache.pool(group))
            return bad

        session.cache.write = write_then_replace
    sequence = session.new_sequence()
    parts = [
        session.forward([(sequence, ids[at : at + chunk])], all_rows=True)[0].logits
        for at in range(0, len(ids), chunk)
    ]
    return session, torch.cat(parts)


def run_once(model: Model, ids: list[int], kv: str, chunk: int = TOKENS) -> tuple[Any, Tensor]:
    """`run` of that format, kept for other tests."""
    if (kv, chunk) not in _runs:
        _runs[kv, chunk] = run(model.with_kv(kv), ids, chunk)
    return _runs[kv, chunk]


@pytest.mark.parametrize("chunk", CHUNKS)
def test_unquantized_chunks_agree_with_one_prefill(chunk, model, ids):
    _, whole = run_once(model, ids, "fp32")
    assert relative_error(run_once(model, ids, "fp32", chunk)[1], whole) <= 1e-6


@pytest.mark.parametrize("kv", QUANTIZED)
@pytest.mark.parametrize("chunk", CHUNKS)
def test_quantized_chunks_agree_with_one_prefill_where_codes_are_equal(kv, chunk, model, ids):
    session, whole = run_once(model, ids, kv)
    _, logits = run(model.with_kv(kv), ids, chunk, codes_of=session)
    assert relative_error(logits, whole) <= 2e-6


@pytest.mark.parametrize("kv", QUANTIZED)
@pytest.mark.parametrize("chunk", CHUNKS)
def test_quantized_chunks_agree_with_one_prefill(kv, chunk, model, ids):
    _, whole = run_once(model, ids, kv)
    assert relative_error(run_once(model, ids, kv, chunk)[1], whole) <= 2e-4


@pytest.mark.parametrize("kv", QUANTIZED)
@pytest.mark.parametrize("chunk", [1, 7])
def test_the_first_layer_differs_in_few_codes(kv, chunk, model, ids):
    """Its K and V come from the embeddings alone: only the Linear's order of additions differs."""
    session, _ = run_once(model, ids, kv)
    other, _ = run_once(model, ids, kv, chunk)
    a, b = session.cache.layer(0), other.cache.layer(0)
    for ours, theirs in ((a.k.codes, b.k.codes), (a.v.codes, b.v.codes)):
        assert int((ours != theirs).sum()) <= 0.001 * ours.numel()


@pytest.mark.parametrize("kv", QUANTIZED)
def test_the_order_of_chunks_matters_less_than_the_format(kv, model, ids):
    _, exact = run_once(model, ids, "fp32")
    _, whole = run_once(model, ids, kv)
    _, cut = run_once(model, ids, kv, 7)
    assert mean_kl(whole, cut) <= 0.2 * mean_kl(exact, whole)


def mean_kl(a: Tensor, b: Tensor) -> float:
    """Mean over tokens of KL(softmax(a) || softmax(b)), in nats."""
    p, q = a.double().log_softmax(dim=-1), b.double().log_softmax(dim=-1)
    return float((p.exp() * (p - q)).sum(dim=-1).mean())
