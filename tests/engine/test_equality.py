"""The same tokens, whatever the batch, the chunks, the pool and the preemptions."""

import random
from functools import cache

import pytest
import torch
from transformers import AutoModelForCausalLM

from kvq.engine import LLM, SamplingParams
from tests.engine.kit import (
    assert_balanced,
    count_near_ties,
    damage_host,
    drive,
    engine,
    first_difference,
    gap_of,
    mixed_prompts,
    pair,
    preempt,
    reference_tokens,
    submit,
    tokens_of,
)

NEW = 8  # tokens per result
FAMILIES = ["llama", "gemma3_text", "gpt_oss", "mixtral", "qwen3"]
GREEDY = SamplingParams(max_tokens=NEW)
BATCHINGS = [(1, 2048), (3, 16), (16, 16), (16, 37), (16, 2048)]  # sequences, tokens of a step
QUANTIZED_GAP = 0.02  # nats; sums in another order may flip a code, and a tie this close

TEXTS = [
    "Once upon a time",
    "The war of the",
    "In 1914 , the river",
    "naïve café 漢字",
    "She said that she would never again",
    " = = History = = \n The town was founded by settlers who came from the north , and its name",
    "a",
]


@cache
def expected(family: str) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts, and what transformers' own `generate` adds to them."""
    prompts = mixed_prompts(100 if family == "llama" else 20, seed=7)
    return prompts, [reference_tokens(pair(family)[1], prompt, NEW) for prompt in prompts]


def check_against_reference(family: str, llm: LLM, *, runs: int = 1, count: int = 100) -> None:
    """The first `count` prompts; a second run finds the prefixes of the first."""
    prompts, wanted = (items[:count] for items in expected(family))
    for _ in range(runs):
        got = tokens_of(llm.generate(prompts, GREEDY))
        assert count_near_ties(pair(family)[1], prompts, wanted, got) <= 1
    assert_balanced(llm)


@pytest.mark.parametrize(("seqs", "chunk"), BATCHINGS)
def test_greedy_tokens_are_those_of_generate_in_any_batch_and_any_chunks(seqs, chunk):
    llm = engine(pair("llama")[0], max_num_seqs=seqs, max_num_batched_tokens=chunk, num_blocks=1000)
    check_against_reference("llama", llm, runs=1 if seqs == 1 else 2)
    assert seqs == 1 or llm.core.scheduler.counters.cached_tokens > 2000, "the second run found prefixes"


@pytest.mark.daily(4)
@pytest.mark.parametrize("family", FAMILIES[1:])
@pytest.mark.parametrize(("seqs", "chunk"), [(3, 64), (16, 23)])
def test_every_family_gives_the_tokens_of_generate_in_any_batch(family, seqs, chunk):
    llm = engine(pair(family)[0], max_num_seqs=seqs, max_num_batched_tokens=chunk, num_blocks=500)
    check_against_reference(family, llm, runs=2 if seqs == 16 else 1, count=20 if seqs == 16 else 8)


@pytest.mark.parametrize(("num_blocks", "caching"), [(8, True), (11, False), (20, True)])
def test_a_pool_too_small_for_the_batch_preempts_and_changes_no_token(num_blocks, caching):
    llm = engine(pair("llama")[0], num_blocks=num_blocks, max_context=112, prefix_caching=caching)
    check_against_reference("llama", llm, runs=2, count=30)
    assert llm.core.scheduler.counters.preemptions > 0, "the pool was not small enough"


@pytest.mark.parametrize(
    ("family", "options"),
    [
        *((family, {}) for family in FAMILIES),
        *((family, {"kv_host": "4MiB"}) for family in FAMILIES),
        *((family, {"prefix_caching": False}) for family in ("llama", "gemma3_text")),
    ],
)
def test_preemption_between_any_two_steps_changes_no_token(family, options):
    model, reference = pair(family)
    llm = engine(model, num_blocks=64, max_num_batched_tokens=33, **options)
    prompts, wanted = expected(family)
    prompts, wanted = prompts[:12], wanted[:12]
    collectors = [submit(llm, prompt, GREEDY)[1] for prompt in prompts]
    rng, scheduler = random.Random(3), llm.core.scheduler
    for now in range(4000):
        if not llm.core.has_work:
            break
        llm.step()
        if now < 40 and scheduler.running.requests:
            request = rng.choice(list(scheduler.running.requests))
            preempt(llm, request, float(now), to_host="kv_host" in options)
    assert scheduler.counters.preemptions > 10
    got = tokens_of([collector.output for collector in collectors])
    assert count_near_ties(reference, prompts, wanted, got) <= 1
    receipts = [collector.output.receipt for collector in collectors]
    assert sum(receipt.preemptions for receipt in receipts) == scheduler.counters.preemptions
    assert (sum(receipt.restored_tokens for receipt in receipts) > 100) == ("kv_host" in options)
    assert_balanced(llm)


def test_blocks_damaged_in_host_memory_are_computed_again_and_no_token_changes():
    model, reference = pair("llama")
    llm = engine(model, kv_host="4MiB")
    prompts, wanted = expected("llama")
    prompts, wanted = prompts[:8], wanted[:8]
    collectors = [submit(llm, prompt, GREEDY)[1] for prompt in prompts]
    for _ in range(5):
        llm.step()
    for request in list(llm.core.scheduler.running.requests):
        preempt(llm, request, to_host=True)
    assert damage_host(llm) > 10
    drive(llm, collectors)
    assert count_near_ties(reference, prompts, wanted, tokens_of([c.output for c in collectors])) == 0
    assert llm.core.scheduler.manager.blocks.tiers.num_damaged > 0
    assert sum(c.output.receipt.recomputed_tokens for c in collectors) > 0
    assert sum(c.output.receipt.restored_tokens for c in collectors) > 0
    assert_balanced(llm)


@pytest.mark.parametrize("kv", ["int8", "int4", "fp8", "k8v4"])
def test_quantized_tokens_are_those_of_one_by_one_runs_but_for_near_ties(kv):
    model = pair("llama")[0].with_kv(kv)
    prompts, params = mixed_prompts(12, seed=9), SamplingParams(max_tokens=NEW, logprobs=2)
    alone = engine(model, max_num_seqs=1, prefix_caching=False).generate(prompts, params)
    seen = 0
    for options in (
        {"max_num_batched_tokens": 2048},
        {"max_num_batched_tokens": 19},
        {"num_blocks": 12, "max_context": 112},
    ):
        llm = engine(model, **options)
        for _ in range(2 if len(options) == 1 else 1):
            seen += check_near_ties(alone, llm.generate(prompts, params), gap=QUANTIZED_GAP)
        assert_balanced(llm)
    assert seen <= 6, f"{seen} of 60 results differ from those of one-by-one runs"


def check_near_ties(wanted, got, *, gap: float) -> int:
    """How many results differ; fails unless the two best tokens were that close at the first difference."""
    seen = 0
    for one, other in zip(wanted, got, strict=True):
        assert other.error is None, other.error
        a, b = one.outputs[0], other.outputs[0]
        at = first_difference(a.token_ids, b.token_ids)
        if at is not None:
            assert gap_of(a.logprobs[at]) < gap, f"token {at} differs, {a.logprobs[at]} and {b.logprobs[at]}"
            seen += 1
    return seen


def seeded(i: int) -> SamplingParams:
    """Parameters of request number `i`: every kind of sampling, each with a seed of its own."""
    kinds = [
        {"temperature": 1.0},
        {"temperature": 0.7, "top_p": 0.9},
        {"temperature": 1.3, "top_k": 20, "min_p": 0.01},
        {"temperature": 0.9, "repetition_penalty": 1.2, "presence_penalty": 0.3},
    ]
    return SamplingParams(max_tokens=NEW, seed=100 + i, **kinds[i % 4])


@pytest.mark.parametrize("kv", ["fp32", "int4"])
def test_seeded_samples_are_bit_for_bit_the_same_in_any_batch(kv):
    model = pair("llama")[0].with_kv(kv)
    prompts = mixed_prompts(16, seed=11)
    params = [seeded(i) for i in range(len(prompts))]
    results = []
    for seqs in (1, 3, 16):
        # Chunks of any size are another promise: a prompt computed in other chunks reads other codes.
        llm = engine(model, max_num_seqs=seqs, prefix_caching=False)
        results.append(tokens_of(llm.generate(prompts, params)))
        order = random.Random(seqs).sample(range(len(prompts)), len(prompts))
        again = tokens_of(llm.generate([prompts[i] for i in order], [params[i] for i in order]))
        assert again == [results[-1][i] for i in order]
    assert results[0] == results[1] == results[2]
    assert len({tuple(tokens) for tokens in results[0]}) == len(prompts)


def test_seeded_samples_are_the_same_in_any_chunks_and_preemptions():
    model, _ = pair("llama")
    prompts = mixed_prompts(16, seed=11)
    params = [seeded(i) for i in range(len(prompts))]
    alone = tokens_of(engine(model, max_num_seqs=1).generate(prompts, params))
    for options in ({"max_num_batched_tokens": 16}, {"num_blocks": 10, "max_context": 112}):
        got = tokens_of(engine(model, **options).generate(prompts, params))
        differ = [i for i, (a, b) in enumerate(zip(alone, got, strict=True)) if a != b]
        assert len(differ) <= 1, f"fp32 sums in another order move a draw's edge at most once: {differ}"


def test_the_embedded_model_gives_the_text_of_generate(tiny):
    reference = AutoModelForCausalLM.from_pretrained(
        tiny.prepared.folder, attn_implementation="eager", dtype=torch.float32
    ).eval()
    llm = engine(tiny.with_kv("fp32"), max_num_seqs=5, max_num_batched_tokens=24)
    prompts = [tiny.tokenizer(text)["input_ids"] for text in TEXTS]
    wanted = [reference_tokens(reference, prompt, NEW) for prompt in prompts]
    got = tokens_of(llm.generate(TEXTS, GREEDY))
    assert count_near_ties(reference, prompts, wanted, got) <= 1


def test_a_request_without_a_seed_draws_anew_every_time():
    llm = engine(pair("llama")[0])
    params = SamplingParams(max_tokens=NEW, temperature=1.5)
    drawn = tokens_of(llm.generate([[5, 6, 7]] * 8, params))
    assert len({tuple(tokens) for tokens in drawn}) > 4
