"""Log-probabilities of continuations after their contexts, computed for many pairs at once on one engine."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from kvq.blockmgr import Sequence as BlockSequence
from kvq.engine import LLM, RequestOutput, SamplingParams
from kvq.errors import KVQError, RequestError
from kvq.evals.watch import UNWATCHED, Progress
from kvq.models import Model, Session

Tokens = Sequence[int]
Score = tuple[float, bool]  # log-probability in nats; whether greedy decoding generates the continuation

_WAVE_TOKENS = 1 << 20  # maximum prompt tokens of the requests in memory at once with their results
_SCORED = SamplingParams(max_tokens=1, prompt_logprobs=0, prompt_logprobs_start=0, ignore_eos=True)
_LOGITS_BYTES = 64 << 20  # of one chunk's logits


def score_continuations(
    llm: LLM, pairs: Sequence[tuple[Tokens, Tokens]], *, progress: Progress = UNWATCHED.progress
) -> list[Score]:
    """Score pairs of non-empty token lists (context, continuation), and return the scores in the same order.

        logprob = sum over i of log p(continuation[i] | context, continuation[:i])

    Pairs are sorted by their tokens, so pairs with the same context are adjacent: the prefix cache computes
    the context only once, and logits are computed only for continuations. A pair may be one token longer than
    the model's context, because the last token is only predicted.

    Raises:
        RequestError: a pair is too long, has an empty part, or is refused by the engine.
    """
    scores: list[Score | None] = [None] * len(pairs)
    for index, (context, continuation) in enumerate(pairs):
        _check(index, context, continuation, llm.core.max_context)
    order = sorted(range(len(pairs)), key=lambda i: (*pairs[i][0], *pairs[i][1]))
    packed = [i for i in order if _length(pairs[i]) < llm.core.max_context]
    for wave in _waves(packed, [_length(pair) for pair in pairs]):
        before = len(pairs) - scores.count(None)
        outputs = generate(
            llm,
            [[*pairs[i][0], *pairs[i][1]] for i in wave],
            [replace(_SCORED, prompt_logprobs_start=len(pairs[i][0])) for i in wave],
            progress=lambda done, _, before=before: progress(before + done, len(pairs)),  # type: ignore[misc]
        )
        for i, output in zip(wave, outputs, strict=True):
            scores[i] = _read(output, len(pairs[i][0]))
    whole = [i for i in order if scores[i] is None]  # too long for the engine, which adds one token
    for i, score in zip(whole, _score_whole_contexts(llm.model, [pairs[i] for i in whole]), strict=True):
        scores[i] = score
        progress(len(pairs) - scores.count(None), len(pairs))
    return [score for score in scores if score is not None]


def generate(
    llm: LLM,
    prompts: Sequence[Tokens],
    params: Sequence[SamplingParams],
    *,
    progress: Progress = UNWATCHED.progress,
) -> list[RequestOutput]:
    """Call `llm.generate`, and raise if any request fails.

    Raises:
        RequestError: a request was refused or failed; the message gives its length and the reason.
    """
    try:
        outputs = llm.generate(list(prompts), list(params), progress=progress)
    except RequestError as error:
        raise RequestError(f"a request of {max(map(len, prompts))} tokens or fewer: {error}") from error
    for output in outputs:
        if output.error is not None:
            raise RequestError(
                f"a request of {len(output.prompt_token_ids)} tokens failed: {output.error}"
            ) from output.error
    return outputs


def _check(index: int, context: Tokens, continuation: Tokens, max_context: int) -> None:
    if not context or not continuation:
        part = "continuation" if context else "context"
        raise RequestError(f"request {index}: its {part} has no tokens; nothing can be scored")
    if len(context) + len(continuation) > max_context + 1:
        raise RequestError(
            f"request {index}: {len(context)} tokens of context and {len(continuation)} to score are more "
            f"than the context of {max_context} tokens and the one after it; shorten the text, or raise "
            f"max_context"
        )


def _length(pair: tuple[Tokens, Tokens]) -> int:
    return len(pair[0]) + len(pair[1])


def _waves(order: Sequence[int], lengths: Sequence[int]) -> Iterator[list[int]]:
    """Split requests into waves of at most `_WAVE_TOKENS` tokens, with at least one request per wave."""
    wave: list[int] = []
    tokens = 0
    for i in order:
        if wave and tokens + lengths[i] > _WAVE_TOKENS:
            yield wave
            wave, tokens = [], 0
        wave.append(i)
        tokens += lengths[i]
    if wave:
        yield wave


def _read(output: RequestOutput, start: int) -> Score:
    entries = [entry for entry in (output.prompt_logprobs or [])[start:] if entry is not None]
    assert len(entries) == len(output.prompt_token_ids) - start, "every token of the continuation has one"
    return sum(entry.logprob for entry in entries), all(entry.rank == 1 for entry in entries)


def _score_whole_contexts(model: Model, pairs: Sequence[tuple[Tokens, Tokens]]) -> Iterator[Score]:
    """Score pairs one by one in a separate session, whose pool has room for a single sequence."""
    if not pairs:
        return
    try:
        session = model.session(max_tokens=max(map(_length, pairs)) - 1)
        for context, continuation in pairs:
            sequence = session.new_sequence()
            yield _score_in(session, sequence, context, continuation)
            session.free(sequence)
    except KVQError as error:
        raise RequestError(f"a request as long as the model's context failed: {error}") from error


def _score_in(session: Session, sequence: BlockSequence, context: Tokens, continuation: Tokens) -> Score:
    weights = session.weights
    ids, first = [*context, *continuation[:-1]], len(context) - 1  # the row that predicts the first token
    targets = torch.tensor(continuation, device=weights.device)
    size = max(16, _LOGITS_BYTES // (4 * weights.geometry.vocab_size))
    for at in range(0, first, size):
        session.forward([(sequence, ids[at : min(at + size, first)])])
    logprob, is_greedy = 0.0, True
    for at in range(first, len(ids), size):
        result = session.forward([(sequence, ids[at : at + size])], all_rows=True)[0]
        rows = torch.log_softmax(result.trusted_logits(), dim=-1)  # [tokens, vocab]
        wanted = targets[at - first : at - first + len(rows)]
        logprob += float(rows.gather(1, wanted[:, None]).double().sum())
        is_greedy = is_greedy and bool((rows.argmax(dim=-1) == wanted).all())
    return logprob, is_greedy
