"""Continuations agree with the baseline's for as long as the rows say."""

import pytest

from kvq.engine import LLM, SamplingParams
from kvq.errors import RequestError
from kvq.evals import default_text
from kvq.evals.generation import GenerationPlan, cut_prompts, measure_generation
from kvq.models.run.prompts import num_common

TEXT = default_text().text
PLAN = GenerationPlan(prompts=9, prompt_tokens=40, new_tokens=12)


def test_agreement_is_that_of_requests_run_alone(tiny):
    rows = measure_generation(tiny, ["int4"], TEXT, plan=PLAN)
    assert [row.kv for row in rows] == ["fp32", "int4"]
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    alone = {}
    for kv in ("fp32", "int4"):
        with LLM(tiny, kv, num_blocks=16) as llm:
            alone[kv] = [llm.generate([ids], params)[0].outputs[0].token_ids for ids in prompts(tiny)]
    pairs = list(zip(alone["fp32"], alone["int4"], strict=True))
    same = [next((i for i in range(12) if a[i] != b[i]), 12) for a, b in pairs]
    assert rows[1].same_tokens_mean == pytest.approx(sum(same) / 9)
    assert rows[1].same_tokens_median == sorted(same)[4]
    assert rows[1].identical == pytest.approx(sum(a == b for a, b in pairs) / 9)
    low, high = rows[1].intervals.same_tokens_mean
    assert low <= rows[1].same_tokens_mean <= high
    assert (rows[0].same_tokens_mean, rows[0].identical, rows[0].prompts) == (12, 1, 9)


def prompts(model):
    return cut_prompts(model.prepared, TEXT, PLAN)


def test_prompts_are_spread_over_the_text(tiny):
    whole = tiny.tokenizer(TEXT, add_special_tokens=False, verbose=False)["input_ids"]
    found = prompts(tiny)
    assert len(found) == 9
    assert found[0] == whole[:40]
    assert found[-1][0] in whole[len(whole) * 8 // 10 :]
    assert len({tuple(ids) for ids in found}) == 9


def test_same_tokens_counts_up_to_the_first_difference():
    assert [num_common([1, 2, 3], other) for other in ([9, 2, 3], [1, 9, 3], [1, 2, 3])] == [0, 1, 3]


def test_what_can_not_be_generated_is_refused(tiny):
    with pytest.raises(RequestError, match="beyond this model's context of 4096"):
        cut_prompts(tiny.prepared, TEXT, GenerationPlan(prompt_tokens=4090, new_tokens=7))
    with pytest.raises(RequestError, match="prompts must be at least 1"):
        GenerationPlan(prompts=0)
    with pytest.raises(RequestError, match="one window needs 128"):
        cut_prompts(tiny.prepared, "short", GenerationPlan())
