"""Drawing on a real GPU: the reference's tokens, but for what another exponential rounds otherwise.

TRITON_INTERPRET=0 python -m pytest tests/gpu
"""

import math
import random

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from tests.kernels.draw.kit import Row, drawn

GPU = torch.device("cuda")
VOCAB = 50_257


def rows_of(seed: int, count: int) -> list[Row]:
    pick = random.Random(seed)
    return [
        Row(
            temperature=pick.choice([0.0, 0.7, 1.0, 3.0]),
            min_p=pick.choice([0.0, 0.05]),
            top_k=pick.choice([None, 1, 50, 5000]),
            top_p=pick.choice([1.0, 0.9, 0.3]),
            uniform=pick.random(),
        )
        for _ in range(count)
    ]


def logits_of(kind: str, count: int) -> Tensor:
    noise = 3 * torch.randn(count, VOCAB, generator=torch.Generator().manual_seed(count))
    if kind == "ties":
        return noise.round()
    if kind == "equal":  # more candidates than there is room for
        return torch.zeros_like(noise)
    return noise.masked_fill(noise < 2, -math.inf) if kind == "masked" else noise


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["noise", "ties", "masked", "equal"])
def test_tokens_are_the_references(kind: str, dtype: torch.dtype) -> None:
    rows, logits = rows_of(7, 200), logits_of(kind, 200).to(dtype)
    tokens, finite = drawn(logits.to(GPU), rows)
    assert all(finite)
    wanted = [row.token(x) for row, x in zip(rows, logits.float(), strict=True)]
    assert sum(a != b for a, b in zip(tokens, wanted, strict=True)) <= 2
    again, _ = drawn(logits.to(GPU), rows)
    assert again == tokens


def test_rows_that_are_not_finite_disturb_no_others() -> None:
    rows, logits = rows_of(8, 40), logits_of("noise", 40)
    alone, _ = drawn(logits.to(GPU), rows)
    logits[3, 5], logits[11, 0], logits[20] = math.nan, math.inf, -math.inf
    tokens, finite = drawn(logits.to(GPU), rows)
    bad = {3, 11, 20}
    assert [i for i, fine in enumerate(finite) if not fine] == sorted(bad)
    assert all(tokens[i] == alone[i] for i in range(40) if i not in bad)
    assert all(0 <= token < VOCAB for token in tokens)
