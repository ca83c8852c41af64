"""A plan in one call; speed and cost as people compute them on paper."""

import json
import subprocess
import sys

import pytest

import kvq
from kvq.capacity.lengths import Demand, Length
from kvq.capacity.plan.gpus import (
    Gpu,
    Prices,
    break_even_requests,
    find_gpu,
    monthly_usd,
    requests_a_month,
    usd_per_million,
)
from kvq.capacity.plan.memory import Engine
from kvq.capacity.plan.plan import at_rate, closed_loop, make_plan
from kvq.capacity.plan.step_time import Efficiency, expert_share
from kvq.capacity.plan.target import make_target
from kvq.errors import ConfigError
from kvq.formats import KVRecipe
from kvq.sizing.memory import Split

PERFECT = Efficiency(bandwidth=1, step=1, arithmetic=1)


def gpu(bandwidth_tb_s: float, tflops: float) -> Gpu:
    one = {"name": "one", "memory_gb": 80.0, "usd_per_hour": 1.0}
    return Gpu(**one, bandwidth_tb_s=bandwidth_tb_s, tflops={"fp16": tflops})


def test_an_h100_reads_14_gb_of_weights():
    step = PERFECT.linear_s(gpu(3.35, 989), 14e9, 2 * 7e9, tokens=1)
    assert 1e3 * step == pytest.approx(4.2, abs=0.05)
    assert 238 <= 1 / step <= 240


@pytest.mark.parametrize(("context", "wanted"), [(0, 320), (1024, 93), (4096, 30)])
def test_an_a100_with_16_requests(context, wanted):
    a100, reached = gpu(2, 312), Efficiency(bandwidth=0.8, step=0.7)
    kv = 16 * context * 524_288
    step = reached.linear_s(a100, 3.5e9, 2 * 7e9 * 16, tokens=16) + reached.read_s(a100, kv)
    assert 1 / step == pytest.approx(wanted, rel=0.02)


def test_what_is_not_bound_by_bytes_is_bound_by_arithmetic():
    assert PERFECT.linear_s(gpu(1, 1), 1e12, 1e11, tokens=1) == 1
    assert PERFECT.linear_s(gpu(1, 1), 1e11, 2e12, tokens=1) == 2


def test_experts_that_a_step_reads():
    assert expert_share(8, 2, 1) == 0.25
    assert expert_share(128, 8, 10_000) == pytest.approx(1)
    assert expert_share(0, 0, 5) == 0


def test_users_that_take_turns():
    found = closed_loop(users=10, step_s=0.02, prefill_s=0.1, output_tokens=100)
    assert found.itl_s == pytest.approx(0.03)
    assert found.tokens_per_s == pytest.approx(333.3, abs=0.1)
    seconds = found.itl_s * 100
    assert found.requests_per_s * seconds == pytest.approx(found.users)  # Little's law


def test_costs():
    assert usd_per_million(64, 3000) == pytest.approx(5.93, abs=5e-3)
    assert usd_per_million(64, 3000, utilization=0.5) == pytest.approx(11.85, abs=5e-3)
    assert 1e6 * Prices(input=5, output=30).request_usd(500, 200) == pytest.approx(8500)
    assert Prices(input=5, output=30).request_usd(500, 200) == pytest.approx(0.0085)
    assert break_even_requests(10_640, 0.0085) / 1e6 == pytest.approx(1.252, abs=5e-4)
    assert requests_a_month(50) == 129.6e6
    assert requests_a_month(50, utilization=0.7) == pytest.approx(90.7e6, rel=1e-3)
    assert monthly_usd(2, gpus=4, operations_usd=240) == 6000


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: usd_per_million(0, 1),
        lambda: usd_per_million(1, -1),
        lambda: usd_per_million(1, float("nan")),
        lambda: usd_per_million(1, 1, utilization=1.5),
        lambda: Prices(input=-1, output=1),
        lambda: Efficiency(bandwidth=0),
    ],
)
def test_numbers_that_are_none_are_refused(wrong):
    with pytest.raises(ConfigError):
        wrong()


def test_a_plan_in_one_call():
    plan = kvq.plan("llama-3-70b", gpu="h100", kv="int4", context=8192, weights="int4")
    assert plan.users.paged > 10
    assert plan.pool_bytes + sum(term.nbytes for term in plan.terms[:-1]) == find_gpu("h100").memory_bytes
    assert plan.weights_bytes / 1e9 == pytest.approx(40, abs=1)
    wide = kvq.plan("llama-3-70b", gpu="h100", kv="fp16", context=8192, weights="int4")
    assert wide.users.paged < plan.users.paged / 3
    assert wide.serving.tokens_per_s < plan.serving.tokens_per_s


def test_a_folder_will_do(tmp_path):
    config = {"model_type": "llama", "intermediate_size": 11008, "hidden_size": 4096}
    (tmp_path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    plan = kvq.plan(tmp_path, gpu="a10", lengths=[Length(900, 100), Length(90, 10)])
    assert plan.weights_bytes == 2 * 6_738_415_616
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match="must hold an object"):
        kvq.plan(tmp_path, gpu="a10", context=10)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "give either context or lengths"),
        ({"context": 10, "lengths": [Length(1, 1)]}, "give either"),
        ({"context": 100_000}, "above the model's context of 8,192"),
        ({"lengths": [Length(9000, 1)]}, "a request of 9,001 tokens is above the model's context of 8,192"),
        ({"context": 100, "output": 100}, "is none"),
        ({"context": 100, "kv": "int7"}, "int7"),
    ],
)
def test_what_cannot_be_planned_says_why(options, message):
    with pytest.raises(ConfigError, match=message):
        kvq.plan("llama-3-8b", gpu="h100", **options)


def test_planning_needs_no_tensors():
    code = "import sys, kvq; kvq.plan('llama-3-8b', gpu='h100', context=100); print('torch' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "False\n"


def test_the_text_part_of_a_model_that_sees_is_planned(tmp_path):
    text = {"model_type": "llama4_text", "num_hidden_layers": 4, "layer_types": ["chunked_attention"] * 4}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama4", "text_config": text}))
    plan = kvq.plan(tmp_path, gpu="h100", context=100_000)
    one = kvq.plan(tmp_path, gpu="h100", context=8192 + 2048)
    assert plan.users.bytes_per_request == pytest.approx(one.users.bytes_per_request, rel=0.01)


def test_a_rate_by_littles_law():
    plan = kvq.plan("llama-3-8b", gpu="h100", kv="int4", context=2048, output=256)
    most = plan.serving.requests_per_s
    found = at_rate(plan.serve, most / 2, most=plan.users.paged)
    seconds = found.itl_s * 256  # of each, from its first token on, prompts of others included
    assert found.users == pytest.approx(most / 2 * seconds, abs=1)
    assert found.users < plan.users.paged / 2
    assert at_rate(plan.serve, 1.01 * most, most=plan.users.paged) is None
    assert at_rate(plan.serve, 1e-9, most=plan.users.paged).users == 1
    with pytest.raises(ConfigError):
        at_rate(plan.serve, 0, most=5)
    shared = kvq.plan("llama-3-8b", gpu="h100", kv="int4", context=2048, output=256, prefix_share=0.5)
    faster = 0.99 * shared.serving.requests_per_s
    assert faster > most
    assert at_rate(shared.serve, faster, most=shared.users.paged) is not None


def test_a_recipe_is_planned_as_it_is_served(tmp_path):
    path = tmp_path / "kvq.json"
    geometry = make_target("llama-3-8b", weights="fp16").geometry
    KVRecipe.uniform("k8v4", geometry.head_dims, whole_blocks=True).save(path)
    recipe, named = (kvq.plan("llama-3-8b", gpu="h100", kv=kv, context=4096) for kv in (str(path), "k8v4"))
    assert recipe.users == named.users
    assert recipe.num_blocks == named.num_blocks


def test_slots_of_others_and_seats():
    def users(slot_tokens=2048, sequences=None):
        target = make_target("gemma-3-27b", weights="fp16")
        demand = Demand(lengths=[Length(1792, 256)], slot_tokens=slot_tokens)
        engine = Engine(sequences=sequences, max_context=2048)
        return make_plan(target, find_gpu("h100"), "fp16", demand, engine=engine).users

    wide = users(slot_tokens=131_072)
    assert wide.paged == users().paged > 10
    assert wide.contiguous < users().contiguous
    assert users(sequences=8).paged == 8


def test_a_pipeline_computes_one_prompt_stage_by_stage():
    one, four = (
        kvq.plan("llama-3-8b", gpu="h100", context=4096, output=64, split=Split(pipeline=n)) for n in (1, 4)
    )
    assert four.serving.ttft_s == pytest.approx(one.serving.ttft_s, rel=0.15)
    kept = [next(t.nbytes for t in plan.terms if "embedding" in t.name) for plan in (one, four)]
    assert kept[0] == kept[1]


def test_a_shared_prefix_is_computed_once():
    plans = [kvq.plan("llama-3-8b", gpu="h100", context=8192, prefix_share=share) for share in (0.0, 0.5)]
    assert plans[1].serving.ttft_s < 0.7 * plans[0].serving.ttft_s
    assert plans[1].users.paged > plans[0].users.paged


@pytest.mark.parametrize(
    ("gpu", "advice"), [("l40s", "--tensor-parallel 4"), ("h100", "--tensor-parallel 2")]
)
def test_what_does_not_fit_is_told_what_would(gpu, advice):
    with pytest.raises(ConfigError, match="GB too much") as error:
        kvq.plan("llama-3-70b", gpu=gpu, context=4096)
    assert advice in str(error.value)
    ranks = int(advice.split()[1])
    assert kvq.plan("llama-3-70b", gpu=gpu, context=4096, split=Split(tensor=ranks)).users.paged > 0


def test_advice_that_would_not_help_is_not_given():
    with pytest.raises(ConfigError) as error:
        kvq.plan("llama-3-8b", gpu="l4", context=4096, engine=Engine(step_tokens=1 << 26))
    assert "--tensor-parallel" not in str(error.value)


@pytest.mark.parametrize("kv", ["int4_mean", "int3+sinks=4+recent=128"])
def test_a_staging_area_is_planned_for_as_many_as_fit(kv):
    def users(sequences):
        engine = Engine(sequences=sequences)
        return kvq.plan("llama-3.1-8b", gpu="h100", kv=kv, context=8192, engine=engine).users.paged

    most = users(None)
    assert most > 3 * kvq.plan("llama-3.1-8b", gpu="h100", kv="bf16", context=8192).users.paged
    assert users(most) == most >= max(users(count) for count in (64, 150, 200, 256, 400))
