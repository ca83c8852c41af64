"""Prompts, and what kvq's own engine says to them."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import kvq
from kvq.evals.text import default_text
from kvq.formats import KVRecipe
from tests.scale.vllm.kit import TINY


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    """A hundred of 4 to 200 tokens out of a text."""
    ids = kvq.load(str(TINY)).tokenizer.encode(default_text().text[:60_000])
    return [ids[i * 97 : i * 97 + 4 + 37 * i % 197] for i in range(100)]


@pytest.fixture(scope="session")
def own() -> Callable[..., list[list[int]]]:
    """kvq's own engine on the same prompts."""

    def run(kv: str, prompts: list[list[int]], count: int, folder: Path = TINY) -> list[list[int]]:
        model = kvq.load(str(folder), kv=kv, dtype="fp32")
        params = kvq.SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
        with kvq.LLM(model, max_num_seqs=8, max_context=512) as llm:
            return [list(output.outputs[0].token_ids) for output in llm.generate(prompts, params)]

    return run


@pytest.fixture(scope="session")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A kvq.json with another pair of formats in every layer."""
    model = kvq.load(str(TINY))
    dims = model.geometry.head_dims
    layers = [
        KVRecipe.uniform(("int8", "k8v4", "int4", "fp8")[i % 4], dims).layers[i] for i in range(len(dims))
    ]
    file = tmp_path_factory.mktemp("recipe") / "kvq.json"
    KVRecipe(layers=tuple(layers)).save(file)
    return str(file)


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory, tuned: str) -> Callable[[str], str]:
    """A format's name, or the file of a recipe that a command of kvq's makes for the embedded model."""
    folder = tmp_path_factory.mktemp("made")
    commands = {
        "centered": "calibrate tiny --kv int4 --centered --max-windows 2",
        "static": "calibrate tiny --kv fp8_per_head --max-windows 2",
        "searched": "tune tiny --formats int4,int2 --context 128 --max-windows 1 --verify-windows 1",
    }

    def make(name: str) -> str:
        file = folder / f"{name}.json"
        if name == "tuned":
            return tuned
        if name not in commands:
            return name
        if not file.exists():
            command = [sys.executable, "-m", "kvq", *commands[name].split(), "--out", str(file)]
            subprocess.run(command, check=True, capture_output=True, timeout=300)
        return str(file)

    return make
