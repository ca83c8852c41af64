"""`python -m tests.capacity.harness`."""

import json
import re
from pathlib import Path

import pytest

from kvq.scheduler.running import Running
from tests.capacity.harness.__main__ import main


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    """Exit code, output and errors of a run of 60 steps."""
    code = 0
    try:
        main(["--steps", "60", *map(str, arguments)])
    except SystemExit as exit_:
        code = int(exit_.code or 0)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_a_seed_prints_a_summary_and_its_digest_every_time(capsys: pytest.CaptureFixture[str]) -> None:
    first = run(capsys, "--faults", "--seed", 5)
    assert first == run(capsys, "--faults", "--seed", 5)
    code, out, err = first
    assert (code, err) == (0, "")
    assert re.search(r"\d+ steps, \d+ requests: \d+ finished, ", out)
    assert re.search(r"^digest [0-9a-f]{16}$", out, re.M)
    assert run(capsys, "--seed", 5)[1] != out


def test_many_seeds_make_one_row_each(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    options = ("--blocks", 20, "--block-size", 4, "--max-num-seqs", 3, "--max-num-batched-tokens", 16)
    code, out, _ = run(
        capsys, "--faults", "--seeds", 3, "--seed", 2, "--requests", 9, "--rate", 50, *options, "--json", path
    )
    assert code == 0
    assert "3 seeds, digest " in out
    result = json.loads(path.read_text())
    assert [row["seed"] for row in result["rows"]] == [2, 3, 4]
    assert all(row["requests"] <= 9 for row in result["rows"])
    assert len({row["digest"] for row in result["rows"]}) == 3


def test_a_broken_invariant_is_named_with_its_seed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Running, "_give_row_back", lambda self, branch: setattr(branch, "row", None))
    code, _, err = run(capsys, "--seeds", 9)
    assert code == 1
    assert re.search(r"an invariant broke: seed \d, step \d+: ", err)
