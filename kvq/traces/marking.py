"""Windows of sessions, with a weight on each token: what a search for recipes spends bits on."""

from collections.abc import Sequence

from kvq.errors import RequestError
from kvq.evals.side_by_side import Marked
from kvq.models.loading.prepared import PreparedModel
from kvq.traces.kinds import DECISIVE, kinds_of
from kvq.traces.rendering import Rendering, Stretch
from kvq.traces.sessions import RecordedSession

_FEWEST = 4  # decisive tokens of a window


def marked_windows(
    model: PreparedModel, sessions: Sequence[RecordedSession], context: int
) -> tuple[Marked, ...]:
    """Return the windows of `context` tokens in which sessions decide something.

    A session is cut from its end, so that its last answer is whole. Weights are 1 for tokens of answers that
    are no plain text, and 0 for all others.

    Raises:
        RequestError: no session has so many tokens, or none decides anything.
    """
    rendering, found, longest = Rendering(model, model.max_context), [], 0
    for number, session in enumerate(sessions):
        for stretch in rendering.stretches(number, session):
            weights = _weights(rendering, stretch, session)
            longest = max(longest, len(weights))
            for end in range(len(weights), context - 1, -context):
                part = weights[end - context : end]
                if sum(part) >= _FEWEST:
                    found.append(Marked(ids=list(stretch.tokens[end - context : end]), weights=part))
    if not found:
        raise RequestError(
            f"no session decides anything within a window of {context} tokens; the longest has {longest:,} "
            f"tokens: give longer sessions, or a shorter --context"
        )
    return tuple(found)


def _weights(rendering: Rendering, stretch: Stretch, session: RecordedSession) -> list[float]:
    weights = [0.0] * len(stretch.tokens)
    for answer in stretch.answers:
        texts = rendering.texts(stretch.tokens[answer.first : answer.end])
        kinds = kinds_of(texts, session.messages[answer.message])
        weights[answer.first : answer.end] = [float(kind in DECISIVE) for kind in kinds]
    return weights
