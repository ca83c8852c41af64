"""Mixtures of experts: the reference's results, and the same bits for a row in any batch, on any threads."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kvq.errors import ConfigError
from kvq.formats.ggml import GGML_TYPES
from kvq.formats.weights import Inputs
from kvq.kernels import BlockWeight, PlainWeight, Weight
from kvq.kernels.experts.cpu import CpuExperts
from kvq.kernels.experts.reference import Gating, Parts, ReferenceExperts, parts_of
from kvq.kernels.gated.reference import Activation
from kvq.kernels.linear.cpu import CpuLinear, CpuMLP
from kvq.kernels.native import library
from tests.kernels.backends import NAMES
from tests.kernels.linear.kit import check_threads, error, rows_of, weight_of
from tests.models.gguf.kit import random_blocks

EXPERTS, HIDDEN, INNER = 5, 64, 96
GPT_OSS = Gating(slope=1.702, limit=7.0, shift=1.0)
NAN = float("nan")
MIXED = "Q4_0+Q8_0+Q5_1"  # types of gates, the gated rows, and down


@pytest.fixture(autouse=True, params=[name for name in NAMES if name.startswith("cpu:")])
def variant(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every test below holds for every variant."""
    name: str = request.param
    chosen = next(x for x in library.variants() if x.variant == name.partition(":")[2])
    monkeypatch.setattr(library, "load", lambda: chosen)
    return name


def linear_of(weight: Parts) -> CpuLinear:
    return CpuLinear(*parts_of(weight))


def in_blocks(
    name: str, experts: int, hidden: int, inner: int, inputs: Inputs = Inputs.GROUPS
) -> tuple[list[Parts], list[Parts]]:
    """gate_up and down of experts whose three weights have types of their own, some of them floats."""

    def one(kind: str, outputs: int, columns: int, seed: int) -> Weight:
        if kind in ("float32", "bfloat16"):
            source = torch.Generator().manual_seed(seed)
            return PlainWeight(
                values=torch.randn(outputs, columns, generator=source).to(getattr(torch, kind))
            )
        rows = random_blocks(kind, outputs, columns, seed=seed)
        return BlockWeight(fmt=replace(GGML_TYPES[kind], inputs=inputs), rows=rows)

    gate, up, down = name.split("+")
    gate_up: list[Parts] = [
        (one(gate, inner, hidden, seed), one(up, inner, hidden, 20 + seed)) for seed in range(experts)
    ]
    return gate_up, [one(down, hidden, inner, 50 + seed) for seed in range(experts)]


def weights_of(
    name: str, experts: int = EXPERTS, hidden: int = HIDDEN, inner: int = INNER
) -> tuple[list[Parts], list[Parts]]:
    """gate_up and down of experts that differ."""
    if "+" in name:
        return in_blocks(name, experts, hidden, inner)

    def one(outputs: int, inputs: int, seed: int) -> Weight:
        if name in ("float32", "bfloat16"):
            source = torch.Generator().manual_seed(seed)
            return PlainWeight(values=torch.randn(outputs, inputs, generator=source).to(getattr(torch, name)))
        weight = weight_of(name, outputs + seed, inputs)
        parts = {key: getattr(weight, key) for key in ("codes", "scale", "zero", "order")}
        own = {key: x if key == "order" or x is None else x[seed:] for key, x in parts.items()}
        return type(weight)(fmt=weight.fmt, **own)

    gate_up: list[Any] = [one(2 * inner, hidden, seed) for seed in range(experts)]
    return gate_up, [one(hidden, inner, 50 + seed) for seed in range(experts)]


def choices(rows: int, top: int, experts: int = EXPERTS, seed: int = 0) -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(seed)
    chosen = [torch.randperm(experts, generator=source)[:top] for _ in range(rows)]
    chosen_ = torch.stack(chosen) if chosen else torch.zeros(0, top, dtype=torch.int64)
    return chosen_, torch.rand(rows, top, generator=source)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["float32", "bfloat16", "int8", "int4_g32", "w8a8", "fp8", MIXED])
def test_a_rows_sum_is_that_of_its_experts_one_by_one_in_its_own_order(name: str, dtype: torch.dtype) -> None:
    gate_up, down = weights_of(name)
    experts = CpuExperts(gate_up, down, Gating())
    alone = [CpuMLP(linear_of(a), linear_of(b), Activation.SILU) for a, b in zip(gate_up, down, strict=True)]
    for rows, top in ((1, 2), (2, 3), (23, 2), (1, 5), (0, 2)):
        x = (0.02 * rows_of(rows, HIDDEN)).to(dtype)  # products that fp16 holds
        chosen, weights = choices(rows, top)
        got = experts(x, chosen, weights)
        for row in range(rows):
            want = torch.zeros(HIDDEN)
            for expert, weight in zip(chosen[row].tolist(), weights[row], strict=True):
                want += alone[expert](x[row : row + 1])[0].float() * weight
            assert torch.equal(got[row], want.to(dtype)), (rows, top, row)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("name", "hidden", "inner"),
    [
        ("bfloat16", 32, 8192),  # few inputs
        ("bfloat16", 1600, 700),  # and blocks of columns
        ("Q8_0+bfloat16+Q4_0", 1600, 704),  # and a weight whose sums are kept, beside one in blocks
    ],
)
def test_tasks_of_wide_experts_keep_to_their_memory(
    name: str, hidden: int, inner: int, dtype: torch.dtype
) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # the most panels a task
    try:
        gate_up, down = weights_of(name, 3, hidden, inner)
        experts = CpuExperts(gate_up, down, Gating())
        alone = [
            CpuMLP(linear_of(a), linear_of(b), Activation.SILU) for a, b in zip(gate_up, down, strict=True)
        ]
        for rows in (1, 90):
            x = (0.02 * rows_of(rows, hidden)).to(dtype)
            chosen, weights = torch.arange(rows)[:, None] % 3, torch.ones(rows, 1)
            got = experts(x, chosen, weights)
            for i, mlp in enumerate(alone[:rows]):
                assert torch.equal(got[i::3], mlp(x[i::3])), (rows, i)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("gating", [Gating(), Gating(activation=Activation.GELU_TANH), GPT_OSS], ids=str)
@pytest.mark.parametrize("shape", [(3, 1, 1), (4, 60, 33), (7, 17, 530)], ids=str)
def test_results_are_the_references(shape: tuple[int, int, int], gating: Gating, biased: bool) -> None:
    gate_up, down = weights_of("float32", *shape)
    count, hidden, inner = shape
    biases = {}
    if biased:
        biases = {"gate_up_bias": torch.randn(count, 2 * inner), "down_bias": torch.randn(count, hidden)}
    x, (chosen, weights) = torch.randn(29, hidden) * 3, choices(29, 3, count)
    got = CpuExperts(gate_up, down, gating, **biases)(x, chosen, weights)
    assert error(got, ReferenceExperts(gate_up, down, gating, **biases)(x, chosen, weights).double()) < 1e-5


@pytest.mark.parametrize("inputs", [Inputs.FULL, Inputs.GROUPS])
@pytest.mark.parametrize(
    ("name", "hidden", "inner"),
    [
        ("Q4_K+Q4_K+Q6_K", 256, 512),
        ("Q4_K+Q6_K+Q8_0", 256, 96),
        ("Q4_0+IQ4_NL+Q4_1", 96, 160),
        ("Q8_0+Q5_K+float32", 512, 37),  # the second weight's outputs begin within a panel
        ("bfloat16+MXFP4+Q3_K", 64, 256),
        ("Q2_K+float32+bfloat16", 256, 17),
    ],
)
def test_blocks_of_any_types_give_the_references_results(
    name: str, hidden: int, inner: int, inputs: Inputs
) -> None:
    gate_up, down = in_blocks(name, 4, hidden, inner, inputs)
    x, (chosen, weights) = rows_of(29, hidden, seed=7), choices(29, 3, 4)
    experts, reference = CpuExperts(gate_up, down, Gating()), ReferenceExperts(gate_up, down, Gating())
    got, want = experts(x, chosen, weights), reference(x, chosen, weights)
    assert error(got, want.double()) < 5e-4  # of inputs in 16 bits, or of one that is rounded to another code
    assert torch.equal(experts(x[:1], chosen[:1], weights[:1]), got[:1])


def test_experts_in_blocks_take_the_bytes_of_their_panels() -> None:
    gate_up, down = in_blocks("Q4_K+Q6_K+Q8_0", 3, 512, 256)
    experts = CpuExperts(gate_up, down, Gating())
    of_blocks = [
        part.nbytes // part.fmt.nbytes * part.fmt.panel_bytes
        for weight in (*gate_up, *down)
        for part in parts_of(weight)
        if isinstance(part, BlockWeight)
    ]
    assert len(of_blocks) == 9
    assert experts.nbytes == experts.code_bytes == sum(of_blocks)


@pytest.mark.parametrize("name", ["float32", "int4_g32", "int8", MIXED])
def test_a_row_has_the_same_bits_alone_and_among_others(name: str) -> None:
    experts = CpuExperts(*weights_of(name), Gating())
    x, (chosen, weights) = rows_of(40, HIDDEN), choices(40, 2)
    want = experts(x, chosen, weights)
    for rows in (1, 2, 3, 7, 13, 39):
        assert torch.equal(experts(x[:rows], chosen[:rows], weights[:rows]), want[:rows]), rows
    many = [part.repeat(30, 1) for part in (x, chosen, weights)]  # more than are computed at a time
    assert torch.equal(experts(*many), want.repeat(30, 1))
    other = chosen.clone()
    other[1:] = choices(39, 2, seed=9)[0]
    assert torch.equal(experts(x, other, weights)[0], want[0])


def test_experts_that_nobody_chose_and_those_that_all_chose() -> None:
    gate_up, down = weights_of("int4_g32")
    x, weights = rows_of(19, HIDDEN), torch.rand(19, 1)
    for expert in (0, 3, EXPERTS - 1):
        alone = CpuMLP(linear_of(gate_up[expert]), linear_of(down[expert]), Activation.SILU)
        got = CpuExperts(gate_up, down, Gating())(x, torch.full((19, 1), expert), weights)
        assert torch.equal(got, alone(x) * weights)


@pytest.mark.parametrize("rows", [1, 31])
@pytest.mark.parametrize("name", ["float32", "int4_g32", "Q4_K+Q6_K+Q8_0"])
def test_threads_change_no_bit(name: str, rows: int) -> None:
    experts = CpuExperts(*weights_of(name, 3, 512, 768), Gating())
    chosen, weights = choices(rows, 2, 3)
    check_threads(lambda x: experts(x, chosen, weights), rows_of(rows, 512))


@pytest.mark.parametrize("name", ["int8", MIXED])
def test_nothing_but_a_rows_own_numbers_is_read(name: str) -> None:
    experts = CpuExperts(*weights_of(name), Gating())
    x, (chosen, weights) = rows_of(9, HIDDEN), choices(9, 2)
    poison = torch.full((60, HIDDEN), NAN)
    assert experts(poison, *choices(60, 2)).isnan().all()  # which scratch memory may still hold
    want = experts(x, chosen, weights)
    wide = torch.full((11, HIDDEN + 30), NAN)
    wide[1:-1, 7 : HIDDEN + 7] = x
    assert torch.equal(experts(wide[1:-1, 7 : HIDDEN + 7], chosen, weights), want)
    x[4, 11] = NAN
    got = experts(x, chosen, weights)
    assert got[4].isnan().all()
    others = [i for i in range(9) if i != 4]
    assert torch.equal(got[others], want[others])


def test_what_does_not_fit_is_refused() -> None:
    gate_up, down = weights_of("int8")
    experts = CpuExperts(gate_up, down, Gating())
    x, (chosen, weights) = rows_of(3, HIDDEN), choices(3, 2)
    for bad in (-1, EXPERTS):
        chosen_ = chosen.clone()
        chosen_[2, 1] = bad
        for kernel in (experts, ReferenceExperts(gate_up, down, Gating())):
            with pytest.raises(IndexError, match="an expert that isn't there"):
                kernel(x, chosen_, weights)
    with pytest.raises(ConfigError, match=r"choices and weights \[rows, top\], got \[3, 64\], \[2, 2\]"):
        experts(x, chosen[:2], weights)
    with pytest.raises(ConfigError, match="choices of experts must be int64"):
        experts(x, chosen.int(), weights)
    with pytest.raises(ConfigError, match="as many pairs"):
        CpuExperts(gate_up, down[:-1], Gating())
    with pytest.raises(ConfigError, match="as many pairs"):
        CpuExperts(gate_up[:-1] + weights_of("int8", 1, HIDDEN, 32)[0], down, Gating())
    odd: list[Parts] = [(PlainWeight(values=torch.ones(96, 63)), PlainWeight(values=torch.ones(96, 64)))]
    for kernel_of in (CpuExperts, ReferenceExperts):
        with pytest.raises(ConfigError, match=r"weights of the same inputs can be joined, got \[63, 64\]"):
            kernel_of(odd * EXPERTS, down, Gating())
    with pytest.raises(ConfigError, match=r"biases of experts must be fp32 \[5, 192\]"):
        CpuExperts(gate_up, down, Gating(), gate_up_bias=torch.zeros(5, 96))
    with pytest.raises(ConfigError, match="GELU has no C"):
        CpuExperts(gate_up, down, Gating(activation=Activation.GELU))
