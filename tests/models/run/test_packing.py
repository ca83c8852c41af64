"""Hidden states of a step are those that transformers hands to multi-token-prediction layers."""

import pytest
import torch

from kvq.engine import SamplingParams
from kvq.models.loading.fused_layers import is_fused
from tests.engine.kit import engine, pair
from tests.helpers_models import random_tokens


@pytest.mark.parametrize(
    ("family", "fused"), [("llama", True), ("gemma2", True), ("olmo2", False), ("deepseek_v3", False)]
)
def test_they_are_what_the_last_norm_gave_of_every_token(family, fused):
    """In chunks of prompts beside decodes; padding is left out."""
    model, reference = pair(family)
    assert is_fused(model.weights.model) == fused
    llm = engine(model, max_num_batched_tokens=24, prefix_caching=False)
    runner, seen = llm.core.runner, {}
    forward = runner.forward

    def keeping(plan, **options):
        output = forward(plan, **options)
        assert output.hidden.shape == (plan.num_tokens, model.geometry.hidden_size)
        for branch, states in zip(plan.branches, output.hidden.split(plan.counts), strict=True):
            seen.setdefault(branch, []).append(states.clone())
        return output

    runner.keeps_hidden, runner.forward = True, keeping
    llm.generate(
        [random_tokens(n, seed=n) for n in (1, 17, 63)], SamplingParams(max_tokens=5, ignore_eos=True)
    )
    assert len(seen) == 3
    for branch, states in seen.items():
        ids = torch.tensor([branch.tokens.tolist()[:-1]])
        with torch.inference_mode():
            expected = reference(ids, output_hidden_states=True).hidden_states[-1][0]
        torch.testing.assert_close(torch.cat(states), expected, rtol=1e-3, atol=1e-3)
    llm.close()


def test_nobody_who_does_not_ask_pays_for_them():
    model, _ = pair("llama")
    llm = engine(model)
    before = dict(model.weights.model.base_model._forward_hooks)
    forward, outputs = llm.core.runner.forward, []
    llm.core.runner.forward = lambda *given, **options: (
        outputs.append(forward(*given, **options)) or outputs[-1]
    )
    llm.generate([[5, 6, 7]], SamplingParams(max_tokens=3, ignore_eos=True))
    assert [output.hidden for output in outputs] == [None] * 3
    assert dict(model.weights.model.base_model._forward_hooks) == before
