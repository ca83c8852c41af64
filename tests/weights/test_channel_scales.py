"""AWQ: better than rounding where some inputs are far larger than others, never worse on what it measured.

SmoothQuant: outliers of inputs cost less once weights share them.
"""

import pytest
import torch

from kvq.formats.weights import parse_weight_format
from kvq.kernels.linear.reference import rounded_inputs
from kvq.weights import round_weight
from kvq.weights.channel_scales import awq_scales, smooth_scales
from kvq.weights.rounding import clip_weight, quadratic, search_scales, squares
from tests.weights.kit import KINDS, inputs, output_error, statistics, weights

FMT = parse_weight_format("w8a8")  # SmoothQuant's


def awq(weight, x, name, **options):
    """The weight as it acts on unscaled inputs."""
    fmt, seen = parse_weight_format(name), statistics(x)
    chosen = awq_scales([weight], seen, fmt, torch.float32, **options)
    seen.divide(chosen.scale)
    stored = clip_weight(weight * chosen.scale, fmt, torch.float32, seen.gram)
    return stored.dequantize() / chosen.scale, chosen


@pytest.mark.parametrize("name", ["int8", "int4", "int4_g64_asym", "int3_g64"])
@pytest.mark.parametrize("kind", KINDS)
def test_outputs_change_less_than_by_rounding(kind, name):
    weight, x, held_out = weights(96, 512), inputs(kind, 2048, 512, seed=1), inputs(kind, 512, 512, seed=2)
    rounded = output_error(held_out, weight, round_weight(weight, parse_weight_format(name)).dequantize())
    stored, chosen = awq(weight, x, name)
    assert output_error(held_out, weight, stored) <= (0.6 if kind == "outliers" else 1.02) * rounded
    assert chosen.error <= chosen.unscaled
    assert (chosen.alpha > 0) or (chosen.scale == 1).all()


def test_the_error_it_reports_is_that_of_the_outputs():
    weight, x = weights(63, 256), inputs("outliers", 500, 256, seed=1)
    fmt = parse_weight_format("int4_g64")
    chosen = awq_scales([weight], statistics(x), fmt, torch.float32)
    stored = round_weight(weight * chosen.scale, fmt).dequantize() / chosen.scale
    wanted = output_error(x, weight, stored) / float((x.double() @ weight.double().T).square().sum())
    assert chosen.error == pytest.approx(wanted, rel=1e-3)


def test_inputs_of_one_source_row_get_one_scale():
    weight, x = weights(63, 256), inputs("outliers", 500, 256, seed=1)
    tied = torch.arange(64).repeat(4)
    chosen = awq_scales([weight], statistics(x), parse_weight_format("int4_g64"), torch.float32, tied=tied)
    assert len(chosen.scale.unique()) <= 64
    assert torch.equal(chosen.scale[:64], chosen.scale[64:128])


def test_inputs_that_were_always_zero_get_finite_scales():
    weight, x = weights(63, 256), inputs("outliers", 500, 256, seed=1)
    x[:, 5:20] = 0
    stored, chosen = awq(weight, x, "int4_g64")
    assert torch.isfinite(chosen.scale).all()
    assert torch.isfinite(stored).all()


@pytest.mark.parametrize("name", ["int4_g64", "int3_g32_asym", "int4"])
def test_a_searched_range_is_never_worse_than_the_whole_one(name):
    weight, fmt = weights(63, 256), parse_weight_format(name)
    gram = statistics(inputs("correlated", 500, 256, seed=1)).gram
    for cost in (squares, quadratic(gram, fmt.groups(256))):
        found = search_scales(weight, fmt, torch.float32, cost)
        for scale, zero in (found,):
            from kvq.weights.rounding import codes_of, scales_of

            def error(scale, zero, cost=cost):
                q = codes_of(weight, scale, zero, fmt).view(63, scale.shape[1], -1).float()
                q = q if zero is None else q - zero[:, :, None]
                return cost(q * scale[:, :, None] - weight.view(q.shape))

            assert (error(scale, zero) <= error(*scales_of(weight, fmt, torch.float32)) * (1 + 1e-5)).all()


def smooth_error(x, weight, scale):
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


def test_smooth_outputs_change_less_on_other_tokens_of_inputs_with_outliers():
    weight, x, held_out = (
        weights(96, 256),
        inputs("outliers", 800, 256, seed=1),
        inputs("outliers", 300, 256, seed=2),
    )
    chosen = smooth_scales([weight], statistics(x, rows=512), FMT, torch.float32)
    assert chosen.error < chosen.unscaled
    assert smooth_error(held_out, weight, chosen.scale) < 0.6 * smooth_error(
        held_out, weight, torch.ones(256)
    )


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
