"""The dry run: it leaves nothing behind and sees what a larger step takes."""

import pytest

import kvq
from kvq.engine.device.dry_run import _plan, dry_run


def test_more_tokens_take_more_memory_and_a_default_engine_counts_them(tiny):
    few = dry_run(tiny, max_num_batched_tokens=256, max_context=512)
    many = dry_run(tiny, max_num_batched_tokens=25_600, max_context=512)
    assert few.token_s > 0
    assert many.activation_bytes >= 25_600 * tiny.geometry.hidden_size, "a row of a layer at least"
    with kvq.LLM(tiny, "int4", max_num_seqs=2) as llm:
        assert llm.generate([1, 2, 3], kvq.SamplingParams(max_tokens=2))[0].error is None


@pytest.mark.parametrize(
    ("tokens", "longest", "counts"), [(10, 10, [10]), (10, 4, [4, 4, 2]), (3, 1, [1] * 3)]
)
def test_a_full_step_is_made_of_sequences_that_the_context_allows(tokens, longest, counts):
    plan, blocks = _plan(tokens, longest, 4)
    assert plan.counts == counts
    assert plan.num_tokens == tokens
    assert blocks == sum(-(-count // 4) for count in counts)
    named = [block for _, _, _, entries in plan.table_changes for block in entries]
    assert sorted(named) == list(range(blocks))
