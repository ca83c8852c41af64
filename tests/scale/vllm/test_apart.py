"""What needs processes of its own: tensor parallel, and models that torch.compile takes."""

import os

import pytest

from tests.scale.vllm.apart import greedy_apart
from tests.scale.vllm.kit import greedy, served
from tests.scale.vllm.test_vllm import TOKENS, check_same


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core")
@pytest.mark.parametrize("kv", ["searched", "static"])
def test_two_processes_say_what_one_says(kv, prompts, made, tmp_path, monkeypatch):
    """Each holds half of the KV heads, and what was calibrated for them."""
    name, some = made(kv), prompts[:24]
    first, second = sorted(os.sched_getaffinity(0))[:2]
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", f"{first}|{second}")
    over = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    found = greedy_apart(tmp_path, name, some, TOKENS, **over)
    monkeypatch.delenv("VLLM_CPU_OMP_THREADS_BIND")
    with served(name) as llm:
        want = greedy(llm, some, TOKENS)
    assert check_same(name, some, found, want) <= 6


def test_a_compiled_model_says_what_an_eager_one_says(prompts, tmp_path):
    some = prompts[:24]
    found = greedy_apart(tmp_path, "int8", some, TOKENS, enforce_eager=False)
    with served("int8") as llm:
        want = greedy(llm, some, TOKENS)
    assert check_same("int8", some, found, want) <= 3
