"""vLLM's blocks as it counts them; tests/scale/vllm holds the same to a real one."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

import kvq
from kvq.capacity.lengths import Demand, fixed
from kvq.capacity.plan.gpus import find_gpu
from kvq.capacity.plan.plan import CapacityPlan, make_plan
from kvq.capacity.plan.target import make_target
from kvq.capacity.plan.vllm import VllmEngine, _LayerKind, batch_defaults, cache_dtype, group_layers
from kvq.errors import ConfigError
from kvq.formats import KVRecipe
from kvq.integrations.vllm.names import recipe_of, without_prefix
from kvq.integrations.vllm.pages import Page
from kvq.sizing.memory import Split

GIB = 1 << 30
WINDOWS = {
    **{"model_type": "gemma3_text", "vocab_size": 512, "hidden_size": 256, "intermediate_size": 256},
    **{"num_hidden_layers": 7, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64},
    **{"max_position_embeddings": 2048, "sliding_window": 512, "dtype": "bfloat16"},
    "layer_types": [f"{kind}_attention" for kind in ("sliding", "sliding", "full", *3 * ["sliding"], "full")],
}


def planned(
    model: str | Path, kv: str, *, tensor: int = 1, context: int = 512, **engine: object
) -> CapacityPlan:
    """On an H100."""
    settings = replace(VllmEngine.on(find_gpu("h100")), **engine)
    return kvq.plan(model, gpu="h100", kv=kv, context=context, split=Split(tensor=tensor), engine=settings)


def folder(path: Path, **changes: object) -> Path:
    """With a config.json alone."""
    (path / "config.json").write_text(json.dumps(WINDOWS | changes))
    return path


def recipe_file(path: Path, names: list[str]) -> str:
    """A kvq.json with a format for each layer."""
    file = path / "kvq.json"
    KVRecipe(layers=tuple(KVRecipe.uniform(kv, [(64, 64)]).layers[0] for kv in names)).save(file)
    return str(file)


@pytest.mark.parametrize("tensor", [1, 4, 8, 16])
@pytest.mark.parametrize("kv", ["bf16", "int8", "k8v4", "int4", "fp8", "int4_g32"])
def test_pages_are_those_of_the_plug_in(kv, tensor):
    geometry = make_target("llama-3-8b").geometry
    plan = planned("llama-3-8b", kv, tensor=tensor, kv_memory=4 * GIB)
    recipe = recipe_of(kv, (128, 128), len(geometry.layers))
    heads = max(1, 8 // tensor)  # of a rank: they are copied where there are fewer than ranks
    pages = [Page.of(recipe, layer.index, heads, 16, (128, 128)) for layer in geometry.layers]
    assert plan.block_bytes == sum(page.layout.nbytes for page in pages)
    assert plan.vllm["num_gpu_blocks"] == 4 * GIB // plan.block_bytes
    assert plan.vllm["max_concurrency"] == plan.vllm["num_gpu_blocks"] / (8192 / 16)
    assert plan.vllm["kv_cache_tokens"] == plan.vllm["num_gpu_blocks"] * 16


def test_int4_gives_more_than_three_times_the_blocks():
    wide, narrow = (planned("llama-3-8b", kv, kv_memory=8 * GIB).vllm for kv in ("bf16", "int4"))
    assert narrow["num_gpu_blocks"] / wide["num_gpu_blocks"] > 3.4
    assert narrow["max_concurrency"] / wide["max_concurrency"] > 3.4


@pytest.mark.parametrize(
    ("kv", "block_size", "said"),
    [
        ("bf16", 128, (192, 6779, 6.620689655172414)),
        ("bf16", 32, (768, 7349, 7.177570093457944)),
        ("int4", 128, (682, 24081, 23.517241379310345)),
        ("int4", 32, (2730, 26126, 25.514018691588785)),
    ],
)
def test_layers_with_windows_share_blocks_as_vllm_has_them_do(tmp_path, kv, block_size, said):
    """What vLLM 0.32 said on a CPU, of 24 MiB for 5 layers with windows and 2 without."""
    plan = planned(
        folder(tmp_path),
        kv,
        **{"block_size": block_size, "max_context": 1024, "step_tokens": 256},
        **{"kv_memory": 24 << 20, "steps_at_work": 1},
    )
    found = plan.vllm
    assert (found["num_gpu_blocks"], found["kv_cache_tokens"], found["max_concurrency"]) == said


@pytest.mark.parametrize(
    ("formats", "said"),
    [
        ([*6 * ["int8"], "int4"], (744, 14938, 14.588235294117647)),
        (["fp32", "bf16", "bf16", *4 * ["int4"]], (192, 4468, 4.363636363636363)),
        (["int8", "int8", "fp32", "int8", "int8", "int8", "fp32"], (96, 3389, 3.310344827586207)),
    ],
)
def test_pages_of_several_sizes_share_blocks_as_vllm_has_them_do(tmp_path, formats, said):
    """As above: larger pages pad the others, or give them more tokens."""
    plan = planned(
        folder(tmp_path),
        recipe_file(tmp_path, formats),
        **{"block_size": 128, "max_context": 1024, "step_tokens": 256},
        **{"kv_memory": 24 << 20, "steps_at_work": 1},
    )
    found = plan.vllm
    assert (found["num_gpu_blocks"], found["kv_cache_tokens"], found["max_concurrency"]) == said


@pytest.mark.parametrize(
    ("kinds", "sizes"),
    [
        ({None: 32}, [32]),
        ({512: 32}, [32]),
        ({None: 10, 512: 20}, [10, 10, 10]),
        ({512: 12, None: 13}, [12, 13]),
        ({512: 20, None: 30}, [20, 15, 15]),
        ({None: 2, 512: 5}, [2, 2, 2, 1]),
        ({None: 1, 64: 1, 512: 3}, [1, 1, 1, 1, 1]),
    ],
)
def test_groups_are_about_as_large_as_the_rarest_kind(kinds, sizes):
    counted = Counter({_LayerKind(window=window, block_size=16): count for window, count in kinds.items()})
    groups = group_layers(counted)
    assert [count for _, count in groups] == sizes
    assert [kind.window for kind, _ in groups] == sorted(
        (kind.window for kind, _ in groups), key=list(kinds).index
    )


def test_memory_is_a_share_of_the_whole_gpu_and_nothing_is_unsaid():
    gpu = find_gpu("h100")
    plan = planned("llama-3-8b", "int4", context=4096)
    *others, free, pool = plan.terms
    assert sum(term.nbytes for term in plan.terms) == gpu.memory_bytes
    assert plan.pool_bytes == plan.vllm["num_gpu_blocks"] * plan.block_bytes
    left = 0.92 * gpu.memory_bytes - sum(term.nbytes for term in others)
    assert left - plan.block_bytes < pool.nbytes <= left + 1
    assert free.nbytes >= 0.08 * gpu.memory_bytes - 1
    given = planned("llama-3-8b", "int4", context=4096, kv_memory=pool.nbytes)
    assert (given.vllm, given.users) == (plan.vllm, plan.users)


def test_ranks_share_weights_and_heads():
    one, four = (planned("llama-3-8b", "int4", tensor=tensor) for tensor in (1, 4))
    assert four.weights_bytes == pytest.approx(one.weights_bytes / 4, rel=1e-6)
    assert four.block_bytes * 4 == one.block_bytes
    assert four.vllm["num_gpu_blocks"] > 4 * one.vllm["num_gpu_blocks"]


def test_one_block_is_never_given_out():
    plan = planned("llama-3-8b", "int4", context=8192, kv_memory=8 * GIB)
    assert plan.users.paged == (plan.vllm["num_gpu_blocks"] - 1) // 512
    most = plan.block_bytes * 513  # of the shortest pool with which vLLM starts
    assert planned("llama-3-8b", "int4", context=8192, kv_memory=most).users.paged == 1
    with pytest.raises(ConfigError, match="takes 512 blocks, and there are 511; give --max-model-len 8176"):
        planned("llama-3-8b", "int4", kv_memory=most - 1)
    assert planned("llama-3-8b", "int4", kv_memory=most - 1, max_context=8176).vllm["max_concurrency"] > 1


def test_the_longest_request_of_a_model_with_windows_is_told(tmp_path):
    path, memory = folder(tmp_path), 60 * 2 * 2 * 16 * 256
    with pytest.raises(ConfigError, match="--max-model-len") as refused:
        planned(path, "bf16", step_tokens=64, kv_memory=memory)
    longest = int(str(refused.value).split("--max-model-len ")[1].split()[0])
    context = {"context": min(longest, 32), "step_tokens": 64, "kv_memory": memory}
    assert planned(path, "bf16", max_context=longest, **context).vllm["max_concurrency"] > 1
    with pytest.raises(ConfigError, match="does not start"):
        planned(path, "bf16", max_context=longest + 1, **context)


def test_a_common_prefix_is_held_once():
    demand = Demand(lengths=fixed(4096, 512))
    half = replace(demand, prefix_share=0.5)
    target, gpu = make_target("llama-3-8b"), find_gpu("h100")
    users = [
        make_plan(target, gpu, "int4", one, engine=VllmEngine.on(gpu)).users.paged for one in (demand, half)
    ]
    assert 1.7 < users[1] / users[0] < 1.9  # 3,584 of 4,096 tokens are the prompt's


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        ("deepseek-v3", {"kv": "bf16", "tensor": 16}, "latent"),
        ("llama-4-scout", {"kv": "int4", "tensor": 8}, "in chunks"),
        ("llama-3-8b", {"kv": "fp32"}, "--weights fp32"),
        ("llama-3-8b", {"kv": "fp8_per_head"}, "static scales"),
        ("llama-3-8b", {"kv": "int4", "block_size": 24}, "multiple of 16"),
        ("llama-3-8b", {"kv": "int4", "kv_memory": 200 * GIB}, "leave of h100"),
        ("llama-3-70b", {"kv": "int4"}, "does not fit"),
    ],
)
def test_what_vllm_does_not_serve_is_refused(model, options, message):
    with pytest.raises(ConfigError, match=message):
        planned(model, **options)


def test_heads_that_ranks_cannot_share_evenly_are_refused(tmp_path):
    path = folder(tmp_path, num_attention_heads=48, num_key_value_heads=6)
    twelve, six = (planned(path, "int4", tensor=tensor, kv_memory=GIB) for tensor in (12, 6))
    assert twelve.vllm == six.vllm, "copied"
    with pytest.raises(ConfigError, match="6 KV heads evenly, which 4 GPUs can't"):
        planned(path, "int4", tensor=4)


def test_pages_of_several_sizes_lie_side_by_side_without_windows(tmp_path):
    full = folder(tmp_path, layer_types=["full_attention"] * 7)
    plan = planned(full, recipe_file(tmp_path, [*6 * ["int8"], "int4"]), kv_memory=GIB)
    assert plan.block_bytes == 16 * 2 * 2 * (6 * (64 + 2) + (32 + 4))


@pytest.mark.parametrize("kv", ["int4", "k8v4", "int8", "some/kvq.json"])
def test_names_are_those_that_the_plug_in_reads(kv):
    assert without_prefix(cache_dtype(kv)) == kv


@pytest.mark.parametrize(
    ("gpu", "steps"),
    [("h100", (8192, 1024)), ("b200", (16384, 1024)), ("a100-80", (2048, 256)), ("l4", (2048, 256))],
)
def test_steps_are_vllms_defaults(gpu, steps):
    assert batch_defaults(find_gpu(gpu)) == steps


@pytest.mark.parametrize("kv", ["int4_mean", "int3+sinks=4+recent=128"])
def test_staged_recipes_are_not_planned_for_vllm(kv):
    with pytest.raises(ConfigError, match="vLLM's cache"):
        planned("llama-3.1-8b", kv)
