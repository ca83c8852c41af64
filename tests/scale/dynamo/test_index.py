"""Dynamo's index, fed by kvq's events over sockets, finds the replica that holds a prefix."""

import json
import shutil
import subprocess
import sys

import pytest

pytest.importorskip("dynamo.llm")


def test_the_index_knows_what_every_replica_holds():
    """Of 1,000 prompts, and of 200 more where three batches in ten are lost on their way."""
    alone = shutil.which("unshare")
    if alone is None or subprocess.run([alone, "-rn", "true"]).returncode:
        pytest.skip("Dynamo's index listens on every address, and no network of its own can be made here")
    line = [alone, "-rn", sys.executable, "-m", "tests.scale.dynamo.replicas", "1000"]
    run = subprocess.run(line, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stderr
    print(run.stdout)
    calm, lossy = json.loads(run.stdout)
    for found, cases in ((calm, 1000), (lossy, 200)):
        assert found["one holds most"] + found["several do"] + found["nobody holds it"] == cases
        assert found["one holds most"] > cases / 3
        assert found["removals"] > cases
        assert found["restarted"]
        assert found["swapped out"]
    assert calm["lost"] == 0 < lossy["lost"]
