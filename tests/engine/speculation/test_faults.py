"""When drafting fails, or drafts break something, requests go on as without."""

import pytest
import torch

from kvq.engine import SamplingParams
from kvq.errors import NumericalError
from tests.engine.kit import assert_balanced, drive, engine, mixed_prompts, pair, submit, tokens_of
from tests.engine.speculation.kit import counts, speculating, with_oracle
from tests.helpers_models import random_tokens

NEW = SamplingParams(max_tokens=20, ignore_eos=True)
PROMPTS = mixed_prompts(6, seed=31)


@pytest.fixture(scope="module")
def plain():
    return tokens_of(engine(pair("llama")[0]).generate(PROMPTS, NEW))


def test_a_proposer_that_raises_is_left_alone_after_a_while(plain, monkeypatch, caplog):
    llm = with_oracle(speculating(pair("llama")[0]), PROMPTS, plain)
    asked = []

    def fail(plan):
        asked.append(plan)
        raise RuntimeError("no drafts today")

    monkeypatch.setattr(llm.core.speculator.proposer, "propose", fail)
    assert tokens_of(llm.generate(PROMPTS, NEW)) == plain
    assert len(asked) == 3
    assert "no more are tried" in caplog.text
    assert_balanced(llm)


def test_a_step_with_drafts_that_raises_runs_again_branch_by_branch(plain, monkeypatch):
    llm = with_oracle(speculating(pair("llama")[0]), PROMPTS, plain)
    runner, real = llm.core.runner, llm.core.runner.forward
    broken = []

    def forward(plan, **options):
        if plan.num_drafts and len(plan.branches) > 1:
            broken.append(plan)
            raise RuntimeError("a kernel that dislikes company")
        return real(plan, **options)

    monkeypatch.setattr(runner, "forward", forward)
    assert tokens_of(llm.generate(PROMPTS, NEW)) == plain
    assert broken
    assert counts(llm)[1] > 0
    assert_balanced(llm)


def test_a_draft_of_nan_is_only_a_wrong_draft(tiny, monkeypatch):
    params = SamplingParams(max_tokens=16, temperature=1.0, ignore_eos=True)
    llm = speculating(tiny, method="self")
    proposer, real = llm.core.speculator.proposer, llm.core.speculator.proposer.logits
    monkeypatch.setattr(proposer, "logits", lambda *a: torch.full_like(real(*a), torch.nan))
    outputs = llm.generate([[5, 6, 7]] * 3, params)
    assert [len(tokens) for tokens in tokens_of(outputs)] == [16] * 3
    assert_balanced(llm)


def test_logits_that_are_not_finite_end_the_request_with_drafts_too(plain, monkeypatch):
    llm = with_oracle(speculating(pair("llama")[0]), PROMPTS, plain, right=1.0)
    real = llm.core.runner.forward

    def forward(plan, **options):
        output = real(plan, **options)
        for i, branch in enumerate(plan.branches):
            if list(branch.request.tokens) == PROMPTS[2] and plan.drafts[i]:
                with torch.inference_mode():
                    output.logits[output.starts[i]] = torch.nan
        return output

    monkeypatch.setattr(llm.core.runner, "forward", forward)
    outputs = llm.generate(PROMPTS, NEW)
    assert isinstance(outputs[2].error, NumericalError)
    assert tokens_of(outputs[:2] + outputs[3:]) == plain[:2] + plain[3:]
    assert_balanced(llm)


def test_cancelling_while_drafts_are_told_ends_the_request_there(plain):
    llm = with_oracle(speculating(pair("llama")[0], k=8), PROMPTS, plain, right=1.0)
    job, collector = submit(llm, PROMPTS[0], NEW)
    pieces = []

    def listen(event):
        collector(event)
        pieces.append(event)
        if len(pieces) == 5:
            llm.core.cancel(job)

    job.listener = listen
    drive(llm, [job])
    assert collector.output.outputs[0].finish_reason == "cancelled"
    assert collector.output.outputs[0].token_ids == plain[0][:5]
    assert_balanced(llm)


def test_a_full_pool_makes_no_drafts_but_goes_on(plain):
    longest = max(map(len, PROMPTS)) + 20
    llm = with_oracle(
        speculating(pair("llama")[0], num_blocks=-(-longest // 16), max_context=longest), PROMPTS, plain
    )
    assert tokens_of(llm.generate(PROMPTS, NEW)) == plain
    assert_balanced(llm)


def test_steps_that_are_launched_ahead_stop_now_and_then_to_look_for_drafts(plain):
    """Else who begins without drafts would never have any: only what is planned anew can have them."""
    llm = with_oracle(speculating(pair("llama")[0], async_scheduling=True), PROMPTS, plain, right=1.0)
    proposer, asked = llm.core.speculator.proposer, []
    real = proposer.most

    def most(branch, job, limit):
        asked.append(branch)
        return 0 if len(asked) < 2 else max(1, real(branch, job, limit))

    proposer.most = most
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    assert tokens_of(llm.generate(PROMPTS[:1], params)) == plain[:1]
    assert counts(llm)[1] > 0
    assert_balanced(llm)


def test_a_draft_model_that_fails_while_it_catches_up_harms_nobody(tiny, monkeypatch):
    prompts = [[7, 8, 9] * 10]
    plain = tokens_of(engine(tiny).generate(prompts, NEW))
    llm = speculating(tiny, method="draft", speculation={"model": "tiny-draft"})
    monkeypatch.setattr("kvq.engine.speculation.draft_model._CHUNK", 5)
    proposer = llm.core.speculator.proposer
    monkeypatch.setattr(proposer.session, "forward", lambda *a, **b: 1 / 0)
    assert tokens_of(llm.generate(prompts, NEW)) == plain
    assert_balanced(llm)


def test_a_draft_model_whose_pool_is_full_drafts_for_some(tiny, caplog):
    """Requests that share a prefix fit into the model's pool side by side, and not into the draft's."""
    shared = random_tokens(200, seed=1)
    prompts = [[*shared, i] for i in range(3, 11)]
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    plain = tokens_of(engine(tiny).generate(prompts, params))
    llm = speculating(tiny, method="draft", speculation={"model": "tiny-draft"}, num_blocks=45)
    llm.generate([shared], SamplingParams(max_tokens=1))
    assert tokens_of(llm.generate(prompts, params)) == plain
    assert counts(llm)[1] > 20
    assert "failed" not in caplog.text
    assert not llm.core.speculator.proposer.session.manager.sequences()
    assert_balanced(llm)
