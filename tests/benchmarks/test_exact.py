"""The trial of exactness finds nothing where nothing is, and an order of sums that depends on the batch."""

from argparse import Namespace

import pytest

from benchmarks.exact import SCHEDULES, Trial

ALL = {"family": None, "kv": None, "schedule": None, "seed": 0, "minutes": 60, "wrong_order": False}


@pytest.mark.daily(2)
@pytest.mark.parametrize(
    ("family", "kv"),
    [
        ("tiny", "int4"),
        ("qwen2", "int3_mean+sinks=4+recent=32"),
        pytest.param("starcoder2", "fp8", marks=pytest.mark.daily(3)),
        pytest.param("lfm2", "int8", marks=pytest.mark.daily(3)),
    ],
)
def test_no_schedule_changes_a_bit(family, kv, tmp_path):
    trial = Trial(Namespace(**(ALL | {"family": [family], "kv": [kv], "tokens": 1})), tmp_path)
    trial.run()
    assert not trial.differences
    assert not trial.refused
    assert trial.met["schedule"] == {*SCHEDULES, "scored"}
    assert trial.total["tokens"] > 2000


def test_an_order_of_sums_that_depends_on_the_batch_is_found_within_1000_tokens(tmp_path):
    trial = Trial(Namespace(**(ALL | {"wrong_order": True, "tokens": 1000})), tmp_path)
    trial.run()
    assert trial.differences


def test_what_can_not_be_exact_is_refused(tmp_path):
    trial = Trial(Namespace(**ALL), tmp_path)
    trial.refuse(["falcon_h1"])
    assert "mamba" in trial.refused["falcon_h1"]
    assert not trial.differences
