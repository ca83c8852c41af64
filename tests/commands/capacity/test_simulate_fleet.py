"""`kvq simulate` with a model and a GPU, and the reports, as people type them."""

import json
import re
from functools import partial

import pytest

from kvq.cli import main

LOAD = ("--requests", "200", "--rate", "20", "--seed", "3")


@pytest.fixture
def run(kvq):
    return partial(kvq, "simulate", "--model", "llama-3-8b", "--gpu", "h100")


def test_formats_side_by_side(run, tmp_path):
    path = tmp_path / "s.json"
    status, out, _ = run(*LOAD, "--kv", "fp16,int4", "--json", path, "--slo-ttft-ms", 1000)
    assert status == 0
    result = json.loads(path.read_text())
    assert {"kvq_version", "commit", "date", "device", "versions", "command", "rows"} <= set(result)
    first, second = result["rows"]
    assert (first["kv"], second["kv"]) == ("fp16", "int4")
    assert first["served"] == second["served"] == 200
    assert second["itl_ms_p50"] < first["itl_ms_p50"]  # less to read
    assert second["num_blocks"][0] > 3 * first["num_blocks"][0]
    assert first["slo_met"] > 0.9
    for row in (first, second):
        assert f"digest {row['digest']}" in out
        tokens_per_usd_hour = row["output_tokens_per_s"] * 3600 / 10
        assert row["usd_per_million_tokens"] == pytest.approx(1e6 / tokens_per_usd_hour)
    assert run(*LOAD, "--kv", "fp16,int4", "--slo-ttft-ms", 1000)[1] == out


def test_policies_multiply(run, tmp_path):
    path = tmp_path / "s.json"
    chunks = ("--max-num-batched-tokens", "256,2048", "--max-num-seqs", "64")
    status, _, _ = run(
        *LOAD, "--kv", "int4", *chunks, "--replicas", "1,2", "--routing", "prefix,session", "--json", path
    )
    assert status == 0
    rows = json.loads(path.read_text())["rows"]
    assert len(rows) == 8
    assert {(row["max_num_batched_tokens"], row["gpus"], row["routing"]) for row in rows} == {
        (chunk, gpus, routing)
        for chunk in (256, 2048)
        for gpus in (1, 2)
        for routing in ("prefix", "session")
    }


def test_one_of_the_routings_wins(run, tmp_path):
    path = tmp_path / "s.json"
    shared = ("--shared-prefix", 0.8, "--num-prefixes", 20, "--input-len", "1024:2048")
    compared = ("--replicas", "1,3", "--routing", "round-robin,two-choices,affinity", "--kv", "int4")
    status, out, _ = run(*LOAD, *shared, *compared, "--json", path)
    assert status == 0
    rows = json.loads(path.read_text())["rows"]
    for replicas in (1, 3):
        group = [row for row in rows if row["replicas"] == replicas]
        [winner] = [row for row in group if row["wins"]]
        assert winner["ttft_ms_p50"] == min(row["ttft_ms_p50"] for row in group)
        assert f"int4, {replicas} replicas: {winner['routing']} wins" in out
    hits = {row["routing"]: row["prefix_hit_rate"] for row in rows if row["replicas"] == 3}
    assert hits["affinity"] > hits["round-robin"]
    assert run(*LOAD, "--kv", "int4,fp16", "--json", path)[0] == 0
    assert [row["wins"] for row in json.loads(path.read_text())["rows"]] == [None, None]


def test_the_gpus_that_a_goal_needs(run, tmp_path):
    path = tmp_path / "s.json"
    goal = ("--meet", 0.95, "--slo-ttft-ms", 200, "--rate", 150, "--requests", 600, "--kv", "int4")
    assert run(*goal, "--json", path)[0] == 0
    (row,) = json.loads(path.read_text())["rows"]
    assert row["replicas"] > 1
    assert row["slo_met"] >= 0.95
    fewer = ("--replicas", row["replicas"] - 1, "--json", path)
    assert run(*goal[2:], *fewer)[0] == 0
    assert json.loads(path.read_text())["rows"][0]["slo_met"] < 0.95


def test_a_trace_overflow_and_prefill_apart(run, tmp_path):
    trace, path = tmp_path / "t.jsonl", tmp_path / "s.json"
    line = {"input_length": 4000, "output_length": 50, "hash_ids": list(range(7))}
    trace.write_text("\n".join(json.dumps(line | {"timestamp": 10 * i}) for i in range(100)))
    prices = ("--overflow-waiting", 2, "--api-input", 1, "--api-output", 2)
    assert run("--trace", trace, "--kv", "int4", *prices, "--no-prefix-caching", "--json", path)[0] == 0
    (row,) = json.loads(path.read_text())["rows"]
    assert row["requests"] == 100 == row["served"] + row["overflowed"]
    assert row["usd_api"] == pytest.approx(row["overflowed"] * (4000 * 1 + 50 * 2) / 1e6)
    assert run("--trace", trace, "--kv", "int4", "--json", path)[0] == 0
    assert json.loads(path.read_text())["rows"][0]["prefix_hit_rate"] > 0.8
    assert run("--trace", trace, "--kv", "int4", "--prefill-replicas", 1, "--json", path)[0] == 0
    (row,) = json.loads(path.read_text())["rows"]
    assert (row["gpus"], row["served"]) == (2, 100)


def test_a_report_needs_no_other_file(run, tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "s.html"
    assert run(*LOAD, "--kv", "fp16,int4", "--replicas", "1,2", "--html", path)[0] == 0
    page = path.read_text()
    assert page.count("<svg") == 1
    assert "int4, 2 GPUs" in page
    assert not re.search(r"""(src|href)=["'](?!#)""", page)


def test_a_report_of_a_plan(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "p.html"
    with pytest.raises(SystemExit) as ended:
        main(["plan", "-m", "llama-3-8b", "--gpu", "h100,l4,a10", "--context", "4096", "--html", str(path)])
    assert not ended.value.code
    page = path.read_text()
    assert page.count("<svg") == 3
    for part in ("Requests at once", "Where memory goes", "Cost over latency", "KV pool", "a10"):
        assert part in page
    assert not re.search(r"""(src|href)=["'](?!#)""", page)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "give --rate or --trace"),
        (("--rate", 1, "--gpu", "h10"), "did you mean"),
        (("--rate", 1, "--model", "lama-3-8b"), "did you mean"),
        (("--rate", 1, "--model", "llama-3-70b"), "does not fit"),
        (("--rate", 1, "--routing", "random"), "'random' is not one of 'round-robin'"),
        (("--rate", 1, "--replicas", "0"), "0 is not in the range x>=1"),
        (("--rate", 1, "--replicas", "two"), "'two' is not a valid integer range. Several have commas"),
        (("--rate", 1, "--meet", 0.9), "--slo-ttft-ms"),
        (("--rate", 1, "--meet", 0.9, "--slo-itl-ms", 50, "--replicas", 2), "leave --replicas out"),
        (("--rate", 1, "--api-input", 3), "two prices"),
        (("--rate", 1, "--seeds", 3), "'--seeds'"),
        (("--rate", 1, "--gpu", "h100,l4"), "one --gpu is simulated at a time"),
        (("--rate", 1, "--input-len", "many"), "--input-len"),
        (("--rate", 1, "--max-model-len", 1 << 20), "above the model's context"),
        (("--rate", 1, "--kv", "int7"), "int7"),
        (("--rate", -1), "range"),
        (("--rate", "nan"), "not a finite number"),
        (("--rate", 1e-320), "must be"),
        (("--rate", 1, "--runtime-gb", "nan"), "not a finite number"),
        (("--rate", 1, "--turns", 3, "--think-s", "inf"), "not a finite number"),
        (("--rate", 1, "--max-num-batched-tokens", "32"), "below --max-num-seqs"),
        (("--rate", 1, "--overflow-waiting", 3), "give --api-input"),
        (("--rate", 1, "-pp", 2), "not simulated"),
        (("--rate", 1, "--speculation", "k=4"), "--speculation needs acceptance"),
        (("--rate", 1, "--speculation", "acceptance=2"), "acceptance must be a number of 0 to 1, got 2.0"),
        (("--trace", "/nowhere.jsonl"), "can't read"),
        (("--trace", __file__, "--input-len", "5"), "leave out --input-len"),
        (("--rate", 1, "--calibrate", __file__), "no results of kvq bench engine"),
        (("--rate", 1, "--json", "/nowhere/x.json"), "/nowhere"),
        (("--rate", 1, "--kv", "int8", "--kv-disk", "1MiB"), "kv_disk (--kv-disk) must be at least"),
        (("--rate", 1, "--kv", "int8", "--kv-ladder", "int8"), "int8 is the pool's own"),
        (("--rate", 1, "--swap-memory", "1GiB"), "--kv-host, such as 8GiB"),
    ],
)
def test_bad_input_is_an_error(run, arguments, said):
    status, out, err = run(*arguments)
    assert status == 2
    assert said in err
    assert not out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--gpu", "h100", "--rate", 1), "give MODEL and --gpu"),
        (("--faults", "--seed", 7), "give MODEL and --gpu"),
        (("--model", "llama-3-8b", "--rate", 1), "give --gpu, one or several names of kvq gpus"),
    ],
)
def test_a_model_or_a_gpu_alone_is_not_enough(kvq, arguments, said):
    status, _, err = kvq("simulate", *arguments)
    assert status == 2
    assert said in " ".join(err.split())


def test_faults_are_told_and_decided_by_the_seed(run, tmp_path):
    def rows(*more, requests=800):
        path = tmp_path / "f.json"
        status, out, _ = run(*LOAD[:4], "--requests", requests, "--kv", "int4", "--json", path, *more)
        assert status == 0
        return out, json.loads(path.read_text())

    calm, _ = rows(requests=200)
    assert "cancelled" not in calm
    out, result = rows("--faults", "--seed", 7)
    assert {"kvq_version", "commit", "date", "device", "versions", "command", "rows"} <= set(result)
    (row,) = result["rows"]
    assert row["served"] + row["cancelled"] + row["failed"] == row["requests"] == 800
    assert row["cancelled"] > 20
    assert row["slow_steps"] > 0
    for told in ("cancelled", "slow steps", f"digest {row['digest']}"):
        assert told in out
    assert rows("--faults", "--seed", 7)[0] == out
    assert rows("--faults", "--seed", 8)[1]["rows"][0]["digest"] != row["digest"]


def test_drafts_are_simulated_where_asked_for(run, tmp_path):
    path = tmp_path / "d.json"

    def row(*more):
        status, out, _ = run(*LOAD, "--rate", 2, "--kv", "int4", "--json", path, *more)
        assert status == 0
        (found,) = json.loads(path.read_text())["rows"]
        return out, found

    out, plain = row()
    assert "tokens a step" not in out
    names = ("speculation", "drafted_tokens", "accepted_tokens", "tokens_per_step")
    assert [plain[name] for name in names] == [None, 0, 0, None]
    assert row("--speculation", "off")[1]["digest"] == plain["digest"]
    given = "k=4,acceptance=0.8,draft=0.1"
    out, drafting = row("--speculation", given)
    assert drafting["speculation"] == given
    assert 0.5 < drafting["accepted_tokens"] / drafting["drafted_tokens"] < 0.8
    assert drafting["itl_ms_p50"] < plain["itl_ms_p50"] / 2
    assert f"{drafting['tokens_per_step']:.2f}" in out.split("tokens a step")[1]
    assert row("--speculation", given)[0] == out
    assert row("--speculation", given, "--seed", 4)[1]["digest"] != drafting["digest"]


def test_what_can_never_fit_keeps_no_goal(run, tmp_path):
    trace = tmp_path / "t.jsonl"
    lines = [
        {"prompt_tokens": 8000 if i % 2 else 100, "output_tokens": 10, "arrival_s": i} for i in range(10)
    ]
    trace.write_text("\n".join(map(json.dumps, lines)))
    small = ("--gpu", "a10", "--kv", "fp16", "--runtime-gb", "6.4", "--trace", trace)
    path = tmp_path / "s.json"
    assert run(*small, "--slo-ttft-ms", 1e5, "--json", path)[0] == 0
    row = json.loads(path.read_text())["rows"][0]
    assert (row["served"], row["refused"], row["slo_met"]) == (5, 5, 0.5)
    status, _, err = run(*small, "--slo-ttft-ms", 1e5, "--meet", 0.9)
    assert status == 2
    assert "more don't help" in err


def test_what_is_cut_or_empty_is_said(run, tmp_path):
    status, out, _ = run("--rate", 1, "--requests", 5, "--input-len", "5000000", "--kv", "int4")
    assert status == 0
    assert "cut" in out
    empty = tmp_path / "t.jsonl"
    empty.write_text("")
    assert run("--trace", empty)[::2] == (2, f"kvq: error: {empty} has no requests\n")


def test_agents_over_tiers_say_what_a_gib_buys(run, tmp_path):
    trace, path = tmp_path / "t.jsonl", tmp_path / "s.json"
    turns = [{"format_version": 1}]
    for number in range(3):
        for i in range(8):
            before = [f"s{i}", number - 1] if number else None
            turns.append({
                "session": f"s{i}", "turn": number, "base": before, "after": [before] if before else [],
                "pause_s": 2.0, "added": [[100 * number + i, 1500]], "answer": [1, 20],
            })  # fmt: skip
    trace.write_text("\n".join(map(json.dumps, turns)))
    small = ("--trace", trace, "--kv", "int8", "--gpu-memory-utilization", 0.03, "--max-model-len", 8192)
    status, out, _ = run(*small, "--kv-host", "0,512MiB,4GiB", "--json", path)
    assert status == 0
    rows = json.loads(path.read_text())["rows"]
    assert [row["kv_host"] for row in rows] == [0, 512 << 20, 4 << 30]
    assert [row["served"] for row in rows] == [24] * 3
    hits = [row["prefix_hit_rate"] for row in rows]
    assert hits[0] < hits[2]
    assert hits == sorted(hits)
    assert len(re.findall(r"^int8, .* of host memory: each GiB buys [+-]", out, re.M)) == 2
    status, out, _ = run(*small, "--kv-disk", "0,4GiB", "--kv-ladder", "int4,int3", "--json", path)
    assert status == 0
    assert "4.00 GiB of disk: each GiB buys" in out
    ladder, disk = json.loads(path.read_text())["rows"]
    assert hits[0] < ladder["prefix_hit_rate"] <= disk["prefix_hit_rate"]
    status, _, err = run(*small, "--kv-ladder", "int3,int4")
    assert (status, "ever smaller formats" in err) == (2, True)
    status, _, err = run(*small, "--rate", 3)
    assert (status, "agents' traces exclude --rate" in err) == (2, True)
    trace.write_text("\n".join(map(json.dumps, [turns[0], turns[1] | {"pause_s": -2}])))
    status, _, err = run(*small)
    assert (status, f"{trace}, line 2: pause_s must be seconds of at least 0, got -2\n" in err) == (2, True)
