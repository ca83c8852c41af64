"""KvqCache in a model that torch.compile has taken: the same logits to the last bit."""

from typing import Any

import pytest
import torch
from torch import Tensor

from kvq.cache import KvqCache
from kvq.cache.transformers.attention import eager
from tests.cache.hf_kit import attention_of, family_model
from tests.helpers_models import random_tokens

PROMPT, STEPS = 12, 4


def logits(run: Any, model: Any) -> Tensor:
    """Of a prompt and some steps."""
    cache = KvqCache(model.config, kv="int8")
    ids = torch.tensor([random_tokens(PROMPT + STEPS, seed=1)])
    with torch.inference_mode():
        found = [run(part, past_key_values=cache).logits for part in ids.split([PROMPT, *[1] * STEPS], dim=1)]
    assert cache.get_seq_length() == PROMPT + STEPS
    return torch.cat(found, dim=1)


@pytest.mark.long
@pytest.mark.parametrize("attention", ["kvq", "sdpa"])
def test_a_compiled_model_gives_the_same_logits(attention: str) -> None:
    with attention_of(family_model("llama"), attention) as model:
        want = logits(model, model)
        torch.compiler.reset()
        assert torch.equal(logits(torch.compile(model, backend="aot_eager"), model), want)


def test_what_is_left_alone_runs_as_it_is_beside_a_graph() -> None:
    calls = []

    @eager
    def counted(x: Tensor) -> Tensor:
        calls.append(torch.compiler.is_compiling())
        return x + len(calls)

    compiled = torch.compile(lambda x: counted(x * 2) * 3, backend="eager")
    one = torch.ones(1)
    assert [compiled(one).item() for _ in range(3)] == [9, 12, 15]
    assert counted(one).item() == 5
    assert calls == [False] * 4
