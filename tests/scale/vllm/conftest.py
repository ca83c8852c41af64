"""Prompts, and what kvq's own engine says to them."""

from collections.abc import Callable

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
def own() -> Callable[[str, list[list[int]], int], list[list[int]]]:
    """kvq's own engine on the same prompts."""

    def run(kv: str, prompts: list[list[int]], count: int) -> list[list[int]]:
        model = kvq.load(str(TINY), kv=kv, dtype="fp32")
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
