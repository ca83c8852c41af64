"""`kvq bench engine`: loads as asked for, rows that add up, and nothing timed that is wrong."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import kvq
from kvq import cli
from kvq.bench.engine.engine import EnginePlan, bench_engine
from kvq.bench.engine.hf import ContinuousBatching
from kvq.bench.engine.load import ArrivalQueue, Load, LoadRequest, Served, ServedLoad, is_saturated, mark, row
from kvq.bench.engine.rivals import check_requests, compare, one_by_one
from kvq.bench.engine.server import KvqServer
from kvq.capacity.lengths import Lengths, parse_lengths
from kvq.engine import EngineConfig
from kvq.errors import ConfigError, EngineError
from kvq.models import Model

SMALL = ["--requests", "5", "--input-len", "7:40", "--output-len", "3:6", "--repeats", "1"]
LOAD = Load(
    num_requests=6,
    input_lengths=Lengths(low=9, high=33),
    output_lengths=Lengths(low=2, high=5),
    vocab_size=4096,
    max_context=4096,
)
PROMISED = {
    "name", "kv", "requests", "output_tokens_per_s", "total_tokens_per_s", "concurrency", "preemptions",
    "prefix_hit_rate", "peak_blocks", "pool_utilization", "ttft_ms_p50", "ttft_ms_p95", "ttft_ms_p99",
    "itl_ms_p50", "itl_ms_p95", "itl_ms_p99",
}  # fmt: skip


@pytest.fixture(scope="module")
def model() -> Model:
    return kvq.load("tiny")


def run(*arguments: str) -> int | str | None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["bench", "engine", *arguments])
    return stop.value.code


@pytest.mark.parametrize(
    ("text", "lengths"),
    [
        ("128", Lengths(low=128, high=128)),
        ("16:512", Lengths(low=16, high=512)),
        ("lognormal:256:0.7", Lengths(low=256, high=256, sigma=0.7)),
    ],
)
def test_lengths_are_read(text: str, lengths: Lengths) -> None:
    assert parse_lengths(text, "--input-len") == lengths


@pytest.mark.parametrize("text", ["", "0", "9:3", "1:2:3", "lognormal:0:1", "lognormal:9:-1", "lognormal:9"])
def test_other_lengths_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--input-len"):
        parse_lengths(text, "--input-len")


def test_repeats_differ_in_token_ids_alone() -> None:
    load = replace(LOAD, rate=4.0, num_requests=50)
    first, again, other = load.draw(0), load.draw(0), load.draw(1)
    assert first == again
    shapes = [[(len(r.prompt), r.output_tokens, r.arrival_s) for r in draw] for draw in (first, other)]
    assert shapes[0] == shapes[1]
    assert all(a.prompt != b.prompt for a, b in zip(first, other, strict=True))
    assert first[-1].arrival_s == pytest.approx(50 / 4, rel=0.5)


def test_prompts_share_their_beginning() -> None:
    prompts = [request.prompt for request in replace(LOAD, shared_prefix=0.5).draw(0)]
    for a in prompts:
        for b in prompts:
            common = min(round(len(a) / 2), round(len(b) / 2))
            assert a[:common] == b[:common]
    assert len({tuple(prompt) for prompt in prompts}) == len(prompts)


def test_requests_that_exceed_the_context_are_refused_and_long_tails_cut() -> None:
    with pytest.raises(ConfigError, match="context of 30"):
        replace(LOAD, max_context=30)
    tails = Lengths(low=20, high=20, sigma=3.0)
    load = replace(LOAD, num_requests=200, max_context=64, input_lengths=tails, output_lengths=tails)
    assert max(request.tokens for request in load.draw(0)) == 64


def test_arrivals_come_at_their_time_or_when_a_user_is_free() -> None:
    requests = [LoadRequest(index=i, prompt=[1], output_tokens=1, arrival_s=i) for i in range(3)]
    opened = ArrivalQueue(requests, None)
    assert [due for _, due in opened.due(1.5, 0)] == [0, 1]
    assert opened.wait_s(1.5, 0) == 0.5
    closed = ArrivalQueue(requests, 2)
    assert [(r.index, due) for r, due in closed.due(7.0, 0)] == [(0, 7.0), (1, 7.0)]
    assert closed.wait_s(7.0, 0) == math.inf
    assert [(r.index, due) for r, due in closed.due(8.0, 1)] == [(2, 8.0)]
    assert closed.is_done


def served(*token_s: float, due_s: float = 0.0) -> Served:
    request = LoadRequest(index=0, prompt=[1, 2, 3], output_tokens=len(token_s))
    return Served(request=request, due_s=due_s, token_s=list(token_s))


def test_rows_add_up() -> None:
    one = ServedLoad(served=[served(1.0, 1.5, 2.0), served(1.25, 2.0, due_s=0.25)])
    found = row("kvq", "int4", [one], None)
    assert found["output_tokens_per_s"] == 5 / 2
    assert found["total_tokens_per_s"] == 11 / 2
    assert found["concurrency"] == round((2 + 1.75) / 2, 1)
    assert (found["ttft_ms_p50"], found["ttft_ms_p99"]) == (1000, 1000)
    assert found["itl_ms_p50"] == 500
    assert found["peak_blocks"] is None


def test_single_tokens_have_no_itl() -> None:
    found = row("kvq", "int4", [ServedLoad(served=[served(1.0)])], 1)
    assert found["itl_ms_p99"] is None


def level(users: int, rate: float, itl: float) -> dict[str, Any]:
    return {
        "name": "kvq", "kv": "int4", "concurrency": users, "output_tokens_per_s": rate, "ttft_ms_p99": 5.0,
        "itl_ms_p99": itl,
    }  # fmt: skip


def test_saturation_and_the_best_row_within_the_slo_are_marked() -> None:
    rows = [level(1, 10, 1.0), level(2, 19, 2.0), level(4, 30, 9.0), level(8, 30.5, 20.0)]
    assert is_saturated(rows)
    assert not is_saturated(rows[:3])
    mark(rows, ttft_ms=10, itl_ms=2.5)
    assert [one["concurrency"] for one in rows if one.get("is_saturation")] == [4]
    assert [one["concurrency"] for one in rows if one.get("is_best_within_slo")] == [2]


def test_a_server_gives_every_token_and_counts_blocks_and_hits(model: Model) -> None:
    load = replace(LOAD, shared_prefix=0.9, input_lengths=Lengths(low=80, high=80))
    requests = load.draw(0)
    server = KvqServer(model, "int4_g32", EngineConfig(), requests)
    found, again = server.run(requests, 1), server.run(requests, 1)
    server.close()
    assert [len(one.token_s) for one in found.served] == [request.output_tokens for request in requests]
    assert all(one.token_s == sorted(one.token_s) and one.ttft_s > 0 for one in found.served)
    assert found.preemptions == 0
    assert found.peak_blocks == 3  # one request at a time, 85 tokens at most
    assert found.pool_utilization is not None
    assert 0.7 < found.pool_utilization <= 1
    assert found.prefix_hit_rate == again.prefix_hit_rate  # each run begins with an empty index
    assert found.prefix_hit_rate == pytest.approx(5 * 64 / (6 * 80), rel=0.15)


def test_other_tokens_than_one_by_one_stop_the_benchmark(model: Model) -> None:
    few = check_requests(LOAD.draw(0))
    server = KvqServer(model, "fp32", EngineConfig(), few)
    alone = one_by_one(server, few)
    server.close()
    tokens = [list(output.token_ids) for output in alone]
    assert compare("kvq", model, alone, tokens)["check_equal"] == len(few)
    with pytest.raises(EngineError, match="request 1 goes on"):
        compare("kvq", model, alone, [tokens[0], [t + 1 for t in tokens[1]], *tokens[2:]])
    with pytest.raises(EngineError, match="request 0 goes on"):
        compare("kvq", model, alone, [[*tokens[0], 5], *tokens[1:]])


def test_rows_of_formats_and_rivals_hold_what_was_promised(tmp_path: Path) -> None:
    path, plot = tmp_path / "e.json", tmp_path / "e.svg"
    code = run("--kv", "fp32,int4", *SMALL, "--concurrency", "2", "--rivals", "hf-static,hf-continuous",
               "--slo-itl-ms", "100000", "--json", str(path), "--plot", str(plot))  # fmt: skip
    assert not code
    rows = json.loads(path.read_text())["rows"]
    names = [("kvq", "fp32"), ("kvq", "int4"), ("hf-static", "fp32"), ("hf-continuous", "fp32")]
    assert [(r["name"], r["kv"]) for r in rows] == names
    for one in rows:
        assert set(one) >= PROMISED
        assert one["output_tokens_per_s"] < one["total_tokens_per_s"]
        assert one["check_requests"] == 4
        assert one["is_best_within_slo"]
    assert "<svg" in plot.read_text()


def test_a_rival_that_cannot_run_has_a_row_that_says_why(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise ValueError("no such kernel")

    monkeypatch.setattr(ContinuousBatching, "generate", broken)
    plan = EnginePlan(load=LOAD, config=EngineConfig(), rivals=("hf-continuous",), repeats=1)
    rows = bench_engine(model, ["fp32"], plan)
    assert rows[1]["reason"] == "ValueError: no such kernel"
    assert rows[1]["output_tokens_per_s"] is None
    assert set(rows[1]) >= PROMISED


def test_pressure_shows_as_preemptions(model: Model) -> None:
    load = replace(LOAD, input_lengths=Lengths(low=60, high=60), output_lengths=Lengths(low=40, high=40))
    requests = load.draw(0)
    server = KvqServer(model, "int4_g32", EngineConfig(num_blocks=9), requests)
    found = server.run(requests, None)
    server.close()
    assert found.preemptions
    assert found.pool_blocks == 9


@pytest.mark.parametrize(
    "bad",
    [
        ["--rate", "3", "--concurrency", "2"],
        ["--rate", "often"],
        ["--rate", "-1"],
        ["--concurrency", "4,2"],
        ["--concurrency", "6"],
        ["--input-len", "0"],
        ["--rivals", "vllm"],
        ["--output-len", "9999"],
        ["--kv-memory", "1GiB", "--blocks", "9"],
    ],
)
def test_bad_options_are_refused(bad: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*SMALL, *bad) == 2
    assert capsys.readouterr().err
