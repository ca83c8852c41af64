"""Layers that keep keywords to themselves hand kvq's step on to their attention."""

from typing import Any

import pytest
import torch
from torch import nn

from kvq.models.describe.kwargs_bridge import hand_on_steps


class Attention(nn.Module):
    layer_idx = 0

    def forward(self, x: Any, **kwargs: Any) -> Any:
        return kwargs


class Keeps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()

    def forward(self, x: Any, fails: bool = False, **kwargs: Any) -> Any:
        if fails:
            raise ValueError
        return self.attention(x)


class HandsOn(Keeps):
    def forward(self, x: Any, **kwargs: Any) -> Any:
        return self.attention(x, **kwargs)


def test_a_step_comes_to_attention_once_and_is_forgotten() -> None:
    model = nn.ModuleList([Keeps(), Keeps()])
    for _ in range(2):
        hand_on_steps(model)
    x = torch.zeros(1)
    assert [layer(x, kvq_step="a", other=1) for layer in model] == [{"kvq_step": "a"}] * 2
    assert model[0](x) == {}
    with pytest.raises(ValueError):  # noqa: PT011
        model[0](x, fails=True, kvq_step="b")
    assert model[0].attention(x) == {}


def test_layers_that_hand_on_themselves_are_left_alone() -> None:
    model = HandsOn()
    hand_on_steps(model)
    assert not model._forward_pre_hooks
    assert model(torch.zeros(1), kvq_step="a", other=1) == {"kvq_step": "a", "other": 1}
