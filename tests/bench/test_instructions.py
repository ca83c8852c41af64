"""Kernels are counted as they are compiled, and stay within their budgets."""

import json
import os
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
import triton

from benchmarks.instructions import budgets, counting, document, sass, table
from benchmarks.instructions.cards import CARDS, MULTIPROCESSORS
from benchmarks.instructions.copies import copies
from kvq.capacity.plan.gpus import known_gpus
from kvq.kernels.gpu import shapes

ROOT = Path(__file__).parents[2]
# Formats stored token by token; and some whose blocks wait, without their unquantized keys.
TOKENS = "bf16,fp8,int8,int6,int5,int4,int3,int2,int4_g64,int4_g32"
DECODE = f"{TOKENS},int5_g64,int4_mean,int4_per_channel/int4,int8_per_channel/int8"
# As engines store bare names, and means.
WHOLE_BLOCKS = ",".join(f"int{bits}_per_channel/int{bits}" for bits in (8, 6, 5, 4, 3, 2))
STAGED = f"{WHOLE_BLOCKS},int4_mean,int3_mean"

# A loop over keys in a loop over work, with a branch that is laid out behind both; what is never reached.
NESTED = """
.text.kernel:
        /*0000*/                   S2R R0, SR_TID.X ;
.L_x_0:
        /*0010*/                   LDG.E.64 R2, desc[UR4][R2.64] ;
.L_x_1:
        /*0020*/                   LDGSTS.E.BYPASS.LTC128B.128 [R4], desc[UR4][R6.64] ;
        /*0030*/              @!P0 BRA `(.L_x_3) ;
.L_x_2:
        /*0040*/                   HMMA.16816.F32.BF16 R8, R8, R10, R8 ;
        /*0050*/                   IMAD.MOV.U32 R1, RZ, RZ, R2 ;
        /*0060*/               @P1 BRA `(.L_x_1) ;
        /*0070*/                   BRA.U !UP0, `(.L_x_0) ;
        /*0080*/                   EXIT ;
        /*0088*/                   BRA `(.L_x_2) ;
.L_x_3:
        /*0090*/                   LDSM.16.M88.4 R12, [R13] ;
        /*00a0*/                   BRA `(.L_x_2) ;
.L_x_4:
        /*00b0*/                   BRA `(.L_x_4) ;
        /*00c0*/                   NOP ;
"""

LOOP = """
    %0 = ttg.local_alloc : () -> !ttg.memdesc<5x64x128xbf16, #shared, #smem, mutable>
    %1 = ttg.async_commit_group tokens %0
    %2 = scf.for %i = %a to %b step %c iter_args(%x = %y) {
      %3 = ttg.async_wait %1 {num = 6 : i32}
      %4 = tt.dot %3, %3, %3 : tensor<16x64xbf16>
      %5 = ttg.async_commit_group tokens %4
      %6 = tt.dot %4, %3, %3 : tensor<16x64xbf16>
      %7 = ttg.async_commit_group tokens %6
      scf.yield %7
    }
    %8 = ttg.async_wait {num = 0 : i32}
"""


def test_the_loop_over_keys_is_found_wherever_its_parts_are_laid_out() -> None:
    code = sass.blocks(NESTED)
    loop = sass.tensor_loop(code)
    assert [name.split(".")[0] for name in loop] == ["LDGSTS", "BRA", "HMMA", "IMAD", "BRA", "LDSM", "BRA"]
    assert len(sass.all_names(code)) == 11  # not what is never reached
    assert len(sass.loops(code)) == 2
    before, after = sass.around(code)
    assert [name.split(".")[0] for name in before] == ["S2R"]
    assert [name.split(".")[0] for name in after] == ["LDG", "BRA", "EXIT"]
    assert sass.kinds(loop) == {"branch": 3, "copy": 1, "tensor": 1, "move": 1, "shared": 1}
    assert sass.loads(sass.all_names(code)) == {"LDG 8": 1, "LDGSTS 16": 1, "LDSM 16": 1}


def test_a_call_of_a_label_is_a_jump_and_one_of_a_function_comes_back() -> None:
    """Kernels for sm80 and sm89 leave their loop so, if what follows lies far away."""
    jump = NESTED.replace("@P1 BRA `(.L_x_1)", "@P1 CALL.REL.NOINC `(.L_x_4)")
    assert len(sass.all_names(sass.blocks(jump))) == 12  # with that at .L_x_4
    call = NESTED.replace("@P1 BRA `(.L_x_1)", "CALL.REL.NOINC `($__internal_div)")
    assert len(sass.all_names(sass.blocks(call))) == 11  # with what is behind it


def test_tiles_under_way_are_those_that_no_wait_asks_for() -> None:
    found = copies(LOOP)
    assert (found.buffers, found.waits, found.groups, found.tiles) == (5, [6], 2, 3.0)
    assert copies(LOOP.replace("num = 6", "num = 4")).tiles == 2.0
    early = LOOP.replace("num = 6 : i32}", "num = 0 : i32}\n      %9 = ttg.async_commit_group tokens %3")
    assert copies(early).tiles == 0.33  # one group of three
    loaded = LOOP.replace("%4 =", "%9 = tt.load %p : i32\n      %10 = tt.load %q : i32\n      %4 =")
    assert copies(loaded).awaited_loads == 0
    assert copies(loaded.replace("commit_group tokens %4", "commit_group tokens %9")).awaited_loads == 1
    assert copies(loaded.replace("yield %7", "yield %7, %9, %10")).awaited_loads == 0
    assert copies(LOOP.replace("num = 6", "num = 0")).tiles == 0.0
    plain = "\n".join(line for line in LOOP.splitlines() if "async" not in line)
    assert copies(plain) == (0, [], 0, 0.0, 0)


def test_programs_at_once_are_limited_by_what_runs_out_first() -> None:
    sm90, sm89 = MULTIPROCESSORS["sm90"], MULTIPROCESSORS["sm89"]
    assert sm90.programs_at_once(warps=4, registers=155, shared=0) == 3
    assert sm90.programs_at_once(warps=2, registers=155, shared=0) == 6
    assert sm90.programs_at_once(warps=4, registers=128, shared=0) == 4
    assert sm90.programs_at_once(warps=4, registers=32, shared=75 * 1024) == 3
    assert sm90.programs_at_once(warps=4, registers=32, shared=76 * 1024) == 2
    assert sm89.programs_at_once(warps=4, registers=32, shared=0) == 12
    assert sm90.programs_at_once(warps=1, registers=16, shared=0) == 32
    assert sm90.programs_at_once(warps=1, registers=80, shared=0) == 24  # 6 at each of 4 schedulers


def test_cards_are_those_of_their_data_sheets() -> None:
    """Clocks and multiprocessors make up the dense FP16 rate that plans are made with."""
    flops = {"sm80": 2048, "sm89": 512, "sm90": 4096, "sm100": 8192}  # of a multiprocessor and clock
    for card in CARDS:
        rate = card.multiprocessors * card.clock_ghz * flops[card.device] / 1e3
        assert rate == pytest.approx(known_gpus()[card.name].tflops["fp16"], rel=0.01), card
    h200 = next(card for card in CARDS if card.name == "h200")
    assert h200.slots(512) == pytest.approx(132 * 4 * 1.83e9 * 512 / 4.8e12)


ROW = {
    **{"triton": "9.9", "device": "sm90", "kernel": "attend decode", "kv": "int8"},
    **{"instructions": 900, "instructions_a_key": 50.0, "registers": 160, "stack": 0},
    **{"programs_at_once": 3, "tiles_under_way": 3.0, "prologue": 1000, "epilogue": 500},
}


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({}, ""),
        ({"instructions": 2000, "instructions_a_key": 51.4, "registers": 164}, ""),
        ({"instructions_a_key": 51.6}, "instructions 51.6, budget 50"),
        ({"registers": 168}, "registers 168, budget 160"),
        ({"stack": 8}, "stack 8, budget 0"),
        ({"programs_at_once": 2}, "programs_at_once 2, budget 3"),
        ({"tiles_under_way": 2.0}, "tiles_under_way 2, budget 3"),
        ({"prologue": 1030, "epilogue": 515}, ""),
        ({"prologue": 1031}, "prologue 1031, budget 1000"),
        ({"epilogue": 516}, "epilogue 516, budget 500"),
        ({"error": "no"}, "does not compile: no"),
        ({"kv": "int2"}, "there is no budget"),
        ({"triton": "9.8", "registers": 255}, ""),
    ],
)
def test_a_budget_is_broken_by_what_costs_more(change: dict, told: str, tmp_path: Path) -> None:
    file = tmp_path / "budgets.json"
    budgets.write([ROW], file)
    budgets.write([ROW | {"device": "sm80"}, ROW | {"triton": "9.7"}], file)
    assert json.loads(file.read_text())["budgets"]["9.9"].keys() == {
        "sm80 attend decode",
        "sm90 attend decode",
    }
    found = budgets.broken([ROW | change], budgets.read(file))
    assert [text.partition(": ")[2] for text in found] == ([told] if told else [])


def test_the_document_shows_the_budgets_and_shapes_as_they_are() -> None:
    """`python -m benchmarks.instructions.document` writes it."""
    assert document.FILE.read_text() == document.rendered()
    text, known = document.FILE.read_text(), budgets.read()
    for version, day in budgets.days().items():
        assert f"{version} ({day})" in text
    lines = text.count("\n| ")
    kernels = {(name, kv) for version in known.values() for name in version for kv in version[name]}
    assert lines >= len(kernels) + len(shapes.entries()), "a line for each"


def test_tables_hold_every_row_once() -> None:
    loop = ROW | {
        **{"rows": 16, "keys": 64, "key_bytes": 260, "slots_a_key": {"h200": 52.3}, "warps": 4},
        **{"shared": 2048, "kinds": {"bits": 8, "fp32": 4}, "loads": {"LDS 4": 3}, "loop_instructions": 800},
        **{"buffers": 4, "waits": [6], "copy_groups": 2},
    }
    other = {key: value for key, value in loop.items() if key != "instructions_a_key"} | {"kernel": "list"}
    failed = {key: ROW[key] for key in ("triton", "device", "kv")} | {"kernel": "write_kv", "error": "no"}
    found = dict(table.tables([loop, other, failed]))
    assert [len(lines) - 1 for lines in found.values()] == [1, 1, 1, 1]
    loops, kinds, *_ = found.values()
    assert dict(zip(*loops, strict=True))["instructions a key"] == "50.0"
    assert dict(zip(*loops, strict=True))["slots h200"] == "52"
    assert kinds == [["format", "kernel", "bits", "fp32"], ["int8", "attend decode", "0.5", "0.2"]]
    assert table.markdown(kinds).splitlines()[1] == "| --- | --- | --: | --: |"
    assert table.plain(kinds).splitlines()[0] == "format  kernel         bits  fp32"


def test_what_does_not_compile_is_a_row_with_the_compilers_error(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def fails(*_: object, **__: object) -> None:
        os.write(2, b"module {\na.py:1:2: error: no such op\nmore {\n")
        raise RuntimeError("PassManager::run failed")

    monkeypatch.setattr(counting, "compiled", fails)
    asked = counting.Asked("int8", "attend decode", "sm90", None, {}, {})
    row = counting.counted(asked)
    assert row.items() >= {"kv": "int8", "device": "sm90", "error": "a.py:1:2: error: no such op"}.items()
    os.write(2, b"heard again")
    assert capfd.readouterr().err == "heard again"


def check(*options: str) -> None:
    """Compile in a process of its own, since kernels are interpreted here."""
    if triton.__version__ not in budgets.read():
        pytest.skip(f"no budgets for Triton {triton.__version__}")
    run = subprocess.run(
        [sys.executable, "-m", "benchmarks.instructions", "--check", *options],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"},
        check=False,
    )
    assert run.returncode == 0, f"{run.stdout}\n{run.stderr[-2000:]}"


@pytest.mark.long
@pytest.mark.parametrize("sm", ["80", "89", "90", "100"])
@pytest.mark.parametrize(("kernel", "kv"), [("attend decode", TOKENS), ("attend staged decode", STAGED)])
def test_decode_stays_within_its_budget(kernel: str, kv: str, sm: str) -> None:
    check("--sm", sm, "--kernel", kernel, "--kv", DECODE if (kernel, sm) == ("attend decode", "90") else kv)


@pytest.mark.long
def test_sealing_stays_within_its_budget() -> None:
    check("--sm", "90", "--kernel", "seal", "--kv", STAGED)


@pytest.mark.parametrize(("kernel", "kv"), [("attend decode", TOKENS), ("attend staged decode", STAGED)])
def test_decode_of_every_default_format_has_a_budget_before_and_after_its_loop(kernel: str, kv: str) -> None:
    """With the newest Triton that was counted with."""
    known = budgets.read()
    for name, device in product(kv.split(","), dict.fromkeys(card.device for card in CARDS)):
        own = known[max(known)][f"{device} {kernel}"][name]
        assert len(own) == len(budgets.COLUMNS + budgets.AROUND), (device, name)
        assert min(own[len(budgets.COLUMNS) :]) > 100, (device, name)


@pytest.mark.long
@pytest.mark.parametrize("sm", ["80", "89", "90", "100"])
def test_all_kernels_stay_within_their_budgets(sm: str) -> None:
    check("--sm", sm)
