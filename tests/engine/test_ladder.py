"""A ladder of formats: more prompts stay in the pool, receipts say what was read in fewer bits."""

from pathlib import Path
from typing import Any

import pytest
import torch

from kvq.cache import KVCache
from kvq.cache.cold import ColdCodec
from kvq.engine import LLM, SamplingParams
from kvq.errors import ConfigError
from kvq.layout import plan_layout
from tests.engine.kit import BLOCK, assert_balanced, drive, engine, pair, preempt, submit, tokens_of
from tests.engine.test_pressure import check_random_life
from tests.helpers_models import random_tokens

GREEDY = SamplingParams(max_tokens=4, ignore_eos=True)
WHOLE = 9 * BLOCK  # the whole blocks of a prompt


def prompts(count: int = 8) -> list[list[int]]:
    return [random_tokens(WHOLE + 5, seed=700 + i) for i in range(count)]


def small(kv: str = "int8_per_token_head", **options: Any) -> LLM:
    """An engine whose pool holds about five of the prompts."""
    return engine(pair("llama")[0], kv, num_blocks=54, max_num_seqs=2, **options)


def rounds(llm: LLM, count: int = 2) -> list[Any]:
    outputs = [llm.generate([prompt], GREEDY)[0] for _ in range(count) for prompt in prompts()]
    assert_balanced(llm)
    return outputs


@pytest.mark.parametrize("kv", ["fp32", "int8_per_token_head", "int8", "fp8", "bf16"])
def test_prompts_that_would_have_been_evicted_are_found_in_fewer_bits(kv: str) -> None:
    plain = rounds(small(kv))
    assert sum(output.receipt.cached_tokens for output in plain[8:]) < WHOLE
    llm = small(kv, kv_ladder=("int4", "int3"))
    kept = rounds(llm)
    assert tokens_of(kept)[:8] == tokens_of(plain)[:8], "what was not packed yet is read as it is"
    receipts = [output.receipt for output in kept[8:]]
    assert all(receipt.cached_tokens >= WHOLE - 3 * BLOCK for receipt in receipts)
    assert sum(receipt.cold_tokens for receipt in receipts) > 4 * WHOLE
    assert all(receipt.cold_tokens <= receipt.cached_tokens for receipt in receipts)
    assert not any(receipt.disk_tokens for receipt in receipts)
    assert llm.core.scheduler.manager.blocks.ladder.num_packed > 0


def test_packed_blocks_that_have_to_go_are_found_in_host_memory_and_on_disk(tmp_path: Path) -> None:
    llm = small(kv_ladder="int4", kv_host="64KiB", kv_disk="16MiB", kv_dir=tmp_path)
    many = [random_tokens(WHOLE + 5, seed=900 + i) for i in range(24)]
    for prompt in many:
        llm.generate([prompt], GREEDY)
    again = [llm.generate([prompt], GREEDY)[0].receipt for prompt in many]
    assert all(receipt.cached_tokens == WHOLE for receipt in again)
    assert sum(receipt.disk_tokens for receipt in again) > 5 * WHOLE
    assert sum(receipt.cold_tokens for receipt in again) > 5 * WHOLE
    llm.close()
    later = small(kv_ladder="int4", kv_disk="16MiB", kv_dir=tmp_path)
    receipts = [later.generate([prompt], GREEDY)[0].receipt for prompt in many]
    assert all(receipt.disk_tokens == WHOLE for receipt in receipts)
    assert sum(receipt.cold_tokens for receipt in receipts) > 5 * WHOLE
    other = small(kv_ladder="int3", kv_disk="16MiB", kv_dir=tmp_path)
    assert other.generate([many[0]], GREEDY)[0].receipt.cached_tokens == 0, "another ladder"


@pytest.mark.parametrize("kv", ["fp32", "int8_per_token_head", "int8"])
def test_tiers_hold_more_tokens_in_fewer_bits(kv: str, tmp_path: Path) -> None:
    """Blocks of the pool stay as they are, in host memory they take the room of the tiers' format."""
    on_disk = {"kv_disk": "16MiB", "kv_dir": tmp_path}
    llm = small(kv, kv_tier_format="int4", kv_host="512KiB", **on_disk)
    kept = rounds(llm)
    receipts = [output.receipt for output in kept[8:]]
    assert tokens_of(kept)[:8] == tokens_of(rounds(small(kv)))[:8], "the pool's format is read"
    assert all(receipt.cached_tokens == WHOLE for receipt in receipts)
    assert sum(receipt.cold_tokens for receipt in receipts) > 4 * WHOLE
    assert all(receipt.cold_tokens <= receipt.host_tokens for receipt in receipts)
    blocks = llm.core.scheduler.manager.blocks
    assert not blocks.ladder.has_rungs
    sizes = {memoryview(held.content).nbytes for key, held in blocks.tiers._host.items() if key.group == 0}
    assert sizes == {llm.core.runner.cache.codec.block_bytes(1, 0)}
    assert max(sizes) < 0.7 * llm.core.model.layout.groups[0].block_bytes
    llm.close()
    later = small(kv, kv_tier_format="int4", **on_disk)
    receipts = [later.generate([prompt], GREEDY)[0].receipt for prompt in prompts()]
    assert all(receipt.disk_tokens == receipt.cold_tokens == WHOLE for receipt in receipts)
    own = small(kv, **on_disk)
    assert own.generate([prompts()[0]], GREEDY)[0].receipt.cached_tokens == 0, "another format of tiers"


def test_a_ladder_and_a_format_of_tiers_go_together() -> None:
    for ladder, below in (("int5", "int4"), ("int5,int4", "int5"), ("int4", "int5")):
        llm = small(kv_ladder=ladder, kv_tier_format=below, kv_host="256KiB")
        rounds(llm, 3)
        rungs = {held.form.rung for held in llm.core.scheduler.manager.blocks.tiers._host.values()}
        assert rungs <= {0, 1, 2}
        assert llm.core.scheduler.manager.blocks.ladder.num_packed
        llm.close()


def test_the_limit_of_quality_holds() -> None:
    llm = small(kv_ladder="int4", kv_cold_share=0.5)
    receipts = [output.receipt for output in rounds(llm, 3)[8:]]
    assert 0 < max(receipt.cold_tokens for receipt in receipts) <= 0.5 * (WHOLE + 5)
    none = small(kv_ladder="int4", kv_cold_share=0.0)
    assert not any(output.receipt.cold_tokens for output in rounds(none))


def test_the_limit_of_quality_holds_for_prompts_that_find_what_others_restored() -> None:
    llm = small(kv_ladder="int4", kv_cold_share=0.5)
    prompt = random_tokens(240, seed=3)
    plain = tokens_of(engine(pair("llama")[0], "int8_per_token_head").generate([prompt], GREEDY))
    llm.generate([prompt], GREEDY)
    for i in range(5):
        llm.generate([random_tokens(149, seed=900 + i)], GREEDY)
    for length in (245, 205, 155, 105, 69):
        output = llm.generate([prompt[: length - 5] + random_tokens(5, seed=4)], GREEDY)[0]
        assert 0 < output.receipt.cold_tokens <= 0.5 * length
        assert output.receipt.cold_tokens <= output.receipt.cached_tokens
    assert llm.core.scheduler.counters.misses["format"] > 0
    llm.core.scheduler.manager.blocks.cold_share = 0.0
    assert tokens_of(llm.generate([prompt], GREEDY)) == plain, "all of it was computed again"
    llm.core.scheduler.manager.blocks.cold_share = 1.0
    again = llm.generate([prompt], GREEDY)
    assert tokens_of(again) == plain, "which replaced what had lost bits"
    assert again[0].receipt.cold_tokens == 0


def test_receipts_tell_that_a_preempted_request_read_its_own_kv_in_fewer_bits() -> None:
    llm = engine(pair("llama")[0], "int8", num_blocks=64, kv_host="8MiB", kv_tier_format="int4")
    job, found = submit(llm, random_tokens(100, seed=3), SamplingParams(max_tokens=60, ignore_eos=True))
    for _ in range(30):
        llm.step()
    preempt(llm, job, to_host=True)
    drive(llm, [job])
    receipt = found.output.receipt
    assert receipt.cold_tokens == receipt.restored_tokens > 100 - 2 * BLOCK


def test_nothing_is_rewritten_if_computing_takes_less_time() -> None:
    llm = small(kv_ladder="int4")
    llm.core.scheduler.loading._costs._move_block_s = 10.0
    rounds(llm)
    assert llm.core.scheduler.manager.blocks.ladder.num_packed == 0


@pytest.mark.daily(4)
@pytest.mark.parametrize(
    "options",
    [
        {"kv_ladder": ("int4", "int3")},
        {"kv_ladder": ("int4", "int3"), "kv_host": "256KiB"},
        {"kv_ladder": "int4", "kv_host": "256KiB", "kv_tier_format": "int3"},
        {"kv_host": "256KiB", "kv_tier_format": "int4"},
        {"kv_ladder": ("int4", "int3"), "async_scheduling": True},
    ],
)
@pytest.mark.parametrize("kv", ["int8_per_token_head", "int8"])
def test_500_requests_of_all_kinds_in_fewer_bits_leak_nothing(kv: str, options: dict[str, Any]) -> None:
    model = pair("llama")[0].with_kv(kv)
    check_random_life(model, 500, seed=23, **options)


def test_sliding_windows_have_no_rungs_and_still_come_back() -> None:
    model = pair("gemma3_text")[0]
    llm = engine(model, "int8_per_token_head", num_blocks=24, max_num_seqs=2, kv_ladder="int4")
    some = [random_tokens(70, seed=800 + i) for i in range(8)]
    for prompt in some:
        llm.generate([prompt], GREEDY)
    receipts = [llm.generate([prompt], GREEDY)[0].receipt for prompt in some]
    assert sum(receipt.cached_tokens for receipt in receipts) >= 4 * 64
    assert_balanced(llm)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kv_ladder": "int8"}, "ever smaller"),
        ({"kv_ladder": "int4,int5"}, "ever smaller"),
        ({"kv_ladder": "int99"}, "int99"),
        ({"kv_ladder": "int4,int4"}, "int4 is named twice"),
        ({"kv_ladder": 5}, "must name formats of fewer bits, such as 'int4,int3', got 5"),
        ({"kv_ladder": (4,)}, "must name formats"),
        ({"kv_ladder": ","}, "must name formats"),
        ({"kv_ladder": "int4", "prefix_caching": False}, "prefix_caching"),
        ({"kv_ladder": "int4", "kv_cold_share": 1.5}, "kv_cold_share"),
        ({"kv_tier_format": "int4"}, "kv_host"),
        ({"kv_tier_format": "int8", "kv_host": "1MiB"}, "ever smaller"),
        ({"kv_tier_format": "int99", "kv_host": "1MiB"}, "int99"),
    ],
)
def test_ladders_that_cannot_work_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        small(**options)


@pytest.mark.parametrize("kv", ["int8", "fp32", "int8_per_token_head"])
@pytest.mark.parametrize("rung", ["int4", "int3", "int4_g8_rot"])
def test_a_packed_block_holds_what_its_format_keeps(kv: str, rung: str) -> None:
    model = pair("llama")[0].with_kv(kv)
    layout = model.layout
    cache = KVCache(layout, num_blocks=[12] * len(layout.groups), device=torch.device("cpu"))
    plans = [
        plan_layout(model.geometry, recipe, block_size=BLOCK, staging=False)
        for recipe in (model.recipe, model.prepared.recipe(rung))
    ]
    codec = ColdCodec(cache, plans[0], plans[1:])
    cache.pool(0).fill_(255)  # poison
    heads, dim = layout.groups[0].layers[0].geometry.kv_heads, layout.groups[0].layers[0].geometry.k_head_dim
    torch.manual_seed(0)
    rows = {index: (torch.randn(5, heads, BLOCK, dim),) * 2 for index in cache.stores}
    codec._write(0, 0, [7, 2, 9, 4, 11], rows)
    packed = codec.encode(0, [7, 2, 9, 4, 11], 1)
    assert {len(one) for one in packed} == {codec.block_bytes(1, 0)}
    codec.decode(0, packed, 1, [1, 3, 5, 6, 8])
    limit = {"int4": 0.2, "int4_g8_rot": 0.2, "int3": 0.4}[rung]
    for index, read in codec._rows(0, 0, [1, 3, 5, 6, 8]).items():
        for got, wanted in zip(read, rows[index], strict=True):
            assert (got.float() - wanted).norm() < limit * wanted.norm()
    codec.decode(0, codec.encode(0, [1, 3, 5, 6, 8], 1), 1, [1, 3, 5, 6, 8])
    for index, read in codec._rows(0, 0, [1, 3, 5, 6, 8]).items():
        assert (read[0].float() - rows[index][0]).norm() < 1.2 * limit * rows[index][0].norm(), "no drift"
