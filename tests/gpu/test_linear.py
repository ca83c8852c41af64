"""The Linear kernels in Triton on a real GPU: within twice torch's error, the same bits in any graph.

TRITON_INTERPRET=0 python -m pytest tests/gpu
"""

import pytest
import torch
from torch import Tensor

from kvq.bench.kernels.measure import relative_error
from kvq.formats.weights import Inputs, WeightCode, WeightFormat
from kvq.kernels import QuantizedWeight
from kvq.kernels.linear.reference import quantize_inputs, rounded_inputs
from tests.kernels.linear.triton_kit import BLOCKS, FORMATS, random_blocks, random_weight

if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)

from kvq.kernels.linear import tiles
from kvq.kernels.linear import triton as kernel
from kvq.kernels.linear.triton import TritonLinear

GPU = torch.device("cuda")
ROWS = (1, 3, 16, 17, 33, 64, 65, 150, kernel.DENSE_ROWS + 1)


def truth(weight: QuantizedWeight, x: Tensor) -> Tensor:
    """fp64 over the codes and the inputs as the format rounds them."""
    scale = weight.scale.double()
    exact = QuantizedWeight(
        fmt=weight.fmt, codes=weight.codes, scale=scale, zero=weight.zero, order=weight.order
    ).dequantize()
    return rounded_inputs(x.float().cpu(), weight.fmt.inputs).double() @ exact.T


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", FORMATS)
def test_results_err_no_more_than_twice_what_torch_does(name: str, dtype: torch.dtype) -> None:
    weight = random_weight(name, 1920, 190, dtype=dtype, ordered=True)
    layer = TritonLinear(weight.to(GPU))
    for rows in ROWS:
        x = torch.randn(rows, 1920, generator=torch.Generator().manual_seed(rows)).to(dtype)
        want = truth(weight, x)
        got = layer(x.to(GPU))
        assert got.dtype == dtype
        allowed = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}[dtype]
        assert relative_error(got.cpu(), want) < allowed, rows


@pytest.mark.parametrize("name", ["int4_g128", "int4_g128_asym", "int8", "fp8", "w8a8", "fp8_a8", "w4a8"])
def test_a_row_has_the_same_bits_in_every_step_of_its_class_and_in_a_graph(name: str) -> None:
    layer = TritonLinear(random_weight(name, 4096, 1024, dtype=torch.bfloat16).to(GPU))
    for most, fewer in ((16, (1, 3)), (32, (17,)), (64, (33,)), (300, (65,))):
        x = torch.randn(most, 4096, device=GPU, dtype=torch.bfloat16)
        whole = layer(x)
        for rows in fewer:
            assert torch.equal(layer(x[-rows:]), whole[-rows:])
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            again = layer(x)
        x.copy_(torch.randn_like(x))
        graph.replay()
        assert torch.equal(again, layer(x))


def test_a_large_step_is_captured_too() -> None:
    layer = TritonLinear(random_weight("int4_g128", 4096, 1024, dtype=torch.bfloat16).to(GPU))
    x = torch.randn(kernel.DENSE_ROWS, 4096, device=GPU, dtype=torch.bfloat16)
    want = layer(x)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        got = layer(x)
    graph.replay()
    assert torch.equal(got, want)


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_of_gguf(name: str) -> None:
    weight = random_blocks(name, 2048, 190)
    layer = TritonLinear(weight.to(GPU))
    for dtype, allowed in ((torch.float32, 1e-5), (torch.float16, 2e-3), (torch.bfloat16, 1e-2)):
        for rows in ROWS:
            x = torch.randn(rows, 2048, generator=torch.Generator().manual_seed(rows)).to(dtype) / 64
            got = layer(x.to(GPU))
            assert relative_error(got.cpu(), x.double() @ weight.dequantize().double().T) < allowed, rows
            few = 1 if rows <= 16 else rows - 1
            if tiles.row_class(few) == tiles.row_class(rows) and rows < kernel.DENSE_ROWS:
                assert torch.equal(layer(x[-few:].to(GPU)), got[-few:])


@pytest.mark.parametrize("what", [Inputs.INT8, Inputs.FP8])
def test_rounded_inputs_have_the_references_bits(what: Inputs) -> None:
    x = torch.randn(33, 14_336) * torch.logspace(-20, 20, 33)[:, None]
    want, scale = quantize_inputs(x, what)
    codes, found = kernel.quantized(x.to(GPU), what, as_bytes=False)
    assert torch.equal(found.cpu(), scale[:, 0])
    assert torch.equal(codes.float().cpu(), want)


@pytest.mark.parametrize("name", ["int4_g40", "int8", "w8a8", "fp8_a8"])
def test_what_lies_beside_the_inputs_never_enters(name: str) -> None:
    layer = TritonLinear(random_weight(name, 1920, 63, dtype=torch.bfloat16).to(GPU))
    memory = torch.full((24, 2000), float("nan"), device=GPU, dtype=torch.bfloat16)
    memory[3:8, 16:1936] = torch.randn(5, 1920, device=GPU)
    x = memory[3:8, 16:1936]
    assert torch.equal(layer(x), layer(x.clone()))
    assert torch.isfinite(layer(x)).all()


def test_weights_of_more_than_two_billion_bytes() -> None:
    inputs, outputs = 4096, 530_000
    fmt = WeightFormat(code=WeightCode.INT8)
    q = torch.randint(-128, 128, (outputs, inputs), device=GPU, dtype=torch.int8)
    scale = torch.rand(outputs, 1, device=GPU).to(torch.bfloat16)
    layer = TritonLinear(QuantizedWeight.pack(fmt, q, scale))
    x = torch.randn(3, inputs, device=GPU, dtype=torch.bfloat16)
    got = layer(x)[:, -100:]
    want = x.double() @ (q[-100:].double() * scale[-100:].double()).T
    assert relative_error(got, want) < 1e-2
