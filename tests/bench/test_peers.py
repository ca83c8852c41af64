"""`python -m benchmarks.peers`: who takes part, how rows add up, and that whoever waits takes nothing."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.peers import __main__ as command
from benchmarks.peers import measure as measuring
from benchmarks.peers.loads import PARTS, Contender, Part, contenders, decode_rate, output_rate, prefill_rate
from benchmarks.peers.measure import Place, measure
from benchmarks.peers.neighbours import neighbours
from benchmarks.peers.process import Process, Turn
from benchmarks.peers.quota import limited
from benchmarks.peers.rows import agreement, row
from kvq.bench.engine.load import LoadRequest, Served, ServedLoad
from kvq.errors import ConfigError, EngineError
from tests.waiting import wait_for

ROOT = Path(measuring.__file__).parents[2]
TINY = ROOT / "kvq" / "models" / "tiny"
STUB = "tests.bench.peer_stub"
PLAIN = Contender(engine="kvq", weights="fp32", kv="fp32")

linux = pytest.mark.skipif(sys.platform != "linux", reason="/proc and cgroups are Linux'")


def test_patterns_choose_and_what_matches_nothing_is_refused():
    assert command.matching("decode*,batch", list(PARTS), "--parts") == ["batch", "decode-128", "decode-4096"]
    with pytest.raises(ConfigError, match=r"--parts 'decoding' matches none of batch,"):
        command.matching("decoding", list(PARTS), "--parts")


def test_threads_are_different_numbers_or_left_to_the_engine():
    assert command.threads_of("1,2,auto") == (1, 2, None)
    for text in ("0", "1,1", "two", "", "-1"):
        with pytest.raises(ConfigError, match="--threads"):
            command.threads_of(text)


def test_peers_without_their_models_are_refused(tmp_path):
    options = command.options_of(["--model", str(tmp_path), "--llama", sys.executable])
    with pytest.raises(ConfigError, match="--models"):
        command.place_of(options)
    given = ["--model", str(tmp_path), "--llama", sys.executable, "--models", str(tmp_path)]
    options = command.options_of(given)
    place = command.place_of(options)
    assert "openvino" not in place.pythons
    assert place.models["llama.cpp/q4_0"] == tmp_path / "q4_0.gguf"


@pytest.mark.parametrize(
    ("option", "value"),
    [("--turns", "0"), ("--neighbours", "-1"), ("--openvino", "/none"), ("--json", "/none/x.json")],
)
def test_options_that_cannot_be_used_are_refused_before_anything_is_measured(tmp_path, option, value):
    given = ["--model", str(tmp_path), "--models", str(tmp_path), f"{option}={value}"]
    with pytest.raises(ConfigError, match=f"{option}|{value}"):
        command.place_of(command.options_of(given))


def test_every_contender_of_a_part_stands_there_once():
    for part in PARTS.values():
        assert len(set(part.contenders)) == len(part.contenders)


def test_tokens_agree_up_to_the_first_other_one():
    gaps = [0.3, 0.01, 0.4]
    assert agreement(PLAIN, [5, 6, 7], [5, 6, 7], gaps)["check_equal"] == 3
    near = agreement(PLAIN, [5, 6, 7], [5, 9, 7], gaps)
    assert (near["check_equal"], near["check_gap"]) == (1, 0.01)
    with pytest.raises(EngineError, match="computes something else"):
        agreement(PLAIN, [5, 6, 7], [5, 6, 8], gaps)
    rounded = Contender(engine="openvino", weights="fp32", kv="u4")
    assert agreement(rounded, [5, 6, 7], [5, 6, 8], gaps)["check_equal"] == 2


def turn(*token_s: float, prompt: int = 30, cpu_s: float = 1.0) -> Turn:
    request = LoadRequest(index=0, prompt=[1] * prompt, output_tokens=len(token_s))
    run = ServedLoad(served=[Served(request=request, due_s=0.0, token_s=list(token_s))])
    return Turn(run=run, cpu_s=cpu_s)


def test_rows_add_up():
    part = Part(requests=1, prompt=30, output=3, rate=decode_rate, contenders=())
    turns = [turn(1.0, 1.5, 2.0), turn(1.0, 1.25, 1.5), turn(2.0, 2.1, 2.2)]
    found = row("decode", part, PLAIN, turns)
    assert found["tokens_per_s_median"] == 4
    assert found["tokens_per_s_p10"] == pytest.approx(2.4)
    assert (found["itl_ms_p50"], found["ttft_ms_p50"]) == (250, 1000)
    assert found["cpu_share_median"] == 0.5


def test_rates_are_what_the_parts_say():
    run = turn(2.0, 2.5, 3.0).run
    assert output_rate(run) == 1
    assert decode_rate(run) == 2
    assert prefill_rate(run) == 15
    one_token = Part(requests=1, prompt=30, output=1, rate=prefill_rate, contenders=())
    assert row("prefill", one_token, PLAIN, [turn(2.0)])["itl_ms_p99"] is None


@linux
def test_neighbours_are_busy_meanwhile_and_gone_afterwards():
    def used_s(pid: int) -> float:
        stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return int(stat[11]) / os.sysconf("SC_CLK_TCK")

    with neighbours(2) as pids:
        wait_for(lambda: min(map(used_s, pids)) > 0.05, "work of all neighbours")
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def folder(path: Path, **files: str) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (path / name.replace("__", ".")).write_text(text)
    return path


def test_a_quota_is_written_as_cgroup_v1_reads_it(tmp_path):
    folder(tmp_path / "cpu", cpu__cfs_quota_us="-1\n")
    group = limited(1.5, "some", tmp_path)
    group.add(77)
    assert group.folder == tmp_path / "cpu" / "some"
    written = {path.name: path.read_text() for path in group.folder.iterdir()}
    assert written == {
        "cpu.cfs_period_us": "100000\n", "cpu.cfs_quota_us": "150000\n", "cgroup.procs": "77\n",
    }  # fmt: skip


def test_a_quota_is_written_as_cgroup_v2_reads_it(tmp_path):
    folder(tmp_path, cgroup__controllers="cpuset cpu io\n", cgroup__subtree_control="\n")
    group = limited(0.5, "some", tmp_path)
    assert (tmp_path / "cgroup.subtree_control").read_text() == "+cpu\n"
    assert {path.name: path.read_text() for path in group.folder.iterdir()} == {"cpu.max": "50000 100000\n"}


def test_quotas_that_cannot_be_set_say_why(tmp_path):
    with pytest.raises(ConfigError, match=r"at least 0\.01 cores, got 0\.001"):
        limited(0.001, "some", tmp_path)
    with pytest.raises(ConfigError, match="neither is there"):
        limited(1, "some", tmp_path)
    folder(tmp_path / "cpu" / "some")
    folder(tmp_path / "cpu", cpu__cfs_quota_us="-1\n")
    with pytest.raises(ConfigError, match="leave --quota out"):
        limited(1, "some", tmp_path)


@linux
def test_a_process_in_a_group_gets_no_more_than_its_quota():
    try:
        group = limited(0.2, f"kvq-test-{os.getpid()}")
    except ConfigError as error:
        pytest.skip(str(error))
    code = """
import time
input()
end = time.monotonic() + 0.6
while time.monotonic() < end:
    pass
print(time.process_time())
"""
    process = subprocess.Popen(
        [sys.executable, "-IS", "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    group.add(process.pid)
    used_s = float(process.communicate("\n")[0])
    group.close()
    assert used_s < 0.3
    assert not group.folder.exists()


def stubs(monkeypatch, *threads: int) -> Place:
    """A place where every engine is the stub."""
    monkeypatch.setattr(measuring, "_MODULES", dict.fromkeys(measuring._MODULES, STUB))
    pythons = dict.fromkeys(measuring._MODULES, sys.executable)
    return Place(pythons=pythons, models={"kvq": Path()}, threads=threads)


def stub_part(*formats: tuple[str, str]) -> Part:
    return Part(requests=3, prompt=7, output=5, rate=output_rate, contenders=contenders("kvq", *formats))


@linux
def test_contenders_are_checked_take_turns_and_keep_their_best_number_of_threads(monkeypatch):
    place = stubs(monkeypatch, 1, 2)
    part = stub_part(("fp32", "fp32"), ("wrong", "int4"), ("broken", "fp32"))
    rows = measure(place, "batch", part, part.contenders, part.load(512, 4096), 2)
    plain, wrong, broken = rows
    assert plain["threads"] == plain["settings"]["threads"] == 2
    assert plain["threads_tried"]["1"] < plain["threads_tried"]["2"]
    assert (plain["turns"], plain["check_equal"], plain["check_tokens"]) == (2, 64, 64)
    assert plain["tokens_per_s_median"] == pytest.approx(3 / 0.001)
    assert wrong["check_equal"] == 0
    assert "ValueError: no such weights" in broken["reason"]
    assert "tokens_per_s_median" not in broken


def state(pid: int) -> str:
    """A letter, as proc(5) has them; X for one that is gone."""
    stat = Path(f"/proc/{pid}/stat")
    return stat.read_text().rpartition(")")[2].split()[0] if stat.exists() else "X"


@linux
def test_whoever_computes_between_its_turns_takes_nothing_from_others():
    with Process(sys.executable, STUB, {"weights": "spinning", "threads": 1}) as process:
        found = process.ask({"prompts": [[5]], "output_tokens": 2})
        wait_for(lambda: state(process.pid) == "T", "a stop")
        before = process.cpu_s
        time.sleep(0.15)
        assert process.cpu_s == before
        again = process.ask({"prompts": [[5]], "output_tokens": 2})
    assert found["tokens"] == again["tokens"] == [[6, 7]]


@linux
def test_stopped_processes_end_with_a_benchmark_that_was_killed():
    code = f"""
import os, signal, subprocess, sys, time
child = subprocess.Popen(
    [sys.executable, "-m", {STUB!r}], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
)
child.stdin.write('{{"weights": "fp32", "threads": 1}}\\n')
child.stdin.flush()
child.stdout.readline()
child.send_signal(signal.SIGSTOP)
print(child.pid, flush=True)
time.sleep(60)
"""
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    child = int(parent.stdout.readline())
    wait_for(lambda: state(child) == "T", "a stop")
    parent.kill()
    parent.communicate()
    wait_for(lambda: state(child) in "ZX", "the end of one that was stopped")


@linux
def test_processes_end_with_the_block_and_say_what_they_died_of():
    settings = {"weights": "fp32", "threads": 1}
    process = Process(sys.executable, STUB, settings)
    with process, pytest.raises(EngineError, match=r"(?s)peer_stub ended with 1: .*unexpected keyword"):
        process.ask({"nothing": 1})
    with Process(sys.executable, STUB, settings) as process:
        pid = process.pid
    assert not Path(f"/proc/{pid}").exists()


@pytest.mark.long
@linux
def test_kvq_is_measured_on_the_embedded_model(tmp_path):
    path = tmp_path / "p.json"
    options = ["--model", str(TINY), "--parts", "prefill", "--threads", "1", "--json", str(path)]
    command.main([*options, "--only", "kvq/fp32/fp32,kvq/int8/int8", "--turns", "2"])
    result = json.loads(path.read_text())
    assert [(one["weights"], one["reason"]) for one in result["rows"]] == [("fp32", None), ("int8", None)]
    assert result["rows"][0]["check_equal"] == 64
    with pytest.raises(ConfigError, match="at least"):
        command.main([*options, "--quota", "0.001"])
