"""`make gpu` without a GPU: faults cost their own case, what was measured is kept, every part runs."""

import ast
import importlib
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu import goals, record, rehearsal, summary
from benchmarks.gpu.case import Case, Target
from benchmarks.gpu.parts import PARTS, Part, chosen
from benchmarks.gpu.profile import Activity, kind_of, summed_up
from benchmarks.gpu.runner import Run, run_part
from tests.bench.gpu_faults import HERE, ROW
from tests.waiting import HANG_S, wait_for

ROOT = Path(__file__).parents[2]
ABSENT = ("msgspec", "llguidance", "fastapi", "uvicorn", "pydantic", "compressed_tensors", "bitsandbytes")
BLOCKER = f"""
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {ABSENT!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Absent())
"""


def a_run(folder: Path, seconds: float = HANG_S) -> Run:
    """Of workers without torch."""
    return Run(
        folder=folder,
        log=folder / "log.txt",
        ends_at=time.monotonic() + seconds,
        options=["--device", "cpu", "--out", str(folder)],
        worker=HERE,
    )


def a_part(function: str, limit_s: float = HANG_S) -> Part:
    return Part(function, f"{HERE}:{function}", limit_s, "")


def test_whatever_fails_costs_its_own_case(tmp_path: Path) -> None:
    part = a_part("every_fault")
    assert run_part(part, a_run(tmp_path)) == "ended"
    state = record.read(tmp_path / "every_fault.json")
    assert state is not None
    assert state["done"] == ["first", "both: good", "dies: piece", "last"]
    assert state["rows"] == [
        {"case": name, **ROW} for name in ("first", "both: good", "both: good", "dies: piece", "last")
    ]
    assert state["failed"] == {
        "both": "RuntimeError: a",
        "both: bad": "RuntimeError: b",
        "not a number": "ValueError: Out of range float values are not JSON compliant: nan",
        "dies": "its process was ended by SIGKILL",
        "hangs": "stopped after 0 s",
        "poisons": "RuntimeError: sticky",
    }
    assert (state["status"], state["running"]) == ("ended", None)
    assert not summary.is_good(summary.collect(tmp_path, [part], {}))


@pytest.mark.long
def test_a_part_ends_with_its_time_and_keeps_what_it_has(tmp_path: Path) -> None:
    state = None
    for limit_s in (3, 30, 300):  # until its process began in time
        assert run_part(a_part("late", limit_s=limit_s), a_run(tmp_path)) == "stopped"
        state = record.read(tmp_path / "late.json")
        if state is not None and state["done"]:
            break
    assert state is not None
    assert (state["done"], state["status"]) == (["first"], "stopped")
    assert state["failed"] == {"hangs": "stopped: the part's time was over"}


def test_a_part_that_fails_outside_of_its_cases_is_broken(tmp_path: Path) -> None:
    assert run_part(a_part("no_cases"), a_run(tmp_path)) == "broken"
    state = record.read(tmp_path / "no_cases.json")
    assert state is not None
    assert state["failed"] == {"(start)": "its process ended with status 1"}
    assert run_part(a_part("first", limit_s=100), a_run(tmp_path, seconds=1)) == "skipped"


def test_a_run_that_is_killed_keeps_its_rows_and_goes_on_where_it_was(tmp_path: Path) -> None:
    command = [sys.executable, "-m", HERE, "measure", str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL)

    def kept() -> Any:
        """The rows of the result while the second case runs."""
        file = tmp_path / "results.json"
        result = json.loads(file.read_text()) if file.is_file() else {"rows": []}
        return result["rows"] and (result["parts"]["gated"]["running"] or {}).get("case") == "second"

    try:
        wait_for(kept, "the second case")
        worker = child_of(process)
    finally:
        process.kill()
        process.wait()
    wait_for(lambda: not lives(worker), "the worker's end")
    state = record.read(tmp_path / "gated.json")
    assert state is not None
    assert state["rows"] == [{"case": "first", **ROW}]
    assert json.loads((tmp_path / "results.json").read_text())["rows"][0]["part"] == "gated"
    (tmp_path / "gate").touch()
    again = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=HANG_S)
    assert again.returncode == 1, again.stderr  # for the part that ran out of time
    result = json.loads((tmp_path / "results.json").read_text())
    assert [(row["part"], row["case"]) for row in result["rows"]] == [
        ("gated", "first"),
        ("gated", "second"),
        ("late", "first"),
    ]
    assert result["parts"]["gated"]["status"] == "ended"
    assert "FAILED hangs: stopped: the part's time was over" in again.stdout


def test_a_workers_process_ends_with_its_runner(tmp_path: Path) -> None:
    script = f"import subprocess, sys; subprocess.run([sys.executable, '-m', {HERE!r}, *sys.argv[1:]])"
    file = tmp_path / "gated.json"
    given = ["gated", f"{HERE}:gated", "--file", str(file), "--device", "cpu", "--out", str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    parent = subprocess.Popen([sys.executable, "-c", script, *given], cwd=ROOT, env=environment)
    wait_for(lambda: (record.read(file) or {}).get("running"), "the worker")
    worker = child_of(parent)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    wait_for(lambda: not lives(worker), "the worker's end")


def child_of(parent: subprocess.Popen[Any]) -> int:
    """The only child of a process."""
    (child,) = Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split()
    return int(child)


def lives(process: int) -> bool:
    """True unless it has ended."""
    status = Path(f"/proc/{process}/status")
    try:
        return "State:\tZ" not in status.read_text()
    except OSError:
        return False


def test_parts_are_named_or_all_but_the_rare_ones() -> None:
    assert [part.name for part in chosen(["step", "facts"])] == ["step", "facts"]
    assert "tune" not in {part.name for part in chosen([])}
    with pytest.raises(ValueError, match="unknown parts stepp; known: facts"):
        chosen(["stepp"])
    assert len({part.name for part in PARTS}) == len(PARTS)


EXPECTED = {
    "facts": {"read_gb_per_s", "copy_gb_per_s"},
    "decode": {"shape", "kv", "name", "ms_median", "fraction_of_bandwidth", "graph", "max_relative_error"},
    "mixed": {"tokens", "kv", "ms_median"},
    "write": {"kv"},
    "latent": {"shape", "kv", "latent_dim", "ms_median", "fraction_of_bandwidth"},
    "sampler": {"sampling", "ms_median", "gb_per_s"},
    "linear": {"weights", "ms_median", "fraction_of_limit", "speedup_over_bf16"},
    "engine": {"kv", "name", "output_tokens_per_s", "share_of_demand", "check_equal"},
    "engine8b": {"kv", "name", "model"},
    "step": {
        "kv", "batch", "ms_median", "limit_ms", "fraction_of_limit", "graph", "graph_reason", "scheduling_ms",
        "launching_ms", "choosing_ms", "gpu_busy_ms", "depth", "prefill_s",
    },
    "tests": {"passed", "counts", "failures"},
    "warm": {"launch", "seconds", "error"},
}  # fmt: skip
QUICK = ("facts", "mixed", "write", "sampler")
LONG = tuple(part.name for part in PARTS if part.name not in (*QUICK, "tune", "tune-linear", "sanitizer"))


@pytest.fixture
def rehearsed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-ins of a rehearsal, in this process, until the test ends."""
    from kvq.bench.kernels import measure

    for name in ("cache_bytes", "read_bandwidth"):
        monkeypatch.setattr(measure, name, getattr(measure, name))
    threads = torch.get_num_threads()
    rehearsal.install()
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(name, marks=pytest.mark.long) for name in LONG)])
def test_every_part_gives_its_rows(name: str, tmp_path: Path, rehearsed: None) -> None:
    (part,) = chosen([name])
    module, _, function = part.cases.partition(":")
    target = Target(device="cpu", folder=tmp_path, out=tmp_path)
    cases: list[Case] = list(getattr(importlib.import_module(module), function)(target))
    assert len({case.name for case in cases}) == len(cases)
    rows = [row for case in cases for row in case.run()]
    assert rows
    json.dumps(rows, allow_nan=False)
    for row in rows if name != "facts" else rows[1:]:
        assert EXPECTED.get(name, set()) <= set(row), row
    if name == "warm":
        assert {row["error"] for row in rows} == {None}
    for case in cases:
        for piece in case.pieces[:1] if name in ("decode", "write", "sampler") else ():
            assert piece.run()


def test_what_a_row_says_is_printed() -> None:
    state = {"status": "ended", "seconds": 1.0, "failed": {}}
    row = {"part": "step", "case": "step 1 x 1024, int4", "name": "kvq", "kv": "int4", "ms_median": 1.25}
    no_graph = row | {"graph": False, "graph_reason": "it waits"}
    tests = {"part": "tests", "case": "tests/gpu", "passed": False, "summary": "1 failed", "failures": ["F"]}
    result = {"parts": {"step": state}, "rows": [row, no_graph, tests], "goals": []}
    lines = summary.lines(result)
    assert "1.2500 ms" in lines[0]
    assert "NO GRAPH: it waits" in lines[1]
    assert lines[2] == "TESTS FAILED: 1 failed\nF"
    assert not summary.is_good(result)


def test_goals_are_judged_by_ratios_and_left_open_where_nothing_was_measured() -> None:
    shape = {"shape": "decode 64 x 8192", "name": "kvq"}
    rows = [
        {**shape, "kv": "bf16", "ms_median": 0.6, "fraction_of_bandwidth": 0.86},
        {**shape, "kv": "int4_g64", "ms_median": 0.3, "fraction_of_bandwidth": 0.5},
        {**shape, "kv": "int4_g64_rot", "ms_median": 0.33, "fraction_of_bandwidth": 0.5},
    ]
    found = {line["goal"]: (line["value"], line["is_met"]) for line in goals.judged(rows)}
    assert found["decode 64 x 8,192: bf16, share of bandwidth: at least 0.85"] == (0.86, True)
    assert found["decode 64 x 8,192: int4_g64, speedup over bf16: at least 2.3"] == (2.0, False)
    value, is_met = found["rotation, int4_g64: at most 1.05"]
    assert math.isclose(value, 1.1)
    assert not is_met
    assert found["8B, step at 8,192: GPU idle: at most 0.1"] == (None, None)


def test_goals_of_steps_look_at_graphs_idle_time_and_bytes() -> None:
    one = {"part": "step", "batch": 1, "kv": "bf16", "fraction_of_limit": 0.8, "graph": True}
    many = {"part": "step", "batch": 64, "kv": "int4", "gpu_idle_share": 0.2, "graph": False}
    found = {line["goal"].partition(":")[0]: line for line in goals.judged([one, many])}
    assert found["0.6B, a step of one sequence, bf16"]["is_met"]
    assert not found["0.6B, a step of 64 sequences, int4"]["is_met"]
    captured = found["decode steps captured as graphs, share of rows"]
    assert (captured["value"], captured["is_met"]) == (0.5, False)


def test_a_profile_counts_overlapping_kernels_once() -> None:
    found = [
        Activity("cudaGraphLaunch", False, 0, 5),
        Activity("_attend_kernel", True, 10, 20),
        Activity("nvjet_hsh_64x8", True, 15, 30),
        Activity("Memcpy HtoD", True, 40, 41),
        Activity("cudaLaunchKernelExC", False, 50, 51),
        Activity("cudaEventSynchronize", False, 50, 60),
    ]
    row = summed_up(found, steps=2, layers=1)
    assert row["gpu_busy_ms"] == pytest.approx((20 + 1) / 2e3)
    assert (row["attention_ms"], row["linear_ms"]) == pytest.approx((10 / 2e3, 15 / 2e3))
    assert (row["kernels"], row["launches"], row["graph_launches"], row["host_waits"]) == (1, 1, 0.5, 0.5)
    assert [kind_of(name) for name in ("_rms_norm_kernel", "rope_write_kernel", "indexing_backward")] == [
        "layers",
        "attention",
        "other",
    ]


def imported(folder: Path) -> set[str]:
    """Modules of kvq that files name, those imported inside functions included."""
    found = set()
    for path in folder.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(("kvq", "benchmarks")):
                found.add(str(node.module))
    return found


def bare_copy(folder: Path) -> dict[str, str]:
    """The tree as a GPU machine has it: nothing compiled, fewer packages; the environment for it."""
    for name in ("kvq", "benchmarks", "tests"):
        ignored = shutil.ignore_patterns("*.so", "results")
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    (folder / "absent").mkdir()
    (folder / "absent" / "sitecustomize.py").write_text(BLOCKER, encoding="utf-8")
    shutil.copy(ROOT / "pyproject.toml", folder)
    return os.environ | {"PYTHONPATH": f"{folder / 'absent'}{os.pathsep}{folder}", "OMP_NUM_THREADS": "1"}


def test_parts_import_nothing_that_a_gpu_machine_may_lack(tmp_path: Path) -> None:
    environment = bare_copy(tmp_path)
    names = {f"benchmarks.gpu.{path.stem}" for path in (ROOT / "benchmarks" / "gpu").glob("[a-z]*.py")}
    names |= imported(ROOT / "benchmarks" / "gpu")
    script = "\n".join(f"import {name}" for name in sorted(names))
    script += "\nimport kvq.bench.random_model, kvq\nprint(kvq.__file__)"
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        env=environment | {"TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).is_relative_to(tmp_path)


def test_the_command_begins_without_torch() -> None:
    script = "import benchmarks.gpu.__main__, sys; assert not {'torch', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True, timeout=HANG_S)


@pytest.mark.long
def test_a_whole_run_from_a_bare_copy(tmp_path: Path) -> None:
    environment = bare_copy(tmp_path) | {"OUT": str(tmp_path / "out")}
    command = [
        sys.executable,
        "-m",
        "benchmarks.gpu",
        "--device",
        "cpu",
        "--minutes",
        "60",
        "--patience",
        "20",
    ]
    names = [part.name for part in chosen([])]
    done = subprocess.run(
        [*command, "--parts", ",".join(names)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=2 * 60 * 60,
    )
    result = json.loads((tmp_path / "out" / "results.json").read_text())
    assert list(result["parts"]) == names
    assert not [part["failed"] for part in result["parts"].values() if part["failed"]]
    assert {part["status"] for part in result["parts"].values()} == {"ended"}
    assert result["is_rehearsal"]
    assert not result["goals"]
    assert done.returncode == 0, done.stdout
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"results.json", "log.txt"}


def test_a_device_that_is_not_there_is_said_once(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    command = [sys.executable, "-m", "benchmarks.gpu", "--out", str(tmp_path), "--work", str(tmp_path / "w")]
    done = subprocess.run(
        [*command, "--parts", "facts,decode"], cwd=ROOT, capture_output=True, text=True, timeout=HANG_S
    )
    assert done.returncode == 1
    assert "nothing can run on cuda: no part could begin" in done.stdout
    assert "decode:" not in done.stdout
