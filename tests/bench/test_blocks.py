"""`kvq bench blocks`: what it prints and writes, and figures that add up."""

import json

import pytest

from kvq import cli
from kvq.bench.blocks import _Timings, measure_utilization
from kvq.bench.timing import percentile

SMALL = ["--sequences", "20", "--blocks-per-sequence", "4", "--blocks", "256", "--block-size", "3"]
OPERATIONS = {
    "allocate", "allocate_evicting", "allocate_with_slots", "append", "append_after_fork", "commit",
    "fork", "free", "free_fork", "free_long", "hash", "lookup", "lookup_long", "lookup_long_again",
    "lookup_miss", "pool_allocate", "pool_free", "publish", "start_hit", "start_long",
}  # fmt: skip


def test_every_operation_is_measured_and_written(tmp_path, capsys):
    path = tmp_path / "blocks.json"
    with pytest.raises(SystemExit) as stop:
        cli.main(["bench", "blocks", *SMALL, "--json", str(path)])
    assert not stop.value.code
    out = capsys.readouterr().out
    result = json.loads(path.read_text())
    assert {row["operation"] for row in result["rows"]} == OPERATIONS
    for row in result["rows"]:
        assert 0 < row["us_p10"] <= row["us_median"] <= row["us_p90"], row
        assert row["per"] in ("block", "sequence", "prompt")
        assert row["operation"] in out
    assert result["utilization"]["block_size"] == 3
    assert {"kvq_version", "commit", "date", "device", "versions", "command"} <= set(result)


def test_an_unwritable_result_is_refused_before_anything_is_measured(tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["bench", "blocks", *SMALL, "--json", str(tmp_path / "no" / "blocks.json")])
    assert stop.value.code == 2
    assert "no" in capsys.readouterr().err


@pytest.mark.parametrize("bad", [["--blocks", "0"], ["--block-size", "0"], ["--sequences", "many"]])
def test_bad_options_are_refused(bad, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["bench", "blocks", *bad])
    assert stop.value.code == 2
    assert bad[0] in capsys.readouterr().err


def test_blocks_waste_less_than_a_twentieth_where_buffers_waste_more_than_half():
    filled = measure_utilization(num_sequences=60, rounds=120)
    assert filled["paged_p10"] >= 0.96
    assert filled["contiguous_mean"] < 0.5


def test_larger_blocks_waste_more():
    by_size = [
        measure_utilization(block_size=n, num_sequences=40, rounds=60)["paged_mean"] for n in (1, 16, 256)
    ]
    assert by_size[0] == 1.0 > by_size[1] > by_size[2]


def test_percentiles_are_interpolated():
    assert [percentile([4, 1, 3, 2], p) for p in (0, 50, 100)] == [1, 2.5, 4]
    assert percentile([7], 90) == 7


def test_samples_are_per_operation():
    timed = _Timings("small")
    timed._us["append", "sequence"] = [1.0, 2.0, 9.0]
    (row,) = timed.rows()
    assert (row["us_median"], row["samples"], row["operation"]) == (2.0, 3, "append")
