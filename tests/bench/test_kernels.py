"""`kvq bench attention`, `write` and `tune`: rows that add up, and nothing timed that is wrong."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kvq import cli
from kvq.bench.kernels import attention, measure
from kvq.bench.kernels import tune as tuning
from kvq.bench.kernels.measure import exact_attention, percentile
from kvq.bench.kernels.staged import read_bytes, steps_of_staged
from kvq.bench.kernels.tune import write_table
from kvq.bench.kernels.workload import Workload, filled_cache, lengths
from kvq.cache import KVCache
from kvq.errors import ConfigError, KVQError
from kvq.kernels import AttentionOptions
from kvq.kernels.gpu import shapes
from kvq.kernels.gpu.shapes import TileShape

SHAPE = ["--q-heads", "4", "--kv-heads", "2", "--head-dim", "32", "--block-size", "5", "--repeats", "2"]


@pytest.fixture(autouse=True)
def few_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small data: no need to rotate it past the cache."""
    monkeypatch.setattr("kvq.bench.kernels.measure.cache_bytes", lambda _: 1 << 14)
    monkeypatch.setattr(measure, "read_bandwidth", lambda _: 20.0)


def run(*arguments: str) -> None:
    """A command that must succeed."""
    with pytest.raises(SystemExit) as stop:
        cli.main(["bench", *arguments])
    assert not stop.value.code


@pytest.mark.parametrize(("new", "operation"), [("1", "decode"), ("7", "extend")])
def test_attention_rows_hold_what_was_promised(new: str, operation: str, tmp_path: Path) -> None:
    path, plot = tmp_path / "a.json", tmp_path / "a.svg"
    run("attention", *SHAPE, "--kv", "int8,int4", "--batch", "3", "--context", "23", "--new", new,
        "--json", str(path), "--plot", str(plot))  # fmt: skip
    result = json.loads(path.read_text())
    assert [(r["name"], r["kv"]) for r in result["rows"]] == [
        ("kvq", "int8"),
        ("kvq", "int4"),
        ("dequantize, then SDPA", "int4"),
        ("SDPA, folded", "bfloat16"),
        ("SDPA, enable_gqa", "bfloat16"),
        ("SDPA, folded", "float32"),
        ("SDPA, enable_gqa", "float32"),
    ]
    promised = {
        "name", "backend", "kv", "operation", "batch", "context", "new_tokens", "q_heads", "kv_heads",
        "head_dim", "block_size", "ms_median", "ms_p10", "ms_p90", "gb_per_s", "fraction_of_bandwidth",
        "max_relative_error",
    }  # fmt: skip
    for row in result["rows"]:
        assert promised <= set(row)
        assert row["operation"] == operation
        assert row["ms_p10"] <= row["ms_median"] <= row["ms_p90"]
        assert row["fraction_of_bandwidth"] == pytest.approx(row["gb_per_s"] / result["read_gb_per_s"])
        rounded = (row["name"], row["kv"]) in (("kvq", "int8"), ("kvq", "int4"))  # integer arithmetic
        assert row["max_relative_error"] < (3e-2 if row["kv"] == "bfloat16" else 2e-3 if rounded else 1e-5)
    int8, int4 = result["rows"][:2]
    assert int8["gb_per_s"] * int8["ms_median"] > 1.5 * int4["gb_per_s"] * int4["ms_median"]
    assert plot.read_text().startswith("<?xml")


@pytest.mark.parametrize("new", ["1", "7"])
def test_latent_attention_beside_torchs(new: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.json"
    shape = ["--q-heads", "6", "--head-dim", "16", "--latent-dim", "64", "--context", "23", "--repeats", "2"]
    step = ["--kv-heads", "1", "--kv", "int8,int4_g16_rot", "--batch", "3", "--new", new]
    run("attention", *shape, *step, "--json", str(path))
    rows = json.loads(path.read_text())["rows"]
    assert [(row["name"], row["latent_dim"]) for row in rows] == [
        ("kvq, latent", 64),
        ("SDPA, absorbed", 64),
        ("kvq, latent", 64),
    ]
    assert all(row["max_relative_error"] < 1e-5 for row in rows)
    with pytest.raises(SystemExit):
        cli.main(["bench", "attention", *shape, "--kv-heads", "2"])
    assert "latents are one KV head for all query heads, got --kv-heads 2" in capsys.readouterr().err


def test_latents_against_heads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.json"
    shape = ["--q-heads", "6", "--head-dim", "16", "--context", "45", "--repeats", "2", "--expanded", "24"]
    run(
        *("attention", *shape, "--latent-dim", "64", "--kv-heads", "1", "--kv", "fp32,int8", "--batch", "2"),
        *("--json", str(path)),
    )
    rows = json.loads(path.read_text())["rows"]
    assert [(row["name"], row["kv"]) for row in rows] == [
        ("kvq, latents", "fp32"),
        ("kvq, heads", "fp32"),
        ("kvq, latents", "int8"),
        ("kvq, heads", "int8"),
    ]
    read = {(row["name"], row["kv"]): row["gb_per_s"] * row["ms_median"] * 1e6 for row in rows}
    assert read["kvq, latents", "fp32"] == pytest.approx(2 * 45 * (16 + 64) * 4)
    assert read["kvq, heads", "fp32"] == pytest.approx(2 * 45 * 6 * (16 + 24 + 24) * 4)
    for options, says in (
        (["--kv-heads", "1"], "--expanded multiplies latents out, so it goes with --latent-dim"),
        (["--kv-heads", "2", "--latent-dim", "64"], "latents are one KV head for all query heads"),
    ):
        with pytest.raises(SystemExit):
            cli.main(["bench", "attention", *shape, *options])
        assert says in capsys.readouterr().err


@pytest.mark.parametrize("context", ["3-1300", "23", "1"])
def test_staged_recipes_attend_to_what_steps_would_have_sealed(context: str, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    formats = ["int4", "int4_mean", "int3+recent=11", "int8/int2_mean+sinks=7+recent=40"]
    many = ["--batch", "3", "--context", context]
    run("attention", *SHAPE, *many, "--kv", ",".join(formats), "--json", str(path))
    rows = [row for row in json.loads(path.read_text())["rows"] if row["name"] == "kvq"]
    assert [row["kv"] for row in rows] == formats
    assert all(row["max_relative_error"] < 2e-3 for row in rows)


@pytest.mark.parametrize(
    ("kv", "contexts"), [("int4_mean", (96, 97, 200)), ("int3+recent=40", (104, 103, 73))]
)
def test_steps_of_staged_recipes_seal_nothing_or_a_block_of_each(kv: str, contexts: tuple[int, ...]) -> None:
    workload = replace(small(), contexts=contexts, kv_heads=2, head_dim=64, block_size=32)
    recent = workload.layout(kv).exact.recent
    quiet, sealing = steps_of_staged(workload, kv).values()
    for step, blocks in ((quiet, 0), (sealing, 1)):
        for n, given in zip(step.contexts, contexts, strict=True):
            assert 0 <= given - n <= 32
            assert max(0, n - recent) // 32 - max(0, n - 1 - recent) // 32 == blocks
    assert list(steps_of_staged(replace(workload, contexts=(20,)), kv)) == ["kvq"]


def test_what_is_read_of_staged_tokens_is_their_own_forms() -> None:
    workload = replace(small(), contexts=(4096,), kv_heads=2, head_dim=64, block_size=32)
    layout = workload.layout("int3+sinks=4+recent=128")
    copies = len(layout.geometry.layers)
    old = 4096 - 128 - 32
    assert read_bytes(layout, 4096) / copies == 2 * 2 * 64 * (3.5 * old + 16 * (128 + 32)) / 8
    assert read_bytes(layout, 20) / copies == 2 * 2 * 64 * 20 * 2


def test_uneven_lengths_have_no_dense_rivals(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    run("attention", *SHAPE, "--kv", "int4", "--batch", "4", "--context", "9-60", "--json", str(path))
    rows = json.loads(path.read_text())["rows"]
    assert [r["name"] for r in rows] == ["kvq"]
    assert rows[0]["tokens"] == sum(lengths("9-60", 4, 0))


def test_lengths_are_drawn_within_their_range_and_bad_ones_refused() -> None:
    drawn = lengths("128-32768", 500, 1)
    assert min(drawn) >= 128
    assert max(drawn) <= 32768
    assert 1_500 < percentile(drawn, 50) < 2_700  # the geometric middle is 2,048
    for bad in ("many", "0", "5-", "-5", "1.5", "100-50"):
        with pytest.raises(ConfigError, match="--context takes"):
            lengths(bad, 2, 0)


def test_a_wrong_kernel_is_found_and_nothing_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    attend = KVCache.attend
    monkeypatch.setattr(KVCache, "attend", lambda *a, **o: [1.01 * x for x in attend(*a, **o)])
    monkeypatch.setattr(measure, "Stopwatch", None)
    with pytest.raises(KVQError, match="kvq over int4 is wrong: relative error 1"):
        attention.bench_attention(small(), ["int4"])


def test_rivals_of_the_users_are_checked_and_timed(tmp_path: Path) -> None:
    (tmp_path / "rivals.py").write_text(
        "import torch\n"
        "def contenders(workload, q, k, v):\n"
        "    def run():\n"
        "        heads = q.shape[2] // k.shape[1]\n"
        "        k_all, v_all = (x.repeat_interleave(heads, dim=1) for x in (k, v))\n"
        "        scores = torch.einsum('snhd,shtd->shnt', q, k_all) * q.shape[3] ** -0.5\n"
        "        return torch.einsum('shnt,shtd->snhd', scores.softmax(-1), v_all)\n"
        "    yield 'mine', 'fp32', k.nbytes + v.nbytes, run\n"
        "    yield 'broken', 'fp32', 1, lambda: run() * 2\n"
    )
    with pytest.raises(KVQError, match="broken over fp32 is wrong"):
        attention.bench_attention(small(), ["int4"], rivals=tmp_path)
    source = (tmp_path / "rivals.py").read_text().replace("run() * 2", "run()")
    (tmp_path / "rivals.py").write_text(source)
    rows, _ = attention.bench_attention(small(), ["int4"], rivals=tmp_path, repeats=1)
    assert [r["name"] for r in rows[-2:]] == ["mine", "broken"]
    with pytest.raises(ConfigError, match=r"--rivals takes a folder with a rivals\.py"):
        attention.bench_attention(small(), ["int4"], rivals=tmp_path / "no")


def test_exact_attention_is_torchs() -> None:
    q, k, v = torch.randn(3, 4, 8), torch.randn(2, 9, 8), torch.randn(2, 9, 8)
    mask = torch.ones(3, 9, dtype=torch.bool).tril(6)
    want = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(0, 1)[None], k[None], v[None], attn_mask=mask, scale=0.3, enable_gqa=True
    )
    torch.testing.assert_close(exact_attention(q, k, v, 0.3).float(), want[0].transpose(0, 1))


def test_write_rows_hold_what_was_promised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "w.json"
    run("write", *SHAPE, "--kv", "fp8,int4", "--batch", "3", "--context", "23", "--json", str(path))
    rows = json.loads(path.read_text())["rows"]
    assert [(r["name"], r["kv"], r["tokens"]) for r in rows] == [("kvq", "fp8", 3), ("kvq", "int4", 3)]
    for row in rows:
        assert 0 < row["us_p10"] <= row["us_median"] <= row["us_p90"]
        assert row["gb_per_s"] > 0
    monkeypatch.setattr("kvq.bench.kernels.write.reference", lambda k, v, kv, slots: kv.k.codes.fill_(7))
    with pytest.raises(SystemExit) as stop:
        cli.main(["bench", "write", *SHAPE, "--kv", "int4", "--context", "23"])
    assert stop.value.code == 2


def test_writes_of_staged_recipes_are_not_timed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["bench", "write", *SHAPE, "--kv", "int3_mean", "--context", "23"])
    assert stop.value.code
    assert "int3_mean" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (["--q-heads", "5"], "multiple of --kv-heads"),
        (["--new", "24"], "shortest context"),
        (["--dtype", "fp64"], "--dtype must be"),
        (["--kv", "int9"], "int9"),
        (["--kv", "int3_mean", "--new", "2"], "decode only; leave out --new 2"),
        (["--backend", "gpu"], "unknown backend"),
        (["--backend", "triton"], "needs an NVIDIA or AMD GPU"),
    ],
)
def test_bad_options_say_what_is_allowed(
    bad: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["bench", "attention", *SHAPE, "--context", "23", *bad])
    assert stop.value.code
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--dtype", "fp32"], "16-bit queries, got --dtype fp32"),
        (["--backend", "triton-8bit"], "got triton-8bit"),
    ],
)
def test_only_what_a_tile_is_named_for_is_tuned(
    given: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Times of other kernels would stand in the table under their names."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(SystemExit) as stop:
        cli.main(["bench", "tune", "--device", "cpu", *given])
    assert stop.value.code
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(("new", "heads", "kind"), [(1, 4, "decode"), (32, 4, "decode"), (33, 4, "extend")])
def test_query_rows_of_a_kv_head_say_which_tiles_are_tuned(new: int, heads: int, kind: str) -> None:
    assert tuning.kind_of(replace(small(), new=new, q_heads=heads, kv_heads=2)) == kind


def test_tuning_needs_a_gpu_and_its_table_keeps_other_entries(tmp_path: Path) -> None:
    if not torch.cuda.is_available():
        with pytest.raises(SystemExit) as stop:
            cli.main(["bench", "tune"])
        assert stop.value.code
    path = tmp_path / "shapes.json"
    shape = TileShape(rows=16, keys=64, warps=2, stages=4)
    write_table([("decode int4/int4 128 sm90", shape)], path)
    write_table([("decode int8/int8 128 sm90", shape)], path)
    table = json.loads(path.read_text())
    assert list(table["shapes"]) == ["decode int4/int4 128 sm90", "decode int8/int8 128 sm90"]
    with shapes.using("decode int4/int4 128 sm90", shape):
        assert shapes._shape("decode", "int4/int4", 128, "sm90", 64, 64) == shape


def test_what_was_counted_never_replaces_what_was_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, key = tmp_path / "shapes.json", shapes.table_key("decode", "int8/int8", 128, "sm90", 128)
    counted, timed = (TileShape(rows=16, keys=64, warps=2, stages=n) for n in (5, 7))
    monkeypatch.setattr(shapes, "TABLE", path)
    for shape, origin, kept in (
        (timed, "counted", (timed, "counted")),
        (counted, "counted", (counted, "counted")),
        (timed, "timed", (timed, "timed")),
        (counted, "counted", (timed, "timed")),
        (counted, "timed", (counted, "timed")),
    ):
        write_table([(key, shape)], path, origin=origin)
        [line] = [line for line in path.read_text().splitlines() if key in line]
        assert line.endswith(f'"from": "{kept[1]}"}}'), "an entry is a line"
        shapes._table.cache_clear()
        assert shapes._shape("decode", "int8/int8", 128, "sm90", 128, 64) == kept[0]
    shapes._table.cache_clear()


def test_an_entry_is_for_one_block_size_or_for_all() -> None:
    name = "decode", "int8/int8", 128, "sm90"
    one, other = (TileShape(rows=16, keys=keys, warps=4, stages=7) for keys in (32, 64))
    with shapes.using(shapes.table_key(*name), one), shapes.using(shapes.table_key(*name, 256), other):
        found = {size: shapes._shape(*name, 128, size) for size in (64, 128, 192, 32, 96, 16, 5)}
    assert found == {64: other, 128: other, 192: other, 32: one, 96: one, 16: one, 5: one}


def test_tuning_times_what_is_right_and_refuses_when_nothing_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel is a CPU's, which has no tiles: what is tested is the choice."""
    shape = [TileShape(rows=16, keys=keys, warps=1, stages=1) for keys in (16, 32, 64)]
    seen: list[TileShape] = []
    attend = KVCache.attend

    def recorded(cache: KVCache, *arguments: Any, **options: Any) -> Any:
        current = shapes._shape("decode", "int4_g32_s8/int4_g32_s8", 32, "interpreter", 32, 5)
        seen.append(current)
        if current.keys == 16:
            raise RuntimeError("out of resources")
        out, lse = attend(cache, *arguments, **options)
        return (out * 1.1 if current.keys == 32 else out), lse

    monkeypatch.setattr(tuning, "axes", lambda _: [[{"keys": x.keys} for x in shape]])
    monkeypatch.setattr(KVCache, "attend", recorded)
    key, best, rows = tuning.tune(small(), "int4", repeats=2)
    assert key == "decode int4_g32_s8/int4_g32_s8 32 interpreter blocks 1"
    assert set(seen[:3]) == set(shape), "every candidate ran under its own entry of the table"
    assert best == shape[2]
    assert [row["keys"] for row in rows] == [64]
    assert shapes.entries().get(key) is None
    monkeypatch.setattr(tuning, "axes", lambda _: [[{"keys": x.keys} for x in shape[:2]]])
    with pytest.raises(KVQError, match="nothing was tuned"):
        tuning.tune(small(), "int4", repeats=2)


def small() -> Workload:
    """Two sequences of 23 tokens."""
    return Workload(
        contexts=(23, 23),
        new=1,
        q_heads=4,
        kv_heads=2,
        head_dim=32,
        block_size=5,
        dtype=torch.float32,
        device=torch.device("cpu"),
        backend="cpu",
    )


def test_layers_are_copies_that_rotate_data_past_the_cache() -> None:
    cache, batch, copies = filled_cache(small(), "int4")
    assert copies > 1
    q = small().queries().flatten(0, 1)
    outs = [cache.attend(i, q, batch, AttentionOptions(scale=1.0))[0] for i in range(copies)]
    assert all(torch.equal(out, outs[0]) for out in outs)
