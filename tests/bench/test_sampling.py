"""`benchmarks.gpu.sampling`: nothing is timed that its parameters exclude."""

import pytest
import torch

from benchmarks.gpu import sampling
from benchmarks.gpu.sampling import KINDS, SamplingWorkload, bench_sampling
from kvq.errors import KVQError

WORKLOAD = SamplingWorkload(rows=3, vocab_size=500, dtype=torch.float32, device=torch.device("cpu"))


def test_rows_of_every_kind() -> None:
    rows = bench_sampling(WORKLOAD, repeats=2)
    assert [row["sampling"] for row in rows] == list(KINDS)
    assert all(row["ms_p10"] <= row["ms_median"] <= row["ms_p90"] for row in rows)


@pytest.mark.parametrize("kind", ["greedy", "top_p", "top_k, top_p"])
def test_an_excluded_token_is_found(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    least = WORKLOAD.logits().argmin(-1).tolist()
    monkeypatch.setattr(sampling, "_tokens", lambda *_: least)
    with pytest.raises(KVQError, match="3 of 3 tokens are excluded; nothing was timed"):
        bench_sampling(WORKLOAD, [kind], repeats=1)
