"""Request state: everything the engine stores for a request beyond the scheduler's fields."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor

from kvq.engine.params import PrefixPin, SamplingParams
from kvq.engine.requests.beam import Beam, BeamSearch
from kvq.engine.requests.named_adapter import NamedAdapter
from kvq.engine.requests.outputs import (
    CompletionOutput,
    Event,
    FinishReason,
    Piece,
    PromptUse,
    Receipt,
    RequestOutput,
    Timing,
    TokenLogprobs,
)
from kvq.engine.requests.text import TextStream
from kvq.errors import KVQError, RequestError
from kvq.scheduler import Branch, Request

if TYPE_CHECKING:  # see core.py
    from kvq.engine.grammar.matcher import Matcher

Listener = Callable[[Event], object]


@dataclass(slots=True, eq=False)
class _Result:
    """Result in progress of one branch."""

    output: CompletionOutput
    stream: TextStream
    matcher: "Matcher | None" = None
    is_done: bool = False

    def end(self, reason: FinishReason, stop_reason: str | int | None = None) -> str:
        """Finish the text and return the part that had been held back."""
        self.is_done = True
        rest = "" if self.stream.stop is not None else self.stream.finish()
        self.output.finish_reason = reason
        self.output.stop_reason = stop_reason
        return rest


@dataclass(slots=True, eq=False, kw_only=True)
class Job(Request):
    """Everything the engine stores for a request until it ends, beyond the scheduler's fields."""

    params: SamplingParams
    prompt: str | None  # None if token ids were given
    seed: int
    end_ids: Collection[int]  # tokens that end a result
    listener: Listener | None = None
    timing: Timing
    last_token_s: float = 0.0
    results: list[_Result] = field(default_factory=list)  # by branch
    beams: BeamSearch | None = None
    candidates: dict[Branch, list[tuple[float, int]]] = field(default_factory=dict)
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    pins: list[PrefixPin] = field(default_factory=list)  # not made yet, shortest first
    pinned_tokens: int = 0
    session: str | None = None
    retain_s: float | None = None
    adapter: NamedAdapter | None = None  # None: the base model
    drafted_tokens: int = 0
    accepted_tokens: int = 0  # of these
    pools: bool = False
    dimensions: int | None = None
    pooled: Tensor | None = None  # fp32 [hidden_size], so far
    num_pooled: int = 0  # prompt tokens in it
    vector: list[float] | None = None

    def until_end(self, branch: Branch, tokens: Sequence[int]) -> int:
        """Return how many of a branch's next tokens to keep, up to and including the first that ends it."""
        for count, token in enumerate(tokens, 1):
            if token in self.end_ids and branch.num_generated + count >= self.params.min_tokens:
                return count
        return len(tokens)

    def must_go_on(self, count: int, mask: Tensor) -> bool:
        """Return True if `count` is below `min_tokens` although a grammar's mask allows only end tokens."""
        if count >= self.params.min_tokens:
            return False
        allowed = int.from_bytes(mask.numpy().tobytes(), "little")
        return not allowed & ~sum(1 << token for token in self.end_ids)

    def too_short(self, count: int) -> RequestError:
        """Return the error for a grammar whose text has to end before `min_tokens`."""
        return RequestError(
            f"min_tokens {self.params.min_tokens} is more than the structured output lets through: behind "
            f"{count} tokens nothing but its end can follow; lower min_tokens, or let the text go on"
        )

    def prompt_rows(self, start: int, end: int) -> int:
        """Return how many trailing rows of positions [start, end) are needed for prompt log-probabilities."""
        if self.prompt_logprobs is None or len(self.prompt_logprobs) >= self.prompt_length:
            return 0
        return max(0, end - max(start, len(self.prompt_logprobs) - 1))

    @property
    def streams(self) -> bool:
        """True if pieces can be sent before the end, False if the best results are selected at the end."""
        return self.beams is None and self.params.best_of is None

    def index_of(self, branch: Branch) -> int:
        """Return the index of the result that a branch generates."""
        return 0 if len(self.results) == 1 else self.branches.index(branch)

    def mark_token(self, now: float) -> None:
        """Record when the request received tokens."""
        timing = self.timing
        if timing.ttft_s is None:
            timing.ttft_s = now - timing.arrival_s
            admitted = self.admitted_s
            if admitted is not None:
                timing.queue_s = admitted - timing.arrival_s
                timing.prefill_s = now - admitted
        else:
            timing.itl_s.append(now - self.last_token_s)
        self.last_token_s = now

    def deliver(self, output: RequestOutput) -> None:
        """Send the listener all pieces not yet sent, then the output."""
        if self.listener is None:
            return
        if not self.streams:
            for one in output.outputs:
                self.listener(self._piece(one, one.text, one.token_ids, one.logprobs, ends=True))
        self.listener(output)

    def begin(self, tokenizer: Any, matcher: "Matcher | None") -> None:
        """Create one result per branch."""
        stream = TextStream(tokenizer, self.tokens, self.params)
        wants = self.params.logprobs is not None or self.params.best_of is not None
        for index in range(self.params.num_sequences):
            output = CompletionOutput(
                index=index,
                text="",
                token_ids=[],
                finish_reason="error",
                cumulative_logprob=0.0 if wants else None,
                logprobs=None if self.params.logprobs is None else [],
            )
            own = None if matcher is None else matcher.fork()
            self.results.append(_Result(output, stream.fork(), own))

    def accept(self, index: int, token: int, logprobs: TokenLogprobs | None) -> bool:
        """Add a token to a result, notify the listener, and return whether the token ended the result.

        Raises:
            RequestError: the grammar doesn't allow the token, or the grammar ends before `min_tokens`.
        """
        result, params = self.results[index], self.params
        output = result.output
        output.token_ids.append(token)
        if logprobs is not None and output.cumulative_logprob is not None:
            output.cumulative_logprob += logprobs.logprob
        if output.logprobs is not None and logprobs is not None:
            output.logprobs.append(logprobs)
        count = len(output.token_ids)
        ends = token in self.end_ids and count >= params.min_tokens
        text = result.stream.push(token, ends=ends)
        if result.stream.stop is not None:
            text += result.end("stop", result.stream.stop)
        elif ends:
            text += result.end("stop", token if token in params.stop_token_ids else None)
        else:
            if result.matcher is not None:
                result.matcher.accept(token)
            if result.matcher is not None and result.matcher.is_finished:
                if count < params.min_tokens:
                    raise self.too_short(count)
                text += result.end("stop")
            elif count == self.max_tokens:
                text += result.end("length")
        if self.listener is not None and self.streams:
            self._tell(self.listener, result, text)
        return result.is_done

    def _tell(self, listener: Listener, result: _Result, text: str) -> None:
        """Send a result's last token, and the text that the token completed, to the listener."""
        output = result.output
        if self.params.echo and len(output.token_ids) == 1:
            text = (self.prompt or "") + text
        logprobs = None if output.logprobs is None else output.logprobs[-1:]
        piece = self._piece(output, text, output.token_ids[-1:], logprobs, ends=result.is_done)
        if output.index == 0 and len(output.token_ids) == 1:
            cached, total = self.cached_tokens, self.prompt_length
            piece.prompt = PromptUse(total=total, cached=cached, pinned=self.pinned_tokens)
        listener(piece)

    def _piece(
        self,
        output: CompletionOutput,
        text: str,
        tokens: list[int],
        logprobs: list[TokenLogprobs] | None,
        *,
        ends: bool,
    ) -> Piece:
        return Piece(
            request_id=self.id,
            index=output.index,
            text=text,
            token_ids=tokens,
            logprobs=logprobs,
            finish_reason=output.finish_reason if ends else None,
            stop_reason=output.stop_reason if ends else None,
        )

    def complete(self, now: float, error: KVQError | None, reason: FinishReason | None) -> RequestOutput:
        """Return the request's output. `reason`: finish reason for results that have not ended yet."""
        self.timing.e2e_s = now - self.timing.arrival_s
        if self.beams is not None and reason is None:
            outputs = [self._of_beam(i, found) for i, found in enumerate(self.beams.results())]
        else:
            outputs = self._outputs(reason)
        prompt = (self.prompt or "") if self.params.echo else ""
        for output in outputs:
            output.text = prompt + output.text
        return RequestOutput(
            request_id=self.id,
            prompt=self.prompt,
            prompt_token_ids=self.tokens.tolist(),
            outputs=outputs,
            prompt_logprobs=self.prompt_logprobs,
            receipt=self._receipt(outputs if self.beams is not None else [r.output for r in self.results]),
            timing=self.timing,
            error=error,
            vector=self.vector,
        )

    def _outputs(self, reason: FinishReason | None) -> list[CompletionOutput]:
        if not self.results:  # the request never began
            return [
                CompletionOutput(index=i, text="", token_ids=[], finish_reason=reason or "error")
                for i in range(self.params.n)
            ]
        for result in self.results:
            if reason is not None and not result.is_done:
                result.end(reason)
            result.output.text = result.stream.text
        outputs = [result.output for result in self.results]
        if self.beams is not None:
            outputs = outputs[: self.params.n]
        if self.params.best_of is not None:
            # By their mean log-probabilities
            outputs.sort(key=lambda x: (x.cumulative_logprob or 0.0) / max(1, len(x.token_ids)), reverse=True)
            outputs = outputs[: self.params.n]
            for index, output in enumerate(outputs):
                output.index = index
        return outputs

    def _of_beam(self, index: int, found: Beam) -> CompletionOutput:
        stream = self.results[index].stream
        for token in found.tokens:
            stream.push(token, ends=token in self.end_ids)
        stream.finish()
        last = found.tokens[-1]
        assert found.finish_reason is not None, "it is finished"
        return CompletionOutput(
            index=index,
            text=stream.text,
            token_ids=list(found.tokens),
            finish_reason=found.finish_reason,
            stop_reason=last if last in self.params.stop_token_ids else None,
            cumulative_logprob=found.logprob,
        )

    def _receipt(self, generated: list[CompletionOutput]) -> Receipt:
        usage, from_disk = self.usage, min(self.disk_tokens, self.cached_tokens)  # the rest was evicted again
        return Receipt(
            prompt_tokens=self.prompt_length,
            cached_tokens=self.cached_tokens,
            host_tokens=min(self.host_tokens, self.cached_tokens - from_disk),
            disk_tokens=from_disk,
            cold_tokens=self.cold_tokens,
            pinned_tokens=self.pinned_tokens,
            generated_tokens=0 if self.pools else sum(len(output.token_ids) for output in generated),
            recomputed_tokens=usage.recomputed,
            restored_tokens=usage.restored,
            blocks=usage.own,
            shared_blocks=usage.shared,
            copied_blocks=usage.copied,
            peak_blocks=usage.peak,
            peak_bytes=usage.peak_bytes,
            preemptions=self.preemptions,
            drafted_tokens=self.drafted_tokens,
            accepted_tokens=self.accepted_tokens,
            miss=self.miss,
        )


def as_job(request: Request) -> Job:
    """Cast a request of the engine's scheduler to Job; the engine queues no other type."""
    assert isinstance(request, Job), "the engine queues jobs"
    return request
