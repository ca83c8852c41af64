"""kvq's formats inside a real vLLM on CPUs: its tokens, its memory, and what vLLM does with blocks."""

import math
from pathlib import Path
from typing import Any

import pytest

import kvq
from kvq.evals.text import default_text, token_windows
from kvq.integrations.vllm.names import recipe_of
from kvq.integrations.vllm.pages import Page
from tests.scale.vllm.kit import MEMORY, TINY, greedy, served

TOKENS = 24
TIE = 0.25  # between logits of tokens that may change places, where a code rounds otherwise


def check_same(
    kv: str, prompts: list[list[int]], found: list[list[int]], want: list[list[int]], folder: Path = TINY
) -> int:
    """Differences only where two tokens were nearly as likely; returns the number of prompts with one."""
    model = kvq.load(str(folder), kv=kv, dtype="fp32")
    differing = 0
    for ids, some, other in zip(prompts, found, want, strict=True):
        at = next((i for i, (a, b) in enumerate(zip(some, other, strict=True)) if a != b), None)
        if at is not None:
            logits = model.logits(ids + other[:at])[-1]
            assert abs(float(logits[some[at]] - logits[other[at]])) < TIE, (ids[:8], at)
            differing += 1
    return differing


@pytest.mark.parametrize("kv", ["int8", "int4", "k8v4", "tuned", "centered", "static", "searched"])
def test_tokens_are_those_of_kvqs_own_engine(kv, prompts, own, made):
    name = made(kv)
    with served(name) as llm:
        found = greedy(llm, prompts, TOKENS)
    assert check_same(name, prompts, found, own(name, prompts, TOKENS)) <= 15


@pytest.mark.parametrize(
    "options",
    [
        {"enable_prefix_caching": True},
        {"enable_chunked_prefill": True, "max_num_batched_tokens": 16},
        {"num_gpu_blocks_override": 9, "block_size": 32, "max_model_len": 256},
    ],
    ids=["prefix caching", "chunked prefill", "preemption"],
)
def test_what_vllm_does_with_blocks_changes_no_tokens(options, prompts):
    check_unchanged(options, prompts)


def check_unchanged(options: dict[str, object], prompts: list[list[int]]) -> None:
    """The tokens are those of a vLLM without those options."""
    some = [prompts[i % 10][:60] for i in range(20)]  # each twice
    with served("int4") as llm:
        want = greedy(llm, some, TOKENS)
    with served("int4", **options) as llm:
        found = greedy(llm, some, TOKENS)
    assert check_same("int4", some, found, want) <= 1


@pytest.mark.parametrize("kv", ["int8", "int4", "k8v4"])
def test_blocks_take_what_the_formats_take(kv):
    """As many blocks as kvq's own pages fit into the memory, and 16-bit ones in proportion."""
    geometry = kvq.load(str(TINY)).geometry
    with served(kv) as llm:
        cache = llm.llm_engine.vllm_config.cache_config
        blocks, block_size = cache.num_gpu_blocks, cache.block_size
    recipe = recipe_of(kv, geometry.head_dims[0], len(geometry.layers))
    dims = geometry.head_dims
    pages = [Page.of(recipe, x.index, x.kv_heads, block_size, dims[x.index]) for x in geometry.layers]
    assert blocks == MEMORY // sum(page.layout.nbytes for page in pages)


@pytest.mark.parametrize("kv", ["int8", "int4", "k8v4", "searched"])
def test_perplexity_is_what_kvq_measures(kv, made):
    """Of the same windows of the same text, by vLLM's log-probabilities of prompts, within 0.1%."""
    name, model, text = made(kv), kvq.load(str(TINY), dtype="fp32"), default_text().text
    cut = {"context": 256, "max_windows": 16}
    _, want = kvq.perplexity(model, ["fp32", name], text, **cut)
    windows = token_windows(model.tokenizer, text, **cut)
    with served(name) as llm:
        found = prompt_log_probabilities(llm, windows)
    assert len(found) == want["tokens"]
    assert abs(math.exp(-sum(found) / len(found)) / want["perplexity"] - 1) < 1e-3


def prompt_log_probabilities(llm: Any, windows: list[list[int]]) -> list[float]:
    """Of every token but the first of each window."""
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=1, prompt_logprobs=0, temperature=0)
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in windows], params, use_tqdm=False)
    return [
        rows[token].logprob
        for ids, output in zip(windows, outputs, strict=True)
        for token, rows in list(zip(ids, output.prompt_logprobs, strict=True))[1:]
    ]


def test_models_that_ask_for_nothing_get_vllms_own(prompts):
    with served(None) as llm:
        block_size = llm.llm_engine.vllm_config.cache_config.block_size
        geometry = kvq.load(str(TINY)).geometry
        token_bytes = 4 * sum(x.elements_per_token for x in geometry.layers)
        assert llm.llm_engine.vllm_config.cache_config.num_gpu_blocks == MEMORY // (block_size * token_bytes)
        assert len(greedy(llm, prompts[:2], 3)[0]) == 3


@pytest.mark.parametrize(
    ("kv", "options", "said"),
    [
        ("int7", {}, "unknown"),
        ("int4", {"kv_cache_dtype": "fp8"}, "name one"),
        ("int4", {"kv_cache_dtype_skip_layers": ["0"]}, "kvq.json"),
        ("fp8_per_head", {}, "static scales"),
    ],
)
def test_what_cannot_be_served_is_refused_with_the_reason(kv, options, said):
    with pytest.raises(Exception, match=said), served(kv, **options):
        pass


def test_drafts_by_n_grams_change_no_tokens(prompts):
    """Last: drafts load numba, whose modules vLLM 0.32 can't look through when it loads another model."""
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
    check_unchanged({"speculative_config": drafts}, prompts)
