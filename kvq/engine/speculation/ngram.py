"""N-gram drafting: finds an earlier occurrence of the last tokens, and proposes the tokens that followed it.

Sources: Saxena 2023, "Prompt Lookup Decoding"; Oliaro et al. 2024, "SuffixDecoding", for outputs of other
requests.
"""

from array import array
from collections import OrderedDict
from collections.abc import Sequence

from kvq.engine.requests.request_state import Job
from kvq.engine.sampling.sampler import Drafted
from kvq.engine.speculation.drafter import Proposer
from kvq.scheduler import Branch, StepPlan

_LENGTHS = (8, 4, 3, 2)  # of n-grams, longest first
_AT_ONCE = 4096  # tokens indexed per step, so that a long prompt does not delay other requests
_MOST_TOKENS = 1 << 14  # output tokens per tenant; at twice as many, the older half is dropped
_MOST_IN_ALL = 1 << 17  # over all tenants; a token takes about 600 bytes, most of them in the dictionary


class NGrams:
    """Text with the last position of each of its n-grams. Each token costs a few dictionary entries."""

    def __init__(self) -> None:
        self.tokens = array("I")
        self._last: dict[bytes, int] = {}  # n-gram -> index after its last occurrence before the end
        self._indexed = 0  # number of tokens whose n-grams are indexed

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens."""
        self.tokens.extend(tokens)

    def following(self, context: "array[int]", count: int) -> list[int]:
        """Return up to `count` tokens that followed the longest matching suffix of `context`, or [].

        If the text ends before `count` tokens, it is continued periodically, as if it repeated itself.
        """
        self._index()
        for length in _LENGTHS if count else ():
            if len(context) < length:
                continue
            at = self._last.get(context[-length:].tobytes())
            if at is not None:
                return self._from(at, count)
        return []

    def _index(self) -> None:
        """Index more n-grams that end before the last token, so that each one's next token is known."""
        tokens, last, first = self.tokens, self._last, max(self._indexed, 1)
        until = min(len(tokens), first + _AT_ONCE)
        for end in range(first, until):
            for length in _LENGTHS:
                if end >= length:
                    last[tokens[end - length : end].tobytes()] = end
        self._indexed = max(self._indexed, until)

    def _from(self, at: int, count: int) -> list[int]:
        found = self.tokens[at : at + count].tolist()
        period = len(self.tokens) - at
        while len(found) < count:
            found.append(found[len(found) - period])
        return found


class _Recent:
    """Outputs of ended requests, keyed by owner. Other owners can't use them: timing would reveal content."""

    def __init__(self, most_tokens: int = _MOST_TOKENS, most_in_all: int = _MOST_IN_ALL) -> None:
        self._most = most_tokens
        self._most_in_all = most_in_all
        self._total = 0
        self._texts: OrderedDict[tuple[str, str | None], NGrams] = OrderedDict()

    def add(self, owner: tuple[str, str | None], tokens: Sequence[int]) -> None:
        """Store the output of a tenant's request. The least recently active tenants are evicted."""
        if not tokens:
            return
        text = self._texts.setdefault(owner, NGrams())
        self._texts.move_to_end(owner)
        self._total -= len(text.tokens)
        text.extend(tokens)
        if len(text.tokens) > 2 * self._most:
            newer = NGrams()
            newer.extend(text.tokens[-self._most :])
            text = self._texts[owner] = newer
        self._total += len(text.tokens)
        while self._total > self._most_in_all and len(self._texts) > 1:
            _, oldest = self._texts.popitem(last=False)
            self._total -= len(oldest.tokens)

    def of(self, owner: tuple[str, str | None]) -> NGrams | None:
        """Return the outputs that a request of this owner may use, or None if there are none."""
        return self._texts.get(owner)


class Lookup(Proposer):
    """Proposer that searches the request's text and its tenant's recent outputs for the last tokens."""

    takes_passes = False

    def __init__(self) -> None:
        self._texts: dict[Branch, NGrams] = {}
        self._recent = _Recent()
        self._found: dict[Branch, list[int]] = {}

    def most(self, branch: Branch, job: Job, limit: int) -> int:
        """Return the number of drafts that were found and that the grammar, if any, allows."""
        text = self._texts.setdefault(branch, NGrams())
        text.extend(branch.tokens[len(text.tokens) :])
        found = text.following(branch.tokens, limit)
        if not found and (others := self._recent.of(_owner(job))) is not None:
            found = others.following(branch.tokens, limit)
        matcher = job.results[job.index_of(branch)].matcher
        if found and matcher is not None:
            found = found[: matcher.num_allowed(found)]
        self._found[branch] = found
        return len(found)

    def propose(self, plan: StepPlan) -> dict[int, list[Drafted]]:
        """Return the drafts that `most` found."""
        return {
            i: [Drafted(token) for token in self._found[plan.branches[i]][:count]]
            for i, count in enumerate(plan.drafts)
            if count
        }

    def reset(self) -> None:
        """Drop all outputs of ended requests."""
        self._recent = _Recent()

    def forget(self, branch: Branch, job: Job) -> None:
        """Keep the branch's output for later requests."""
        self._texts.pop(branch, None)
        self._found.pop(branch, None)
        self._recent.add(_owner(job), branch.tokens[job.prompt_length :])


def _owner(job: Job) -> tuple[str, str | None]:  # D262: by tenant and salt, since timing would reveal hits
    return job.tenant, job.cache_salt
