"""SmoothQuant: outliers of inputs cost less once weights share them."""

import pytest
import torch

from kvq.formats.weights import parse_weight_format
from kvq.kernels.linear.reference import rounded_inputs
from kvq.weights import round_weight
from kvq.weights.smoothquant import smooth_scales
from tests.weights.kit import inputs, statistics, weights

FMT = parse_weight_format("w8a8")


def error(x, weight, scale):
    """Relative error of the outputs with weights and inputs rounded."""
    stored = round_weight(weight * scale, FMT).dequantize()
    outputs = rounded_inputs(x / scale, FMT.inputs) @ stored.T
    return float((outputs - x @ weight.T).norm() / (x @ weight.T).norm())


def test_the_scales_are_those_of_the_papers_equation():
    weight, x = weights(63, 128), inputs("outliers", 500, 128, seed=1)
    chosen = smooth_scales([weight], statistics(x, rows=200), FMT, torch.float32, alphas=(0.5,))
    wanted = x.abs().amax(0) ** 0.5 / weight.abs().amax(0) ** 0.5
    assert torch.allclose(chosen.scale, wanted, rtol=1e-5)
    assert chosen.alpha == 0.5


def test_outputs_change_less_on_other_tokens_of_inputs_with_outliers():
    weight, x, held_out = (
        weights(96, 256),
        inputs("outliers", 800, 256, seed=1),
        inputs("outliers", 300, 256, seed=2),
    )
    chosen = smooth_scales([weight], statistics(x, rows=512), FMT, torch.float32)
    assert chosen.error < chosen.unscaled
    assert error(held_out, weight, chosen.scale) < 0.6 * error(held_out, weight, torch.ones(256))


def test_it_never_chooses_what_it_measured_to_be_worse():
    weight, x = weights(96, 256), inputs("independent", 800, 256, seed=1)
    chosen = smooth_scales([weight], statistics(x, rows=512), FMT, torch.float32)
    assert chosen.error <= chosen.unscaled


@pytest.mark.parametrize("where", ["inputs", "weights"])
def test_channels_that_are_always_zero_are_left_alone(where):
    weight, x = weights(63, 128), inputs("outliers", 500, 128, seed=1)
    (x if where == "inputs" else weight)[:, 7] = 0
    chosen = smooth_scales([weight], statistics(x, rows=200), FMT, torch.float32, alphas=(0.5,))
    assert chosen.scale[7] == 1
    assert torch.isfinite(chosen.scale).all()


def test_kept_tokens_are_capped_and_spread():
    found = statistics(torch.arange(1000.0)[:, None].expand(-1, 8), rows=64, per_sample=16)
    assert found.rows.shape == (64, 8)
    assert found.rows[:16, 0].tolist() == list(range(0, 96, 6))
