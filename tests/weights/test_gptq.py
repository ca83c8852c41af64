"""GPTQ: as good as the paper's algorithm in fp64, far better than rounding, and safe on odd inputs."""

import functools
import logging
from typing import get_args

import pytest
import torch

from kvq.errors import ConfigError, RequestError
from kvq.formats.weights import parse_weight_format
from kvq.weights import round_weight
from kvq.weights.gptq import ActOrder, GPTQOptions, ScaleSearch, gptq
from tests.weights.kit import KINDS, inputs, output_error, plain_gptq, statistics, weights

inputs = functools.cache(inputs)


@functools.cache
def gram_of(kind, tokens, width):
    return statistics(inputs(kind, tokens, width, seed=1)).gram


def quantized(weight, gram, name, **options):
    found = gptq(
        weight,
        gram,
        parse_weight_format(name),
        options=GPTQOptions(**options),
        dtype=torch.float32,
    )
    return found.dequantize()


SIZES = [256, pytest.param(512, marks=pytest.mark.long)]  # two blocks of columns, and four


@pytest.mark.parametrize(("kind", "name"), [("correlated", "int4"), ("outliers", "int3_g64")])
def test_the_objective_on_512_by_512_is_that_of_the_paper_in_fp64(kind, name):
    test_the_objective_is_that_of_the_paper_in_fp64(kind, name, 512)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["int8", "int4", "int4_asym", "int3_g64", "int3_g32_asym"])
def test_the_objective_is_that_of_the_paper_in_fp64(kind, name, size):
    weight, x, held_out = (
        weights(size, size),
        inputs(kind, 2048, size, seed=1),
        inputs(kind, 512, size, seed=2),
    )
    ours = output_error(held_out, weight, quantized(weight, gram_of(kind, 2048, size), name))
    theirs = output_error(held_out, weight, plain_gptq(weight, x, parse_weight_format(name)))
    assert ours <= 1.01 * theirs


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["int4", "int3_g64"])
def test_by_activity_it_is_the_papers_too(kind, name, size):
    weight, x, held_out = (
        weights(size, size),
        inputs(kind, 2048, size, seed=1),
        inputs(kind, 512, size, seed=2),
    )
    gram = gram_of(kind, 2048, size)
    ours = output_error(held_out, weight, quantized(weight, gram, name, order="group"))
    theirs = output_error(
        held_out, weight, plain_gptq(weight, x, parse_weight_format(name), by_activity=True)
    )
    assert ours <= 1.01 * theirs


@pytest.mark.daily(24)
@pytest.mark.parametrize("kind", ["correlated", "low rank"])  # independent inputs can't make up for others
@pytest.mark.parametrize("order", get_args(ActOrder))
@pytest.mark.parametrize("search", get_args(ScaleSearch))
@pytest.mark.parametrize("name", ["int4", "int3_g64_asym", "int4_g256", "int3_g48"])
def test_outputs_change_less_than_by_rounding(kind, order, search, name):
    width = 768
    weight, gram, held_out = weights(96, width), gram_of(kind, 2048, width), inputs(kind, 512, width, seed=2)
    before = gram.clone()
    fmt = parse_weight_format(name)
    rounded = output_error(held_out, weight, round_weight(weight, fmt).dequantize())
    stored = quantized(weight, gram, name, order=order, search=search)
    assert output_error(held_out, weight, stored) < 0.8 * rounded
    assert torch.equal(gram, before)


def test_groups_in_the_order_of_activity_say_so():
    weight, x = weights(63, 256), inputs("outliers", 1000, 256, seed=1)
    options = GPTQOptions(order="group")
    gram = statistics(x).gram
    grouped = gptq(weight, gram, parse_weight_format("int4_g64"), options=options, dtype=torch.bfloat16)
    assert grouped.order.tolist() == torch.argsort(gram.diagonal(), descending=True, stable=True).tolist()
    assert grouped.scale.dtype == torch.bfloat16
    whole = gptq(weight, gram, parse_weight_format("int8"), options=options, dtype=torch.bfloat16)
    assert whole.order is None


def test_inputs_that_were_always_zero_are_rounded_to_nearest():
    weight, x = weights(63, 256), inputs("correlated", 1000, 256, seed=1).clone()
    x[:, 96:128] = 0
    stored = quantized(weight, statistics(x).gram, "int4_g32")
    assert torch.isfinite(stored).all()
    nearest = round_weight(weight[:, 96:128], parse_weight_format("int4_g32")).dequantize()
    assert torch.equal(stored[:, 96:128], nearest)


def test_a_layer_that_saw_only_zeros_is_rounded_to_nearest():
    weight, fmt = weights(63, 256), parse_weight_format("int4_g64_asym")
    stored = gptq(weight, torch.zeros(256, 256), fmt, options=GPTQOptions(), dtype=torch.float32)
    assert torch.equal(stored.dequantize(), round_weight(weight, fmt).dequantize())


def test_fewer_tokens_than_inputs_are_enough():
    weight, x = weights(63, 256), inputs("independent", 40, 256, seed=1)
    assert torch.isfinite(quantized(weight, statistics(x).gram, "int4_g64")).all()


def test_more_damping_is_tried_where_the_hessian_is_singular(caplog):
    gram = torch.eye(64)
    gram[:32, :32] = 1.0
    gram[0, 1] = gram[1, 0] = 1.05  # not positive definite until 5% are added
    with caplog.at_level(logging.WARNING, "kvq"):
        gptq(
            weights(8, 64), gram, parse_weight_format("int4_g32"), options=GPTQOptions(), dtype=torch.float32
        )
    assert "the Hessian can't be factorized with damping 0.01" in caplog.text


def test_a_hessian_that_is_none_is_refused_by_the_layers_name():
    gram = torch.full((64, 64), 1e6)
    gram.fill_diagonal_(1.0)
    with pytest.raises(RequestError, match=r"q_proj: the Hessian .* can't be factorized"):
        gptq(
            weights(8, 64),
            gram,
            parse_weight_format("int8"),
            options=GPTQOptions(),
            dtype=torch.float32,
            name="q_proj",
        )


def test_fp8_and_senseless_damping_are_refused():
    with pytest.raises(ConfigError, match="integer codes"):
        gptq(
            weights(8, 64),
            torch.eye(64),
            parse_weight_format("fp8"),
            options=GPTQOptions(),
            dtype=torch.float32,
        )
    with pytest.raises(ConfigError, match=r"0\.01 is usual"):
        GPTQOptions(damping=0)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_inputs_that_are_not_finite_are_refused_by_the_layers_name(bad):
    x = torch.ones(10, 8)
    x[3, 3] = bad
    with pytest.raises(RequestError, match="inputs of layer hold NaN or infinity"):
        statistics(x)
