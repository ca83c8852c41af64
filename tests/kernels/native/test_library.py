"""The compiled kernels as a library: found, refused with a reason, and called with sizes that fit."""

import ctypes
import logging
import os
import runpy
import shutil
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import setuptools
import torch

from kvq.errors import ConfigError, UnsupportedKernel
from kvq.formats import KVRecipe
from kvq.kernels import AttentionOptions, Device, KernelSpec, registry, select
from kvq.kernels.attend.cpu import attend
from kvq.kernels.attend.options import Part
from kvq.kernels.gather_dense.cpu import gather_dense
from kvq.kernels.merge_partials.cpu import merge_partials
from kvq.kernels.native import library
from kvq.kernels.write_kv.cpu import write_kv
from tests.kernels.kit import POISON, Tables, poisoned_cache, rows_like_kv

CPU = Device(type="cpu", name="cpu")
PLAIN = AttentionOptions(scale=1.0)


def spec(kv: str) -> KernelSpec:
    """A layer in that format."""
    layer = KVRecipe.uniform(kv, [(64, 64)]).layers[0]
    return KernelSpec(formats=layer, q_heads=6, kv_heads=3, block_size=32)


def test_every_variant_up_to_this_cpus_best_was_built() -> None:
    found = library.variants()
    assert not isinstance(found, str), found
    best = found[0].best  # of the CPU, whatever was built
    assert [x.variant for x in found] == list(library.VARIANTS[library.VARIANTS.index(best) :])
    assert library.load() == found[0]


@pytest.mark.parametrize("variant", library.VARIANTS)
def test_every_variant_whose_flags_the_compiler_knows_was_built(
    variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A variant that does not compile is left out: right for an old compiler, wrong for an error of ours."""
    monkeypatch.setattr(setuptools, "setup", lambda **_: None)
    flags = runpy.run_path(str(Path(__file__).parents[3] / "setup.py"))["VARIANTS"].get(variant)
    path = library._path()
    if flags is None:
        pytest.skip("a variant of another kind of CPU")
    compiler = [os.environ.get("CXX", "g++"), "-fsyntax-only", "-x", "c++", *flags, os.devnull]
    if shutil.which(compiler[0]) is None or subprocess.run(compiler, capture_output=True).returncode:
        pytest.skip("this compiler does not know the variant's flags")
    assert path is not None
    assert hasattr(ctypes.CDLL(str(path)), f"kvq_{variant}_attend")


def test_without_the_library_the_reference_runs_and_one_line_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    reason = (
        "the C++ kernels were not built; install a C++ compiler, gcc or clang, then build them: "
        "pip install . in a clone of kvq"
    )
    monkeypatch.setattr(library, "_path", lambda: None)
    library.variants.cache_clear()
    registry._log_fallback.cache_clear()
    try:
        assert library.variants() == reason
        monkeypatch.setattr(library, "load", lambda: reason)
        with caplog.at_level(logging.WARNING, logger="kvq"):
            for operation in ("attend", "write_kv", "gather_dense", "attend"):
                assert select(operation, spec("int4"), CPU).backend == "reference"
        assert [r.getMessage() for r in caplog.records] == [
            f"kernels run on the reference backend "
            f"(triton: needs an NVIDIA or AMD GPU, not cpu; cpu: {reason})"
        ]
        with pytest.raises(UnsupportedKernel, match="not built"):
            select("attend", spec("int4"), CPU, "cpu")
        with pytest.raises(UnsupportedKernel, match="not built"):
            library.loaded()
    finally:
        library.variants.cache_clear()
        registry._log_fallback.cache_clear()


def test_what_a_compiler_said_is_pointed_to(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "not_built.txt").write_text("boom")
    monkeypatch.setattr(library, "__file__", str(tmp_path / "library.py"))
    library.variants.cache_clear()
    try:
        assert f"(what it said: {tmp_path / 'not_built.txt'})" in str(library.variants())
    finally:
        library.variants.cache_clear()


class Built:
    """A loaded library of one variant, on a CPU that runs another at best."""

    def __init__(self, variant: str, best: str):
        self._variant = variant
        self.kvq_cpu_features = partial(best.encode)  # which takes attributes, as functions of ctypes do

    def __getattr__(self, name: str) -> SimpleNamespace:
        if not name.startswith(f"kvq_{self._variant}_"):
            raise AttributeError(name)
        return SimpleNamespace()


@pytest.mark.parametrize(
    ("built", "best", "runs"),
    [
        ("avx512", "avx2", None),
        ("avx512vnni", "avx512", None),
        ("avx2", "portable", None),
        ("avx2", "avx512", "avx2"),
        ("portable", "avx512vnni", "portable"),
    ],
)
def test_a_library_built_on_another_cpu_runs_or_says_how_to_build_it_here(
    monkeypatch: pytest.MonkeyPatch, built: str, best: str, runs: str | None
) -> None:
    monkeypatch.setattr(library.ctypes, "CDLL", lambda _: Built(built, best))
    library.variants.cache_clear()
    try:
        found = library.variants()
    finally:
        library.variants.cache_clear()
    if runs is None:
        assert found == (
            f"the C++ kernels were built for other CPUs alone ({built}), and this one runs {best}; "
            "build them here: pip install . in a clone of kvq"
        )
    else:
        assert [(x.variant, x.best) for x in found] == [(runs, best)]
        assert str(found[0]) == (
            f"{runs}; {best}, which this CPU runs, was not built: pip install . in a clone of kvq"
        )


def test_a_library_that_is_no_library_is_a_reason_not_a_crash(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    broken = tmp_path / "_kernels.so"
    broken.write_bytes(b"not an ELF file")
    monkeypatch.setattr(library, "_path", lambda: broken)
    library.variants.cache_clear()
    try:
        assert "can't be loaded" in str(library.variants())
    finally:
        library.variants.cache_clear()


def test_rows_too_long_and_other_devices_are_refused_by_name() -> None:
    long = replace(spec("int2").formats, k_head_dim=8192)
    reason = library.supports(replace(spec("int2"), formats=long), CPU).reason
    assert reason == "takes head dimensions up to 4096"
    assert library.supports(spec("int2"), CPU).yes
    gpu = Device(type="cuda", name="H200", capability=(9, 0))
    assert library.supports(spec("int4"), gpu).reason == "works on CPU memory, not on H200"


@pytest.mark.parametrize("bad", [-1, 11, 1 << 30])
def test_blocks_outside_the_pool_are_refused_before_anything_is_touched(bad: int) -> None:
    cache = poisoned_cache("int4", [(48, 48)])
    kv = cache.layer(0)
    k, v = rows_like_kv(3, 3, 48), rows_like_kv(3, 3, 48, 1)
    with pytest.raises(IndexError, match="outside the pool"):
        write_kv(k, v, kv, torch.tensor([0, 1, bad * 5]))
    assert (cache.pool(0) == POISON).all()
    batch = Tables([[0, bad]], 5).batch([1], [7])
    with pytest.raises(IndexError, match="outside the pool"):
        attend(rows_like_kv(1, 6, 48), kv, batch, PLAIN)
    with pytest.raises(IndexError, match="outside the pool"):
        gather_dense(kv, torch.tensor([[0, bad]]), 0, 6)
    assert gather_dense(kv, torch.tensor([[0, bad]]), 0, 5)[0].shape == (1, 3, 5, 48)


def test_a_table_shorter_than_its_sequence_is_refused() -> None:
    cache = poisoned_cache("int4", [(48, 48)])
    batch = Tables([[0]], 5).batch([1], [5])
    with pytest.raises(IndexError, match="outside the pool"):
        attend(
            rows_like_kv(1, 6, 48),
            cache.layer(0),
            type(batch)(
                query_lens=(1,), context_lens=(11,), tables=batch.tables[:, :2] * 0, slots=batch.slots
            ),
            PLAIN,
        )


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/maps")
def test_the_kernels_bring_no_second_openmp_runtime() -> None:
    program = """
import re, torch
from tests.kernels.kit import Tables, poisoned_cache, rows_like_kv
from kvq.kernels import AttentionOptions
from kvq.kernels.attend.cpu import attend
torch.set_num_threads(2)
cache = poisoned_cache("int4", [(48, 48)], fill=0)
batch = Tables([[0, 1, 2, 3, 4, 5]], 5).batch([30], [30])
attend(rows_like_kv(30, 6, 48), cache.layer(0), batch, AttentionOptions(scale=1.0))
maps = open("/proc/self/maps").read()
print(len(set(re.findall(r"\\S*lib(?:gomp|iomp|omp)\\S*", maps))))
"""
    root = Path(__file__).parents[3]
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=root, check=True
    )
    assert run.stdout.strip() == "1"


def test_shapes_that_do_not_fit_are_refused() -> None:
    cache = poisoned_cache("int4", [(48, 60)])
    kv, slots = cache.layer(0), torch.arange(3)
    k, v = rows_like_kv(3, 3, 48), rows_like_kv(3, 3, 60)
    for bad_k, bad_v, bad_slots in ((v, v, slots), (k, k, slots), (k[:, :2], v, slots), (k, v, slots[:2])):
        with pytest.raises(ConfigError, match="must be"):
            write_kv(bad_k, bad_v, kv, bad_slots)
    batch = Tables([[0, 1]], 5).batch([1], [7])
    for q, sinks in ((v, None), (rows_like_kv(2, 6, 48), None), (rows_like_kv(1, 4, 48), None)):
        with pytest.raises(ConfigError):
            attend(q, kv, batch, AttentionOptions(scale=1.0, sinks=sinks))
    with pytest.raises(ConfigError, match="sinks"):
        attend(rows_like_kv(1, 6, 48), kv, batch, AttentionOptions(scale=1.0, sinks=torch.zeros(3)))
    assert (cache.pool(0) == POISON).all()


def test_lengths_positions_and_partials_that_do_not_fit_are_refused() -> None:
    kv = poisoned_cache("int4", [(48, 60)], fill=0).layer(0)
    batch = Tables([[0, 1], [2, 3]], 5).batch([1, 1], [7, 7])
    q = rows_like_kv(2, 6, 48)
    for wrong in (
        {"query_lens": (3, -1)},
        {"context_lens": (7,)},
        {"context_lens": (7, 0)},
        {"tables": batch.tables[:1]},
    ):
        with pytest.raises(ConfigError):
            attend(q, kv, replace(batch, **wrong), PLAIN)
    with pytest.raises(IndexError):  # a slice of a wider table is not read beyond its columns
        attend(q, kv, replace(batch, tables=batch.tables[:, :1]), PLAIN)
    with pytest.raises(IndexError):
        attend(q, kv, replace(batch, tables=batch.tables.long() + (1 << 32)), PLAIN)
    same = torch.tensor([[0, 1]], dtype=torch.int32).expand(2, 2)  # stride 0: both share their blocks
    assert attend(q, kv, replace(batch, tables=same), PLAIN)[0].shape == (2, 6, 60)
    for start, end in ((-3, 2), (4, 2)):
        with pytest.raises(ConfigError, match="0 <= start <= end"):
            gather_dense(kv, batch.tables, start, end)
    with pytest.raises(ConfigError, match="out must be"):
        gather_dense(kv, batch.tables, 0, 4, out=(torch.empty(2, 3, 4, 48), torch.empty(2, 3, 3, 60)))
    with pytest.raises(ConfigError, match="so lses must be"):
        merge_partials(torch.zeros(2, 5, 3, 8), torch.zeros(2, 5, 2))
    with pytest.raises(ConfigError, match="so lses must be"):
        merge_partials(torch.zeros(2, 5, 3, 8), torch.zeros(2, 5, 3), torch.zeros(2))


def test_windows_softcaps_and_lengths_out_of_range_are_refused_and_never_wrap() -> None:
    kv = poisoned_cache("int4", [(48, 60)], fill=0).layer(0)
    batch = Tables([[0, 1]], 5).batch([1], [7])
    q = rows_like_kv(1, 6, 48)
    for options in ({"window": 0}, {"window": -3}, {"softcap": 0.0}, {"softcap": -1.0}):
        with pytest.raises(ConfigError, match="or None"):
            attend(q, kv, batch, AttentionOptions(scale=1.0, **options))
    for context in (1 << 31, (1 << 31) - 1, (1 << 32) + 7):
        with pytest.raises(IndexError):
            attend(q, kv, replace(batch, context_lens=(context,)), PLAIN)
    plain = attend(q, kv, batch, PLAIN)[0]
    assert torch.equal(attend(q, kv, batch, AttentionOptions(scale=1.0, window=(1 << 32) + 1))[0], plain)
    none = Part(is_young=False, recent=1 << 32, block_size=kv.block_size)
    assert not attend(q, kv, batch, AttentionOptions(scale=1.0, part=none))[0].any()
