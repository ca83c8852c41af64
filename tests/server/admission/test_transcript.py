"""Both answers to a request have one seed, and only the first result of the first prompt is kept."""

from kvq.engine import SamplingParams
from kvq.engine.requests.outputs import Piece
from kvq.engine.requests.request_options import RequestOptions
from kvq.scheduler import Priority
from kvq.server.admission.transcript import Transcript
from kvq.server.engine.messages import Ended


def test_a_request_gets_the_seed_unless_it_has_one():
    kept = Transcript(seed=7)

    drawn, own = kept.take(RequestOptions())
    given, later = kept.take(RequestOptions(params=SamplingParams(seed=3)))

    assert (drawn.params.seed, given.params.seed) == (7, 3)
    assert (own, later) == (kept, None)
    assert drawn.priority is Priority.INTERACTIVE


def test_a_copy_waits_for_everybody_else():
    options, _ = Transcript(seed=7, is_shadow=True).take(RequestOptions(priority="interactive"))

    assert options.priority is Priority.BATCH


def test_the_first_result_is_kept_and_complete_at_its_good_end():
    kept = Transcript(seed=7)
    for index, tokens in ((0, [1, 2]), (1, [9]), (0, [3])):
        kept.add(Piece(request_id="", index=index, text="", token_ids=tokens))
    assert (kept.token_ids, kept.is_complete) == ([1, 2, 3], False)

    kept.add(Ended(number=0, error="lost"))
    assert not kept.is_complete
    kept.add(Ended(number=0))
    assert kept.is_complete
