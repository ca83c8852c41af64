"""`kvq plan --engine vllm` against what a real vLLM says when it starts."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import kvq
from kvq.bench.random_model import random_model
from kvq.capacity.plan.vllm import VllmEngine
from kvq.formats import KVRecipe
from kvq.sizing.memory import Split
from tests.scale.vllm.kit import MEMORY, served

STEP, CONTEXT = 256, 1024  # tokens
COMMON = {
    **{"vocab_size": 512, "hidden_size": 512, "intermediate_size": 512, "max_position_embeddings": 2048},
    **{"tie_word_embeddings": True, "dtype": "bfloat16"},
}
FULL = {
    **{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 3},
    **{"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 128},
}
WINDOWS = {
    **{"model_type": "gemma3_text", "architectures": ["Gemma3ForCausalLM"], "num_hidden_layers": 7},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "query_pre_attn_scalar": 64},
    **{"sliding_window": 512, "layer_types": [*2 * ["sliding_attention"], "full_attention"] * 2},
}
WINDOWS["layer_types"] = [*WINDOWS["layer_types"], "sliding_attention"]


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """With random weights: full attention in heads of 128, and five windows beside two full layers, of 64."""
    folder = tmp_path_factory.mktemp("models")
    for name, config in (("full", FULL), ("windows", WINDOWS)):
        random_model(COMMON | config, folder / name, torch.device("cpu"), stored=True)
    return {name: folder / name for name in ("full", "windows")}


def planned(model: Path, kv: str, *, block_size: int, tensor: int = 1) -> Any:
    """What is predicted of vLLM on a CPU, which schedules one step at a time."""
    engine = VllmEngine(
        block_size=block_size,
        step_tokens=STEP,
        max_context=CONTEXT,
        kv_memory=MEMORY,
        steps_at_work=1,
    )
    plan = kvq.plan(model, gpu="h100", kv=kv, context=CONTEXT, split=Split(tensor=tensor), engine=engine)
    return plan.vllm


def started(model: Path, kv: str, **options: Any) -> Any:
    """vLLM in bf16, with one of kvq's formats or its own cache."""
    steps = {"dtype": "bfloat16", "max_model_len": CONTEXT, "max_num_batched_tokens": STEP}
    return served(None if kv == "bf16" else kv, model, **steps, **options)


def check(llm: Any, plan: Any) -> None:
    """Blocks, tokens and maximum concurrency are those of vLLM's log."""
    cache = llm.llm_engine.vllm_config.cache_config
    assert plan.num_gpu_blocks == cache.num_gpu_blocks
    assert plan.tokens == cache.kv_cache_size_tokens
    assert plan.max_concurrency == cache.kv_cache_max_concurrency


@pytest.mark.parametrize("name", ["full", "windows"])
def test_blocks_are_as_planned(models, name):
    """To the block, and int4 has 3.4 times those of bf16 and more."""
    blocks = {}
    for kv in ("bf16", "int8", "int4", "k8v4"):
        with started(models[name], kv) as llm:
            plan = planned(models[name], kv, block_size=llm.llm_engine.vllm_config.cache_config.block_size)
            check(llm, plan)
            blocks[kv] = llm.llm_engine.vllm_config.cache_config.num_gpu_blocks
    assert blocks["int4"] > 3.4 * blocks["bf16"]


@pytest.mark.parametrize("name", ["full", "windows"])
def test_smaller_blocks_are_as_planned(models, name):
    with started(models[name], "int4", block_size=32) as llm:
        check(llm, planned(models[name], "int4", block_size=32))


@pytest.mark.parametrize(
    ("name", "head_dim", "formats"),
    [
        ("full", 128, ["int8", "int4", "k8v4"]),
        ("windows", 64, ["fp32", "bf16", "bf16", *4 * ["int4"]]),
        ("windows", 64, ["int8", "int8", "fp32", "int8", "int8", "int8", "fp32"]),
    ],
    ids=["full", "padded", "of more tokens"],
)
def test_layers_of_several_formats_are_as_planned(models, tmp_path, name, head_dim, formats):
    layers = [KVRecipe.uniform(kv, [(head_dim, head_dim)]).layers[0] for kv in formats]
    file = tmp_path / "kvq.json"
    KVRecipe(layers=tuple(layers)).save(file)
    with started(models[name], str(file)) as llm:
        check(llm, planned(models[name], str(file), block_size=128))


@pytest.mark.parametrize("kv", ["bf16", "int4"])
@pytest.mark.parametrize("name", ["full", "windows"])
def test_ranks_are_as_planned(models, name, kv):
    """Of up to 8, by vLLM's own heads a rank and its own groups; the rank with the least memory decides."""
    from vllm.v1.core import kv_cache_utils

    with started(models[name], kv) as llm:
        config = llm.llm_engine.vllm_config
        [specs] = llm.llm_engine.engine_core.engine_core.model_executor.get_kv_cache_specs()
        for ranks in (2, 4, 8) if name == "full" else (2, 4):
            split = SimpleNamespace(tensor_parallel_size=ranks)
            heads = config.model_config.get_num_kv_heads(split)
            own = {layer: replace(spec, num_kv_heads=heads) for layer, spec in specs.items()}
            memory = [MEMORY + 1_000_000 * rank for rank in range(ranks)]
            found = kv_cache_utils.get_kv_cache_configs(config, [own] * ranks, memory)
            plan = planned(models[name], kv, block_size=128, tensor=ranks)
            assert {one.num_blocks for one in found} == {plan.num_gpu_blocks}
            said = kv_cache_utils.get_kv_cache_capacity(config, found[0])
            assert said == (plan.tokens, plan.max_concurrency)


@pytest.mark.parametrize("name", ["full", "windows"])
def test_two_processes_are_as_planned(models, monkeypatch, name):
    """Of vLLM: ranks with their own part of the weights and of the KV heads."""
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    with started(models[name], "int4", tensor_parallel_size=2) as llm:
        check(llm, planned(models[name], "int4", block_size=128, tensor=2))
