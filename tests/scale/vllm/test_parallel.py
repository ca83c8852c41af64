"""Tensor parallel: each of two processes holds half of the KV heads, and what was calibrated for them."""

import json
import os
import subprocess
import sys

import pytest

from tests.scale.vllm.kit import greedy, served
from tests.scale.vllm.test_vllm import TOKENS, check_same

pytestmark = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core")


@pytest.mark.parametrize("kv", ["searched", "static"])
def test_two_processes_say_what_one_says(kv, prompts, made):
    name, some = made(kv), prompts[:24]
    asked = json.dumps({"kv": name, "prompts": some, "count": TOKENS})
    command = [sys.executable, "-m", "tests.scale.vllm.parallel"]
    done = subprocess.run(
        command, input=asked + "\n", capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    with served(name) as llm:
        want = greedy(llm, some, TOKENS)
    assert check_same(name, some, found, want) <= 6
