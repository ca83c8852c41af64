"""Steps that are launched ahead are not asked about drafts: now and then one has to be."""

from kvq.engine import SamplingParams
from tests.engine.kit import assert_balanced, engine, pair, tokens_of
from tests.engine.speculation.kit import Oracle, counts, speculating
from tests.engine.test_ahead import watched


class Late(Oracle):
    """Finds nothing the first time."""

    asked = 0

    def most(self, branch, job, limit):
        self.asked += 1
        return limit if self.asked > 1 else 0


def test_who_found_no_draft_once_is_asked_again_while_steps_run_ahead():
    model, prompts = pair("llama")[0], [[50, 60, 70]]
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    answers = tokens_of(engine(model).generate(prompts, params))
    llm = watched(speculating(model, async_scheduling=True))
    llm.core.speculator.proposer = Late({tuple(prompts[0]): answers[0]}, right=1.0)
    assert tokens_of(llm.generate(prompts, params)) == answers
    assert 8 <= llm.num_ahead <= 20
    assert counts(llm)[1] > 30
    assert_balanced(llm)
