"""A decoder layer in two calls on CPUs: bit for bit what its operations give one after the other."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kvq.errors import ConfigError
from kvq.kernels import PlainWeight
from kvq.kernels.attend.options import AttentionOptions
from kvq.kernels.decoder.cpu import CpuDecoder
from kvq.kernels.decoder.parts import DecoderParts, GatedParts
from kvq.kernels.gated.reference import Activation
from kvq.kernels.linear.cpu import CpuLinear, CpuMLP
from kvq.kernels.rms_norm.cpu import rms_norm
from kvq.kernels.rms_norm.reference import NormWeight
from kvq.kernels.rope.cpu import rope
from kvq.kernels.rope_write.reference import LayerHeads
from tests.kernels.backends import NAMES, kernel
from tests.kernels.linear.kit import weight_of

VARIANTS = [name for name in NAMES if name not in ("triton", "reference")]
HIDDEN, HEADS, KV_HEADS, DIM, INNER = 72, 6, 2, 16, 104
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True, params=VARIANTS)
def variant(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test below holds for every variant of the compiled kernels."""
    kernel("linear_w8", request.param, monkeypatch)


def linear(outputs: int, inputs: int, fmt: str) -> CpuLinear:
    if fmt != "plain":
        return CpuLinear(weight_of(fmt, outputs, inputs))
    return CpuLinear(PlainWeight(values=0.1 * numbers(outputs, inputs)))


def numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def norm(dim: int) -> NormWeight:
    return NormWeight(weight=1 + 0.1 * numbers(dim), eps=1e-5)


def weights(
    fmt: str, dtype: torch.dtype, *, biases: bool, head_norms: bool, around: bool = False
) -> DecoderParts:
    heads = LayerHeads(
        q_heads=HEADS,
        kv_heads=KV_HEADS,
        k_dim=DIM,
        v_dim=DIM,
        rotary_dim=DIM,
        norms=(norm(DIM), NormWeight(weight=numbers(DIM), eps=1e-3)) if head_norms else None,
        bias=numbers((HEADS + 2 * KV_HEADS) * DIM).to(dtype) if biases else None,
    )
    return DecoderParts(
        index=0,
        input_norm=norm(HIDDEN),
        qkv=linear(heads.width, HIDDEN, fmt),
        heads=heads,
        options=AttentionOptions(scale=1.0),
        output=linear(HIDDEN, HEADS * DIM, fmt),
        output_bias=numbers(HIDDEN).to(dtype) if biases else None,
        attention_norm=NormWeight(weight=numbers(HIDDEN + 1)[1:], eps=1e-4) if around else None,
        mlp_norm=NormWeight(weight=numbers(HIDDEN).to(dtype), eps=1e-6),
        mlp=GatedParts(
            gate_up=linear(2 * INNER, HIDDEN, fmt),
            down=linear(HIDDEN, INNER, fmt),
            activation=Activation.SILU,
        ),
        out_norm=NormWeight(weight=numbers(HIDDEN + 2)[2:].to(dtype), eps=1e-6) if around else None,
        scale=1.0,
        angles="",
    )


def before(w: DecoderParts, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    joined = w.qkv(rms_norm(x, w.input_norm.weight, w.input_norm.eps))
    if w.heads.bias is not None:
        joined = joined + w.heads.bias
    heads = joined.view(len(x), HEADS + 2 * KV_HEADS, DIM)
    q, k, v = heads.split([HEADS, KV_HEADS, KV_HEADS], 1)
    if w.heads.norms:
        q, k = (rms_norm(a, n.weight, n.eps) for a, n in zip((q, k), w.heads.norms, strict=True))
    q, k = q.contiguous(), k.contiguous()
    rope(q, cos, sin)
    rope(k, cos, sin)
    return torch.cat([q, k, v], 1)


def after(w: DecoderParts, x: Tensor, attended: Tensor) -> Tensor:
    added = w.output(attended)
    if w.output_bias is not None:
        added = added + w.output_bias
    x = x + normed(added, w.attention_norm)
    inner = CpuMLP(w.mlp.gate_up, w.mlp.down, w.mlp.activation)(normed(x, w.mlp_norm))
    return x + normed(inner, w.out_norm)


def normed(x: Tensor, own: NormWeight | None) -> Tensor:
    return x if own is None else rms_norm(x, own.weight, own.eps)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("fmt", "biases", "head_norms", "around"),
    [("plain", True, False, False), ("int8", False, True, False), ("int8", True, True, True)],
)
def test_two_calls_give_the_bits_of_many(
    fmt: str, biases: bool, head_norms: bool, around: bool, dtype: torch.dtype
) -> None:
    w = weights(fmt, dtype, biases=biases, head_norms=head_norms, around=around)
    decoder = CpuDecoder(w)
    for rows in (1, 2, 33, 505, 0):
        x, attended = 0.1 * numbers(rows, HIDDEN).to(dtype), 0.1 * numbers(rows, HEADS * DIM).to(dtype)
        cos, sin = numbers(rows, DIM).to(dtype), numbers(DIM, rows).T.to(dtype)
        assert torch.equal(decoder.before(x, cos, sin), before(w, x, cos, sin)), rows
        assert torch.equal(decoder.after(x, attended), after(w, x, attended)), rows


def test_inputs_stay_what_they_were_and_need_not_be_contiguous() -> None:
    w = weights("plain", torch.float32, biases=True, head_norms=True)
    decoder = CpuDecoder(w)
    x, angles = numbers(9, 2 * HIDDEN)[:, ::2], numbers(9, DIM)
    attended = numbers(9, HEADS * DIM)
    kept = [a.clone() for a in (x, attended, angles)]
    heads, out = decoder.before(x, angles, angles), decoder.after(x, attended)
    assert all(torch.equal(a, b) for a, b in zip(kept, (x, attended, angles), strict=True))
    assert torch.equal(heads, decoder.before(x.contiguous(), angles, angles))
    assert torch.equal(out, decoder.after(x.contiguous(), attended))


def test_parts_and_inputs_that_do_not_fit_are_refused() -> None:
    w = weights("plain", torch.float32, biases=True, head_norms=True)
    smaller = {"k_dim": 8, "v_dim": 8, "rotary_dim": 8, "norms": None, "bias": None}
    for wrong in (
        {"heads": replace(w.heads, **smaller)},
        {"heads": replace(w.heads, q_heads=4, bias=None)},
        {"input_norm": norm(HIDDEN - 1)},
        {"mlp_norm": NormWeight(weight=numbers(2 * HIDDEN)[::2], eps=1e-5)},
        {"attention_norm": norm(HIDDEN + 1)},
        {"out_norm": norm(DIM)},
        {"mlp": replace(w.mlp, down=linear(HIDDEN, 96, "plain"))},
        {"output": linear(HIDDEN - 8, HEADS * DIM, "plain")},
    ):
        with pytest.raises(ConfigError, match="don't fit each other"):
            CpuDecoder(replace(w, **wrong))
    for other in (
        {"scale": 0.5},
        {"input_norm": None},
        {"mlp_norm": None},
        {"mlp": lambda x: x},
        {"mlp": replace(w.mlp, activation=Activation.GELU)},
        {"heads": replace(w.heads, rotary_dim=DIM // 2)},
    ):
        with pytest.raises(ConfigError, match="only its own code or Triton"):
            CpuDecoder(replace(w, **other))
    decoder = CpuDecoder(w)
    x, angles, attended = numbers(5, HIDDEN), numbers(5, DIM), numbers(5, HEADS * DIM)
    for x_, cos, sin in (
        (x[:, 1:], angles, angles),
        (x.double(), angles, angles),
        (x, angles[:4], angles),
        (x, angles, angles.half()),
        (x.half(), angles.half(), angles.half()),  # not the biases' dtype
    ):
        with pytest.raises(ConfigError, match=r"must be|takes"):
            decoder.before(x_, cos, sin)
    for rows in (attended[:4], attended[:, 1:], attended.bfloat16()):
        with pytest.raises(ConfigError, match=r"must be|takes"):
            decoder.after(x, rows)
