"""Scheduler request: a prompt, and the branches that extend it."""

from array import array
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from enum import Enum, IntEnum

from kvq.blockmgr import BlockUse, PrefixMiss, PrefixQuery, Sequence
from kvq.blockmgr.prefix import tagged
from kvq.errors import KVQError


class Priority(IntEnum):
    """Urgency class of a request."""

    INTERACTIVE = 0  # a user waits for every token
    BATCH = 1  # only the complete result counts


class RequestState(Enum):
    """State of a request in its life cycle."""

    WAITING = "waiting"  # has no blocks
    RUNNING = "running"  # at least one of its branches has blocks
    PREEMPTED = "preempted"  # lost its blocks, but keeps its place
    ENDED = "ended"


@dataclass(kw_only=True, slots=True, eq=False)
class Branch:
    """Result in progress: the tokens of the prompt, and the tokens generated after them.

    `sequence` is None while the branch has no blocks. Tokens beyond `sequence.length` have yet to be
    computed: many in a prefill, one in a decode.
    """

    request: "Request"
    tokens: "array[int]"
    row: int | None = None  # its index in persistent tables, if it has one
    sequence: Sequence | None = None
    is_done: bool = False  # True after it has ended
    lost_tokens: int = 0  # computed before a preemption that discarded all of them
    num_drafts: int = 0  # tokens to draft after the known ones in the next step
    rewound: int = 0  # accepted drafts whose recurrent states were not kept

    @property
    def num_generated(self) -> int:
        """Number of tokens after the prompt."""
        return len(self.tokens) - len(self.request.tokens)

    @property
    def is_last(self) -> bool:
        """True if the next token is the last one that the branch may generate."""
        assert self.request.max_tokens is not None, "set when the request was added"
        return self.num_generated + 1 >= self.request.max_tokens

    @property
    def most_drafts(self) -> int:  # D254: only a number here; the engine has the tokens
        """Maximum number of drafts for the next step, which adds one more token, possibly the last."""
        assert self.request.max_tokens is not None, "set when the request was added"
        return self.request.max_tokens - self.num_generated - 1 if self.request.is_forked else 0

    @property
    def goal(self) -> int:
        """Number of tokens to compute before the next token can be chosen, or before the request can fork."""
        return len(self.tokens) if self.request.is_forked else len(self.request.tokens)

    @property
    def is_sampled(self) -> bool:
        """True if a token is sampled when the goal is reached; False for a fork that is resuming."""
        return self.request.is_forked or len(self.tokens) == len(self.request.tokens)


@dataclass(kw_only=True, slots=True, eq=False)
class Request:
    """Request with its state, which only the scheduler changes."""

    id: str
    tokens: "array[int]"  # of the prompt
    max_tokens: int | None  # to generate per branch; None for as many as context and pool allow
    most_tokens: int | None = None  # upper limit if max_tokens is None
    num_branches: int = 1
    priority: Priority = Priority.INTERACTIVE
    tenant: str = ""
    shared_salt: str | None = None
    cache_salt: str | None = None
    tag: int = 0  # of its adapter in the prefix index; 0: the base model
    adapted_from: int = 0  # first token that its adapter changes
    max_reuse: int | None = None  # limit for prompt tokens from the cache; 0: all are computed
    max_chunk: int | None = None  # limit for prefill tokens of this request in one step
    arrival_s: float = 0.0
    state: RequestState = RequestState.WAITING
    branches: list[Branch] = field(default_factory=list)
    query: PrefixQuery | None = None  # of the tokens that its first branch has to compute
    is_forked: bool = False  # True once all branches exist; until then, the first computes the prompt
    place: int = -1  # order of first admission; the oldest requests keep their blocks and resume first
    preempted_s: float = 0.0  # time of the last preemption
    admitted_s: float | None = None
    usage: BlockUse = field(default_factory=BlockUse)  # of all its branches
    cached_tokens: int = 0  # prompt tokens found in the prefix index
    host_tokens: int = 0  # tokens that came back from host memory for it
    disk_tokens: int = 0  # tokens that came back from the disk for it
    cold_tokens: int = 0  # tokens found there, also after a preemption, that were stored in fewer bits
    num_loads: int = 0
    texts: Items[tuple[int, int]] = ()  # of a chat: token ranges of the messages' texts in the prompt
    miss: PrefixMiss | None = None  # why no more tokens were cached, if more could have been
    preemptions: int = 0
    error: KVQError | None = None  # the reason if the request was given up

    def keyed(self, tokens: "array[int]") -> "array[int]":
        """Return some of its first tokens as the prefix index knows them."""
        return tagged(tokens, self.tag, self.adapted_from)

    def make_branches(self, *, max_tokens: int, now: float) -> None:
        """Create the branches of a newly queued request, each for up to `max_tokens` generated tokens."""
        self.max_tokens = max_tokens
        self.is_forked = self.num_branches == 1
        self.branches = [Branch(request=self, tokens=self.tokens[:]) for _ in range(self.num_branches)]
        self.arrival_s = now

    @property
    def is_preempted(self) -> bool:
        """True while the request is waiting to resume."""
        return self.state is RequestState.PREEMPTED

    @property
    def prompt_length(self) -> int:
        """Number of prompt tokens."""
        return len(self.tokens)

    @property
    def live(self) -> list[Branch]:
        """Branches that have not ended."""
        return [branch for branch in self.branches if not branch.is_done]

    @property
    def limit(self) -> int:
        """Maximum total number of tokens of a branch, including the prompt."""
        assert self.max_tokens is not None, "set when the request was added"
        return len(self.tokens) + self.max_tokens
