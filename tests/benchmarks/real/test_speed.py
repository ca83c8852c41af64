"""Sequences that are timed are as deep as they are said to be, and hold what the first one's prompt left."""

import json

import pytest
import torch

import kvq
from benchmarks.real import speed
from kvq.evals import default_text


@pytest.mark.parametrize("kv", ["int4", "int8_per_token_head"])
def test_copies_go_on_as_what_was_read(kv):
    runner = speed.Runner(kvq.load("tiny"), kv, list(range(1, 90)), depth=89, sequences=3, spare=4)
    runner.time_prompt()
    assert len(runner.first_s) == 2
    results = runner._session.forward([(sequence, [7]) for sequence in runner._all])
    assert {sequence.length for sequence in runner._all} == {90}
    session = kvq.load("tiny").with_kv(kv).session(max_tokens=90)
    sequence = session.new_sequence()
    session.forward([(sequence, list(range(1, 90)))])
    wanted = session.forward([(sequence, [7])])[0].logits
    for result in results:
        torch.testing.assert_close(result.logits, wanted)


def test_a_row_for_every_depth_and_number_of_sequences(tmp_path, capsys):
    essays = tmp_path / "lab" / "tasks" / "essays"
    essays.mkdir(parents=True)
    (essays / "a.txt").write_text(default_text().text, encoding="utf-8")
    out = tmp_path / "speed.json"
    few = ("--depths", "40,70", "--sequences", "1,2", "--rounds", "1", "--steps", "2", "--prompts", "2")
    speed.main(["--folder", str(tmp_path / "lab"), "--models", "tiny", *few, "--out", str(out)])
    rows = json.loads(out.read_text())["rows"]
    assert [(row["depth"], row["sequences"], row["kv"]) for row in rows] == [
        (depth, sequences, kv) for depth in (40, 70) for sequences in (1, 2) for kv in ("int8", "int4")
    ]
    assert all(("first_ms" in row) == (row["sequences"] == 1) for row in rows)
    assert "depth 70 sequences 2 " in capsys.readouterr().out
