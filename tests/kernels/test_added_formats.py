"""A format of a width that no file mentions: one entry, and it is named, written, read and measured."""

from typing import Any

import pytest
import torch

import kvq
from kvq.formats import (
    CODES,
    Code,
    Grouped,
    Kind,
    KVFormat,
    LayerFormats,
    PerTokenHead,
    known_names,
    parse_format,
    split_pair,
)
from kvq.kernels import AttentionOptions, Device, KernelSpec, select
from tests.kernels.backends import NAMES, kernel
from tests.kernels.kit import Tables, poisoned_cache, rows_like_kv, stored

WIDTHS = [3, 5, 6, 7, 8]


@pytest.fixture
def added(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Code:
    """All that there is to do."""
    bits = getattr(request, "param", 7)
    code = Code(name=f"uint{bits}", bits=bits, kind=Kind.GROUPED, group=32, shown_groups=(32,))
    monkeypatch.setitem(CODES, code.name, code)
    return code


def test_it_has_names_and_sizes(added: Code) -> None:
    assert {"uint7", "uint7_g32"} <= set(known_names())
    for name, scale, bits in (
        ("uint7_g32_s8_rot", Grouped(32, is_narrow=True), 7.5),
        ("uint7_g32_rot", Grouped(32), 8),
    ):
        fmt = parse_format("uint7" if scale.is_narrow else name, 64)
        assert fmt == KVFormat(code=added, scale=scale, rotated=True)
        assert (fmt.name, fmt.code_bytes(64), fmt.bits_per_element(64)) == (name, 56, bits)
    pair = split_pair("k8v7")
    assert (pair.k, pair.v) == ("int8", "uint7")
    with pytest.raises(kvq.KVQError, match="positive multiple of 8, got"):
        parse_format("uint7", 60)


def test_without_its_entry_it_is_unknown() -> None:
    for name in ("uint7", "k8v7"):
        with pytest.raises(kvq.ConfigError, match="unknown KV format"):
            split_pair(name)


@pytest.mark.parametrize("backend", NAMES)
@pytest.mark.parametrize("added", WIDTHS, indirect=True)
def test_every_backend_writes_gathers_and_attends(
    added: Code, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths, dims = [13, 1, 21], (80, 48)
    tables = Tables.scattered(lengths, 5, 11)
    batch = tables.batch([5, 1, 1], lengths)
    slots = torch.tensor([s for i, n in enumerate(lengths) for s in tables.slots(i, 0, n)])
    k, v = (rows_like_kv(sum(lengths), 3, dim, seed) for seed, dim in enumerate(dims))
    q = rows_like_kv(7, 3, dims[0], 77)
    found: dict[str, Any] = {}
    for name in ("reference", backend):
        cache = poisoned_cache(f"{added.name}/{added.name}_g24", [dims])
        layer = cache.layer(0)
        assert not kernel("write_kv", name, monkeypatch)(k, v, layer, slots).any()
        table = torch.tensor(tables.blocks[2], dtype=torch.int32)[None]
        gathered = kernel("gather_dense", name, monkeypatch)(layer, table, 0, 21)
        attended = kernel("attend", name, monkeypatch)(q, layer, batch, AttentionOptions(scale=0.1))
        found[name] = (cache.pool(0).clone(), *gathered, *attended)
    ours, expected = found[backend], found["reference"]
    assert torch.equal(expected[1][0], stored(cache, 0, "k", k[14:]).transpose(0, 1))
    for one, other in zip(ours[:3], expected[:3], strict=True):
        assert torch.equal(one, other)
    close = 5e-4 if backend.startswith("cpu:avx") else 2e-5  # queries and weights are rounded to integers
    for one, other in zip(ours[3:], expected[3:], strict=True):
        torch.testing.assert_close(one, other, rtol=close, atol=close)


def test_more_bits_lose_less(monkeypatch: pytest.MonkeyPatch) -> None:
    for bits in WIDTHS:
        code = Code(name=f"uint{bits}", bits=bits, kind=Kind.GROUPED, group=32)
        monkeypatch.setitem(CODES, code.name, code)
    names = ["fp32", "uint8", "uint7", "uint6", "uint5", "int4", "uint3", "int2"]
    text = "The sea was calm. Then a storm rose, and the ship with all its sailors sank. " * 20
    rows = kvq.perplexity("tiny", kv=names, text=text, context=128)
    assert [row["kv"] for row in rows[:8]] == names
    losses = [row["kl_mean"] for row in rows[1:8]]
    assert losses == sorted(losses)
    assert losses[0] < 1e-3 < losses[-1]


def test_compiled_kernels_refuse_a_code_that_means_something_new(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference is then what runs it, where its codec has it."""
    code = Code(name="fp7", bits=8, kind=Kind.SCALED, largest=57344.0)
    fmt = KVFormat(code=code, scale=PerTokenHead())
    formats = LayerFormats(k=fmt, v=fmt, k_head_dim=64, v_head_dim=64)
    spec = KernelSpec(formats=formats, q_heads=4, kv_heads=4, block_size=16)
    gpu = Device(type="cuda", name="H200", capability=(9, 0))
    for operation in ("write_kv", "attend", "gather_dense"):
        for backend, device in (("cpu", Device(type="cpu", name="cpu")), ("triton", gpu)):
            assert select(operation, spec, device).backend == "reference"
            with pytest.raises(kvq.KVQError, match=f"{backend}: does not know the code fp7"):
                select(operation, spec, device, backend)


def test_a_code_is_named_so_that_names_can_be_read() -> None:
    with pytest.raises(kvq.ConfigError, match="letters, then digits, such as uint6; got 'e5m2'"):
        Code(name="e5m2", bits=8, kind=Kind.SCALED, largest=57344.0)
