"""What a step was like, as plain data for whoever subscribes."""

from dataclasses import dataclass

from kvq.scheduler import Snapshot


@dataclass(frozen=True, kw_only=True, slots=True)
class StepStats(Snapshot):
    """One step. Times in seconds; counts of requests and tokens at its end unless said otherwise.

    On a GPU `attention_s` and `linear_s` are None: kernels run while the host goes on.
    """

    number: int
    decode_tokens: int
    prefill_tokens: int
    decode_context: int  # tokens that the decodes see together, windows aside
    prefill_context: int  # pairs of a prefill token and one that it sees, likewise
    sampled: int  # sequences that get a token
    finished: int  # in this step
    utilization: float | None  # filled slots of live blocks; None unless it is asked for
    seconds: float  # the whole step
    scheduling_s: float
    forward_s: float
    attention_s: float | None  # of the forward pass: writing to blocks and attending from them
    linear_s: float | None  # of the forward pass: Linear layers; None unless somebody subscribed
    sampling_s: float

    @property
    def other_s(self) -> float:
        """The rest: detokenization, bookkeeping, subscribers."""
        return max(0.0, self.seconds - self.scheduling_s - self.forward_s - self.sampling_s)

    @property
    def hit_rate(self) -> float:
        """Prompt tokens found in the prefix index / prompt tokens admitted, since the start."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0
