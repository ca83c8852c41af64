"""What was planned against what runs: each term of the weights, the pools, the process, users that fit."""

import json
import logging
import subprocess
import sys

import pytest

import kvq
from kvq.capacity.plan.gpus import Gpu
from kvq.capacity.plan.memory import Engine
from kvq.capacity.plan.plan import CapacityPlan
from kvq.engine import SamplingParams
from kvq.engine.steps.reconcile import _Line, _Reconciliation

CONTEXT, OUTPUT = 160, 64  # tokens

_PROCESS = """
import gc, json, sys
import kvq
sizes = (8, 16, 64)
for i, kv in enumerate(sys.argv[2:]):
    block_size = sizes[i % 3]
    gc.collect()  # or what an engine before left in cycles may go in the middle of the next one's start
    with kvq.LLM(sys.argv[1], kv, num_blocks=80_000 // block_size, block_size=block_size) as llm:
        lines = [*llm.core.memory.lines, llm.core.memory.whole]
        print(json.dumps([kv, block_size, [[x.name, x.planned, x.found] for x in lines]]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    "kinds",
    [
        ("fp32", "k8v4", "int4"),
        pytest.param(("fp32", "bf16", "fp8", "int8", "k8v4", "int4", "int2"), marks=pytest.mark.long),
    ],
    ids=["three", "all"],
)
def test_memory_is_what_was_planned(kinds):
    command = [sys.executable, "-c", _PROCESS, "tiny", *kinds]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    rows = [json.loads(line) for line in ran.stdout.splitlines()]
    assert len(rows) == len(kinds)
    for kv, block_size, lines in rows:
        case = f"{kv}, blocks of {block_size}"
        *terms, (_, planned, found) = lines
        assert [name for name, *_ in terms] == ["linear weights", "embeddings, head, norms", "KV pool"], case
        for name, wanted, there in terms:
            assert wanted == there > 1_000_000, f"{case}: {name}"
        assert abs(found - planned) < 0.03 * planned, f"{case}: {found / planned - 1:+.2%}"
        assert found > sum(there for _, _, there in terms), case


def planned(model: kvq.Model, kv: str, block_size: int, users: int) -> CapacityPlan:
    """A plan for a machine that has memory for so many users and a little more."""
    own = model.with_kv(kv).layout
    engine = Engine(
        block_size=block_size, step_tokens=8192, sequences=64, runtime_bytes=0, memory_fraction=1.0
    )
    each = sum(group.block_bytes for group in own.groups) * (CONTEXT / own.block_size + 1)

    def plan(memory_gb: float) -> CapacityPlan:
        gpu = Gpu(name="host", memory_gb=memory_gb, bandwidth_tb_s=1, usd_per_hour=1, tflops={"fp16": 1})
        folder = model.prepared.folder
        return kvq.plan(folder, gpu=gpu, kv=kv, context=CONTEXT, output=OUTPUT, weights="fp32", engine=engine)

    large = plan(100.0)
    other = sum(term.nbytes for term in large.terms if term.name not in ("KV pool", "left free"))
    return plan((other + users * each) / 1e9)


@pytest.mark.daily(1)
@pytest.mark.parametrize(
    ("kv", "block_size"),
    [
        ("int8_per_token_head/int4_g32", 8),
        ("bf16", 32),
        *(
            pytest.param(*x, marks=pytest.mark.long)
            for x in (("fp32", 8), ("int2_g32", 8), ("fp8_per_token_head", 32), ("int4_g32", 32))
        ),
    ],
)
def test_as_many_users_as_planned_run_without_preemption_and_more_do_not(kv: str, block_size: int):
    model = kvq.load("tiny", kv, block_size=block_size)
    plan = planned(model, kv, block_size, users=24)
    fits = plan.users.paged
    assert 20 <= fits <= 30
    with kvq.LLM(model, num_blocks=plan.num_blocks[0], max_num_seqs=64, max_num_batched_tokens=8192) as llm:
        assert llm.core.memory.lines[-1] == _Line("KV pool", plan.pool_bytes, plan.pool_bytes)
        counters = llm.core.scheduler.counters
        peak = [0]
        llm.on_step(lambda stats: peak.append(max(peak[-1], stats.running)))

        def preempted(users: int) -> int:
            before = counters.preemptions
            prompts = [[1 + (7 * user + i) % 500 for i in range(CONTEXT - OUTPUT)] for user in range(users)]
            params = SamplingParams(max_tokens=OUTPUT, ignore_eos=True, temperature=0)
            assert all(output.error is None for output in llm.generate(prompts, params))
            llm.core.scheduler.manager.drop_cached()
            return counters.preemptions - before

        assert preempted(fits) == 0
        assert peak[-1] == fits
        assert preempted(-(-fits * 21 // 20)) > 0


def test_what_is_off_is_a_warning_however_small_a_part_it_is(caplog: pytest.LogCaptureFixture):
    whole = _Line("in all", 1_000_000_000, 1_004_000_000)
    pool = _Line("KV pool", 900_000_000, 900_000_000)
    small = _Line("weight scales", 1000, 3000)
    right = _Reconciliation((_Line("linear weights", 8_000_000, 8_070_000), small, pool), whole)
    wrong = _Reconciliation((_Line("linear weights", 8_000_000, 12_000_000), small, pool), whole)
    missing = _Reconciliation((_Line("expert weights", 0, 2_000_000), pool), whole)
    with caplog.at_level(logging.INFO, logger="kvq"):
        right.report()
        assert [record.levelname for record in caplog.records] == ["INFO"]
        for one in (wrong, missing):
            one.report()
    assert [record.levelname for record in caplog.records[1:]] == ["WARNING", "WARNING"]
    assert "more than 1% off the plan: linear weights" in caplog.messages[1]
    assert "more than 1% off the plan: expert weights" in caplog.messages[2]
