"""Engines whose results have the same bits however requests are run, and receipts that say so."""

import json
from dataclasses import asdict, replace
from types import MappingProxyType, SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest

from kvq.cache.prefix_file import load_prefix, save_prefix
from kvq.engine import LLM, SamplingParams
from kvq.engine.exactness import _trace, engine_facts
from kvq.engine.steps import core
from kvq.errors import ModelError, RequestError
from kvq.kernels.native import library
from kvq.models import load
from tests.engine.kit import one_character_tokenizer, submit
from tests.helpers_hybrids import hybrid_folder
from tests.helpers_models import random_tokens, save_model

PARAMS = SamplingParams(max_tokens=12, logprobs=1, ignore_eos=True)
DIGITS = 8  # of a token


@pytest.fixture(scope="module")
def model():
    return load("tiny", "int4", block_size=16, exact=True)


def exact_of(llm, prompt, params=PARAMS):
    with llm:
        return llm.generate([prompt], params)[0].receipt.exact


def test_two_engines_give_the_same_receipt_and_another_request_another(model):
    prompt = random_tokens(50, seed=1)
    one = exact_of(LLM(model, num_blocks=64), prompt)
    assert exact_of(LLM(model, num_blocks=99, max_num_batched_tokens=16, max_num_seqs=2), prompt) == one
    for other in (
        exact_of(LLM(model, num_blocks=64), prompt[:-1]),
        exact_of(LLM(model, num_blocks=64), prompt, replace(PARAMS, max_tokens=11)),
    ):
        assert other.digest != one.digest
        assert other.request != one.request
        assert other.kv != one.kv
        assert (other.model, other.recipe, other.program) == (one.model, one.recipe, one.program)


def test_the_digest_is_that_of_weights_recipe_and_program(model, tmp_path, monkeypatch):
    prompt = random_tokens(20, seed=1)
    one = exact_of(LLM(model, num_blocks=64), prompt)
    other = exact_of(LLM(model, "int8", num_blocks=64), prompt)
    assert other.recipe != one.recipe
    assert other.model == one.model
    monkeypatch.setattr("kvq.engine.exactness.__version__", "0.0.0")
    newer = exact_of(LLM(model, num_blocks=64), prompt)
    assert newer.program != one.program
    assert newer.digest != one.digest
    assert newer.kv == one.kv
    found = []
    for seed in (0, 1):
        folder = save_model(tmp_path / str(seed), "llama", seed=seed)
        one_character_tokenizer().save_pretrained(folder)
        with LLM(str(folder), "int8", device="cpu", exact=True, num_blocks=64) as llm:
            found.append(llm.generate([prompt], PARAMS)[0].receipt.exact.model)
    assert found[0] != found[1]


@pytest.mark.parametrize("variant", library.VARIANTS[1:])
def test_another_variant_of_the_kernels_is_another_program(model, monkeypatch, variant):
    chosen = [x for x in library.variants() if x.variant == variant]
    if not chosen:
        pytest.skip("not built, or not for this CPU")
    if variant == library.loaded().variant:
        pytest.skip("the one that this machine runs")
    one = exact_of(LLM(model, num_blocks=64), [5, 6, 7])
    monkeypatch.setattr("kvq.engine.exactness.load", lambda: chosen[0])
    assert exact_of(LLM(model, num_blocks=64), [5, 6, 7]).program != one.program


def test_a_request_without_a_seed_gets_one_and_is_repeated_by_it(model):
    params = replace(PARAMS, temperature=1.0)
    with LLM(model, num_blocks=64) as llm:
        first = llm.generate([[5, 6, 7]], params)[0]
        again = llm.generate([[5, 6, 7]], replace(params, seed=first.receipt.exact.seed))[0]
        assert first.outputs[0] == again.outputs[0]
        assert first.receipt.exact == again.receipt.exact
        assert first.receipt.exact.seed < 1 << 53, "JSON's numbers are exact up to there"


def test_a_changed_bit_of_k_or_v_changes_the_digest(model):
    """Every byte that may be read counts; slots behind the last token don't."""
    with LLM(model, num_blocks=64, prefix_caching=False) as llm:
        cache, keep = llm.core.runner.cache, core.keep_kv_digest

        def digest(change):
            def changed(cache, layout, job, branch):
                change(branch.sequence)
                keep(cache, layout, job, branch)

            with patch.object(core, "keep_kv_digest", changed):
                return llm.generate([random_tokens(75, seed=2)], PARAMS)[0].receipt.exact.kv[0]

        def flip(group, index, byte):
            def change(sequence):
                block = sequence.tables[group][index]
                content = cache.read_block(group, block)
                content[byte] ^= 1
                cache.write_block(group, block, content)

            return change

        right = digest(lambda sequence: None)
        groups = {group.role.value: i for i, group in enumerate(model.layout.groups)}
        assert digest(flip(groups["sealed"], 0, 0)) != right
        assert digest(flip(groups["sealed"], 3, -1)) != right
        assert digest(flip(groups["recent"], 5, 0)) != right
        assert digest(flip(groups["recent"], 5, 15 * 32 * 2)) == right, "86 tokens: six in the last block"
        assert digest(lambda sequence: None) == right


def test_traces_name_the_first_token_that_differs(model):
    with LLM(model, num_blocks=64) as llm:
        output = llm.generate([[5, 6, 7]], PARAMS)[0]
    one, trace = output.outputs[0], output.receipt.exact.tokens[0]
    assert len(trace) == DIGITS * 12
    for at in (0, 5, 11):
        logprobs = list(one.logprobs)
        logprobs[at] = replace(logprobs[at], logprob=logprobs[at].logprob * (1 + 2**-52))
        other = _trace(one.token_ids, logprobs)
        assert other[: DIGITS * at] == trace[: DIGITS * at]
        assert all(
            other[i : i + DIGITS] != trace[i : i + DIGITS] for i in range(DIGITS * at, len(trace), DIGITS)
        )
    assert _trace(one.token_ids, None) != trace
    assert len(_trace(one.token_ids, None)) == len(trace)


def test_hooks_that_time_layers_change_no_bit(model):
    prompt = random_tokens(50, seed=1)
    one, watched = exact_of(LLM(model, num_blocks=64), prompt), LLM(model, num_blocks=64)
    watched.on_step(lambda stats: None)
    assert exact_of(watched, prompt) == one


def test_receipts_say_nothing_without_exact():
    with LLM("tiny", "int4", num_blocks=64) as llm:
        assert llm.generate(["a"], PARAMS)[0].receipt.exact is None


def test_scores_are_the_log_probabilities_of_generation(model):
    prompts = [random_tokens(n, seed=n) for n in (1, 40, 77)]
    with LLM(model, num_blocks=99, max_num_batched_tokens=32) as llm:
        outputs = llm.generate(prompts, replace(PARAMS, temperature=1.0))
        answers = [output.outputs[0].token_ids for output in outputs]
        scored = llm.score(prompts, answers)
        for prompt, output, one in zip(prompts, outputs, scored, strict=True):
            (own,), (generated,) = one.outputs, output.outputs
            assert [x.logprob for x in own.logprobs] == [x.logprob for x in generated.logprobs]
            assert (one.prompt_token_ids, own.token_ids) == (prompt, generated.token_ids)
        text = llm.score("Once upon", " a time")[0]
        assert llm.core.model.tokenizer.decode(text.outputs[0].token_ids) == " a time"


@pytest.mark.parametrize(
    ("prompts", "completions", "reason"),
    [
        (["a", "b"], ["c"], "2 prompts have 1 completions"),
        (["a", "b"], ["c", ""], "completion 1 is empty"),
        ([[1]], [[10**6]], "outside the vocabulary"),
        ([[1] * 300], [[2] * 300], "context"),
    ],
)
def test_what_can_not_be_scored_is_refused(model, prompts, completions, reason):
    with LLM(model, num_blocks=64, max_context=256) as llm, pytest.raises(RequestError, match=reason):
        llm.score(prompts, completions)


def test_a_prefix_file_with_a_flipped_bit_is_not_read(model, tmp_path, caplog):
    prompt, path = random_tokens(80, seed=3), tmp_path / "prefix"
    llm = LLM(model, num_blocks=64)
    llm.generate([prompt], PARAMS)
    manager = llm.core.scheduler.manager
    save_prefix(path, llm.core.runner.cache, manager, manager.prompt(prompt))
    raw = bytearray(path.read_bytes())
    raw[-100] ^= 4
    path.write_bytes(raw)
    llm.close()
    with LLM(model, num_blocks=64) as llm:
        manager = llm.core.scheduler.manager
        assert load_prefix(path, llm.core.runner.cache, manager, manager.prompt(prompt)) == 0
        assert "damaged" in caplog.text


def test_models_that_can_not_be_exact_are_refused_by_the_engine():
    with pytest.raises(ModelError, match="can't be exact"):
        LLM(str(hybrid_folder("falcon_h1")), "int8", device="cpu", exact=True)


def test_receipts_can_be_sent(model):
    one = exact_of(LLM(model, num_blocks=64), [5, 6, 7], SamplingParams(max_tokens=3, n=2, seed=1))
    assert json.loads(json.dumps(asdict(one)))["kv"] == one.kv
    assert len(one.kv) == len(one.tokens) == 2


def test_a_prefix_file_of_another_program_is_not_read(model, tmp_path, monkeypatch):
    prompt, path = random_tokens(80, seed=3), tmp_path / "prefix"
    with LLM(model, num_blocks=64) as llm:
        llm.generate([prompt], PARAMS)
        manager = llm.core.scheduler.manager
        save_prefix(path, llm.core.runner.cache, manager, manager.prompt(prompt))
    for version, found in (("0.0.0", 0), (None, 80)):
        with monkeypatch.context() as patched:
            if version is not None:
                patched.setattr("kvq.engine.exactness.__version__", version)
            llm = LLM(model, num_blocks=64)
        manager = llm.core.scheduler.manager
        assert load_prefix(path, llm.core.runner.cache, manager, manager.prompt(prompt)) == found
        llm.close()


def test_an_open_limit_is_part_of_the_request(model):
    params = replace(PARAMS, max_tokens=None, most_tokens=40)
    found = [exact_of(LLM(model, num_blocks=64, max_context=n), [5, 6, 7], params) for n in (64, 32)]
    assert [one.max_tokens for one in found] == [40, 29]
    assert found[0].digest != found[1].digest
    assert exact_of(LLM(model, num_blocks=64), [5, 6, 7], replace(PARAMS, max_tokens=40)) == found[0]


def test_numbers_of_numpy_and_mappings_are_signed(model):
    bias = MappingProxyType({np.int64(5): 3.0})
    params = replace(PARAMS, logit_bias=bias, top_k=np.int32(5), stop_token_ids=(np.int64(9),))
    assert exact_of(LLM(model, num_blocks=64), [5, 6, 7], params).digest


def test_cancelled_requests_have_no_digest(model):
    with LLM(model, num_blocks=64) as llm:
        job, collector = submit(llm, [5, 6, 7], replace(PARAMS, max_tokens=30))
        for _ in range(5):
            llm.step()
        llm.core.cancel(job)
        assert collector.output.receipt.exact is None
        assert collector.output.outputs[0].finish_reason == "cancelled"


def test_tokenizers_without_a_backend_count_by_their_vocabulary(tmp_path):
    folder = save_model(tmp_path, "llama")
    found = []
    for words in ({"a": 0, "b": 1}, {"b": 1, "a": 0}, {"a": 1, "b": 0}):
        model = load(folder, "int8", device="cpu", dtype="fp32", exact=True)
        model.prepared.__dict__["tokenizer"] = SimpleNamespace(get_vocab=lambda words=words: words)
        found.append(engine_facts(model)["model"])
    assert found[0] == found[1] != found[2]
    one_character_tokenizer().save_pretrained(folder)
    assert engine_facts(load(folder, "int8", device="cpu", dtype="fp32", exact=True))["model"] not in found
