"""Blocks that leave the pools and come back: the same tokens, sooner, and nothing leaks."""

import random
import time
from pathlib import Path
from typing import Any

import pytest

from kvq.engine import LLM, SamplingParams
from kvq.engine.config import EngineConfig
from kvq.engine.tiering import _size_of, rungs_of
from kvq.errors import ConfigError
from kvq.tiers.segment import HEADER_BYTES, SUFFIX
from tests.engine.kit import BLOCK, assert_balanced, drive, engine, mixed_prompts, pair, submit, tokens_of
from tests.engine.test_pressure import check_limits, check_random_life
from tests.helpers_hybrids import QUICK, hybrid
from tests.helpers_models import random_tokens

GREEDY = SamplingParams(max_tokens=6, ignore_eos=True)
MIB = 1 << 20
FORMATS = ["auto", "int8", "fp8", "int4", "int4_mean", "int3_mean+sinks=4+recent=16"]


def prompts(count: int = 10, length: int = 70) -> list[list[int]]:
    """More than the pool of these tests holds."""
    return [random_tokens(length, seed=500 + i) for i in range(count)]


def pressed(model: Any, kv: str = "auto", **options: Any) -> LLM:
    return engine(model, kv, num_blocks=14, max_num_seqs=4, **options)


def two_rounds(llm: LLM) -> tuple[list[list[int]], list[Any]]:
    """Each prompt alone, twice; the receipts of the second round."""
    first = [tokens_of(llm.generate([prompt], GREEDY))[0] for prompt in prompts()]
    second = [llm.generate([prompt], GREEDY)[0] for prompt in prompts()]
    assert tokens_of(second) == first
    assert_balanced(llm)
    return first, [output.receipt for output in second]


@pytest.mark.parametrize("kv", FORMATS)
def test_prompts_come_back_from_host_memory_with_the_same_tokens(kv: str) -> None:
    model = pair("llama")[0]
    plain, receipts = two_rounds(pressed(model, kv))
    assert sum(receipt.cached_tokens for receipt in receipts) < 5 * BLOCK * len(receipts) / 4
    llm = pressed(model, kv, kv_host=MIB)
    kept, receipts = two_rounds(llm)
    assert kept == plain
    lag = 16 if "recent" in kv or kv.startswith("int4") else 0
    whole = (70 - 1 - lag) // BLOCK * BLOCK
    assert all(receipt.cached_tokens >= whole - BLOCK for receipt in receipts)
    assert sum(receipt.host_tokens for receipt in receipts) >= (whole - BLOCK) * (len(receipts) - 2)
    assert not any(receipt.disk_tokens for receipt in receipts)


@pytest.mark.parametrize("family", ["gemma3_text", "gpt_oss", *QUICK])
def test_windows_and_states_come_back(family: str) -> None:
    model = hybrid(family)[0] if family in QUICK else pair(family)[0]
    options = {"snapshot_every": BLOCK} if family in QUICK else {}
    plain, _ = two_rounds(engine(model, num_blocks=256, max_num_seqs=4, **options))
    llm = engine(model, num_blocks=16, max_num_seqs=4, kv_host=64 * MIB, **options)
    kept, receipts = two_rounds(llm)
    assert kept == plain
    assert sum(receipt.host_tokens for receipt in receipts) > 0
    assert llm.core.scheduler.loading.num_failed == 0


@pytest.mark.parametrize("options", [{}, {"kv_host": "256KiB"}, {"key": True}])
def test_prompts_come_back_after_a_restart(tmp_path: Path, options: dict[str, Any]) -> None:
    model = pair("llama")[0]
    given: dict[str, Any] = {"kv_disk": 16 * MIB, "kv_dir": tmp_path / "kv"}
    if options.pop("key", False):
        given["kv_key_file"] = tmp_path / "key"
        given["kv_key_file"].write_text("0123456789abcdef" * 2)
        given["kv_key_file"].chmod(0o600)
    plain, _ = two_rounds(pressed(model))
    llm = pressed(model, **given, **options)
    assert two_rounds(llm)[0] == plain
    llm.close()
    again = pressed(model, **given, **options)
    outputs = [again.generate([prompt], GREEDY)[0] for prompt in prompts()]
    assert tokens_of(outputs) == plain
    assert [output.receipt.disk_tokens for output in outputs] == [64] * len(outputs)
    assert_balanced(again)


def test_a_killed_engine_leaves_what_it_had_saved(tmp_path: Path) -> None:
    model = pair("llama")[0]
    llm = pressed(model, kv_disk=16 * MIB, kv_dir=tmp_path)
    llm.generate(prompts()[:2], GREEDY)
    while llm.core.upkeep.when_idle():  # what an idle server does
        pass
    disk = llm.core.scheduler.manager.blocks.tiers.disk
    disk._writer.submit(lambda: None).result(10)
    again = pressed(model, kv_disk=16 * MIB, kv_dir=tmp_path)  # the first one is still open
    receipts = [output.receipt for output in again.generate(prompts()[:2], GREEDY)]
    assert [receipt.disk_tokens for receipt in receipts] == [64, 64]


def test_other_models_recipes_tenants_and_salts_find_nothing(tmp_path: Path) -> None:
    given = {"kv_disk": 16 * MIB, "kv_dir": tmp_path, "num_blocks": 64}
    prompt = prompts()[0]
    llm = engine(pair("llama")[0], **given)
    llm.generate([prompt], GREEDY, tenant="a")
    llm.close()
    others = [
        (engine(pair("llama", seed=1)[0], **given), "a", None),
        (engine(pair("llama")[0], "int8", **given), "a", None),
        (engine(pair("llama")[0], **given), "b", None),
        (engine(pair("llama")[0], **given), "a", "salt"),
    ]
    for other, tenant, salt in others:
        found = other.generate([prompt], GREEDY, tenant=tenant, cache_salt=salt)[0].receipt
        assert (found.cached_tokens, found.disk_tokens) == (0, 0)
    same = engine(pair("llama")[0], **given)
    assert same.generate([prompt], GREEDY, tenant="a")[0].receipt.disk_tokens == 64


def test_damaged_files_are_computed_again(tmp_path: Path) -> None:
    model, rng = pair("llama")[0], random.Random(4)
    given = {"kv_disk": 16 * MIB, "kv_dir": tmp_path}
    llm = pressed(model, **given)
    plain = tokens_of(llm.generate(prompts(), GREEDY))
    llm.close()
    for path in tmp_path.glob("*" + SUFFIX):
        whole = bytearray(path.read_bytes())
        for _ in range(12):
            whole[rng.randrange(HEADER_BYTES, len(whole))] ^= 1 << rng.randrange(8)
        path.write_bytes(whole)
    again = pressed(model, **given)
    outputs = again.generate(prompts(), GREEDY)
    assert tokens_of(outputs) == plain
    assert again.core.scheduler.manager.blocks.tiers.disk.counts.damaged > 0
    assert_balanced(again)


def test_a_disk_that_does_not_answer_holds_nobody_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvq.scheduler.loading._MOST_SECONDS", 0.2)
    model = pair("llama")[0]
    given = {"kv_disk": 16 * MIB, "kv_dir": tmp_path}
    llm = pressed(model, **given)
    plain = tokens_of(llm.generate(prompts()[:2], GREEDY))
    llm.close()
    again = pressed(model, **given)
    disk = again.core.scheduler.manager.blocks.tiers.disk
    disk._reader.submit(time.sleep, 3.0)
    first, second = (submit(again, prompt, GREEDY) for prompt in (prompts()[0], prompts()[3]))
    drive(again, [first, second], most_steps=1 << 20)
    assert first[1].output.outputs[0].token_ids == plain[0]
    assert first[1].output.receipt.disk_tokens == 0
    assert again.core.scheduler.loading.num_failed >= 1
    assert_balanced(again)


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_a_preempted_request_gets_its_blocks_back_instead_of_computing_them(family: str) -> None:
    model = pair(family)[0]
    long = SamplingParams(max_tokens=60, ignore_eos=True)
    wanted = tokens_of(engine(model, num_blocks=256).generate(prompts(4), long))
    recomputed, restored = [], []
    for options in ({}, {"kv_host": 4 * MIB}):
        llm = engine(model, num_blocks=22, **options)
        outputs = llm.generate(prompts(4), long)
        assert tokens_of(outputs) == wanted
        assert llm.core.scheduler.counters.preemptions > 0
        assert_balanced(llm)
        recomputed.append(sum(output.receipt.recomputed_tokens for output in outputs))
        restored.append(sum(output.receipt.restored_tokens for output in outputs))
    assert recomputed[1] < recomputed[0] / 3
    assert restored[1] > restored[0] == 0


def test_a_cancelled_request_leaves_its_load_to_others() -> None:
    llm = pressed(pair("llama")[0], kv_host=MIB)
    plain = tokens_of([llm.generate([prompt], GREEDY)[0] for prompt in prompts()])
    llm.core.scheduler.loading._costs._move_block_s = 10.0  # two blocks a step
    runs = submit(llm, prompts()[5], SamplingParams(max_tokens=40, ignore_eos=True))
    llm.step()
    first, second = (submit(llm, prompts()[0], GREEDY) for _ in range(2))
    llm.step()
    assert len(llm.core.scheduler.loading) == 1
    llm.core.cancel(first[0])
    drive(llm, [runs, second])
    assert second[1].output.outputs[0].token_ids == plain[0]
    assert_balanced(llm)


@pytest.mark.parametrize("options", [{}, {"async_scheduling": True}, {"kv": "int4"}])
def test_500_requests_of_all_kinds_with_tiers_leak_nothing(tmp_path: Path, options: dict[str, Any]) -> None:
    model = pair("llama")[0].with_kv(options.pop("kv", "fp32"))
    check_random_life(model, 500, seed=17, kv_host="256KiB", kv_disk=32 * MIB, kv_dir=tmp_path, **options)


def test_whatever_is_accepted_finishes_with_tiers() -> None:
    for seed in range(30, 42):
        check_limits(seed, kv_host="64KiB", prefix_caching=True)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kv_disk": "1GiB"}, "kv_dir"),
        ({"kv_dir": "x"}, "kv_disk"),
        ({"kv_host": "1GiB", "prefix_caching": False}, "prefix_caching"),
        ({"kv_host": "much"}, "size such as"),
        ({"kv_host": "1GiB", "kv_key_file": "x"}, "kv_key_file"),
        ({"kv_host": "1GiB", "kv_max_age_s": 0}, "above 0 seconds"),
        ({"kv_host": "1GiB", "kv_tenant_share": 2}, "at most 1"),
        ({"kv_tenant_share": 0.5}, r"kv_tenant_share .* give one of these"),
        ({"kv_max_age_s": 5.0}, r"kv_max_age_s .* give one of these"),
        ({"hand_over_prefilled": True}, "hand_over_to"),
    ],
)
def test_options_that_cannot_work_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        engine(pair("llama")[0], **options)


def test_mixed_prompts_in_batches_have_the_tokens_of_a_large_pool() -> None:
    model = pair("llama")[0]
    some = mixed_prompts(24, seed=11)
    wanted = tokens_of(engine(model).generate(some, GREEDY))
    llm = engine(model, num_blocks=20, kv_host=MIB)
    for _ in range(3):
        assert tokens_of(llm.generate(some, GREEDY)) == wanted
    assert_balanced(llm)


def test_a_miss_says_that_a_prefix_became_too_old() -> None:
    llm, now = pressed(pair("llama")[0], kv_host=MIB, kv_max_age_s=10.0), [0.0]
    tiers = llm.core.scheduler.manager.blocks.tiers
    tiers._clock = lambda: now[0]
    for prompt in prompts():
        llm.generate([prompt], GREEDY)
    now[0] = 20.0
    tiers.expire()
    miss = llm.generate([prompts()[5]], GREEDY)[0].receipt.miss  # causes of the last ones are remembered
    assert (miss.cause, miss.token) == ("too_old", 0)


def test_a_load_is_given_up_if_a_step_breaks_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """The orders to fill its blocks may be lost with the step."""
    model, prompt = pair("llama")[0].with_kv("fp32"), random_tokens(150, seed=1)
    wanted = tokens_of(engine(model).generate([prompt], GREEDY))
    llm = engine(model, num_blocks=40, kv_host="8MiB")
    for tokens in (prompt, *(random_tokens(149, seed=900 + i) for i in range(5))):
        llm.generate([tokens], GREEDY)
    submit(llm, random_tokens(100, seed=77), SamplingParams(max_tokens=60, ignore_eos=True))
    llm.step()
    llm.step()
    submit(llm, prompt, GREEDY)
    llm.step()
    assert llm.core.scheduler.loading
    with monkeypatch.context() as broken:
        broken.setattr(llm.core.runner.cache, "carry_out", lambda orders: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            llm.step()
    assert not llm.core.scheduler.loading
    assert_balanced(llm)
    again = llm.generate([prompt], GREEDY)
    assert tokens_of(again) == wanted
    assert again[0].receipt.host_tokens == again[0].receipt.cached_tokens > 0


def test_an_idle_engine_drops_what_became_too_old() -> None:
    llm, now = pressed(pair("llama")[0], kv_host=MIB, kv_max_age_s=10.0), [0.0]
    tiers = llm.core.scheduler.manager.blocks.tiers
    tiers._clock = lambda: now[0]
    assert llm.core.upkeep.wait_s() is None
    llm.generate(prompts(), GREEDY)
    assert len(tiers) > 0
    assert llm.core.upkeep.wait_s() == 1.0
    now[0] = 11.0
    llm.core.upkeep.when_idle()
    assert len(tiers) == 0
    assert llm.core.upkeep.wait_s() is None


def test_old_blocks_on_disk_are_a_miss_that_says_so(tmp_path: Path) -> None:
    llm, ahead = pressed(pair("llama")[0], kv_disk=16 * MIB, kv_dir=tmp_path, kv_max_age_s=100.0), [0.0]
    disk = llm.core.scheduler.manager.blocks.tiers.disk
    disk._clock = disk._folder.clock = lambda: time.time() + ahead[0]
    for prompt in prompts():
        llm.generate([prompt], GREEDY)
    disk.refresh()
    assert llm.generate([prompts()[5]], GREEDY)[0].receipt.disk_tokens
    ahead[0] = 110.0
    disk.refresh()
    assert not list(tmp_path.glob("*" + SUFFIX))
    receipt = llm.generate([prompts()[4]], GREEDY)[0].receipt
    assert (receipt.disk_tokens, receipt.miss.cause) == (0, "too_old")


def test_blocks_of_groups_and_rungs_that_there_are_not_have_no_size() -> None:
    rungs = rungs_of(EngineConfig(kv_ladder="int4"), model := pair("llama")[0].with_kv("int8+recent=16"))
    sizes = [_size_of(model.layout, rungs, group, rung) for group in range(3) for rung in range(3)]
    assert len(model.layout.groups) == 2
    assert len(rungs[1].groups) == 1
    assert [size > 0 for size in sizes] == [True, True, False, True, False, False, False, False, False]
    assert set(sizes[5:]) == {-1}
