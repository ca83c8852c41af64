"""Dynamo's index and router, fed by kvq's events over sockets, find the replica that holds a prefix."""

import json
import shutil
import subprocess
import sys

import pytest

pytest.importorskip("dynamo.llm")


def alone(module: str, *arguments: str) -> str:
    """What a module prints that runs in a network of its own: Dynamo listens on every address."""
    unshare = shutil.which("unshare")
    if unshare is None or subprocess.run([unshare, "-rn", "true"]).returncode:
        pytest.skip("Dynamo listens on every address, and no network of its own can be made here")
    line = [unshare, "-rn", sys.executable, "-m", f"tests.scale.dynamo.{module}", *arguments]
    run = subprocess.run(line, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stderr
    print(run.stdout)
    return run.stdout


def test_the_index_knows_what_every_replica_holds():
    """Of 1,000 prompts, and of 200 with events as arrays, of which three batches in ten find no room."""
    calm, lossy = json.loads(alone("replicas", "1000"))
    for found, cases in ((calm, 1000), (lossy, 200)):
        assert found["one holds most"] + found["several do"] + found["nobody holds it"] == cases
        assert found["one holds most"] > cases / 3
        assert found["removals"] > cases
        assert found["restarted"]
        assert found["given up"]
    assert calm["lost"] == 0 < lossy["lost"]


def test_its_publisher_relays_them_to_its_router():
    [found] = [line for line in alone("relay").splitlines() if line.startswith("found ")]
    assert json.loads(found.removeprefix("found ")) == [0, 4, 0]
