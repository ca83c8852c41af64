"""Prefix miss: the first token of a prompt that was not cached, its place in a chat, and the cause."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from operator import itemgetter
from typing import Any, Literal, get_args

Cause = Literal[
    "new_text",  # longer than anything cached, such as a turn that was added: no fault
    "changed_text",  # other tokens follow the same ones in the cache
    "template",  # the same, within text that the chat template writes: a date, a list of tools, a role
    "salt",  # the tenant sent the same first block under another salt
    "evicted",  # it was cached and had to make room
    "too_old",  # it was cached and reached its maximum age
    "no_snapshot",  # tokens are cached, but not the recurrent state or the window that must be there, too
    "format",  # it is kept, but more of it in fewer bits than `kv_cold_share` allows
    "limit",  # the request forbids reuse there, since it needs log-probabilities of the prompt
    "off",  # prefix caching is off
]
CAUSES: tuple[Cause, ...] = get_args(Cause)
Range = tuple[int, int]  # first and last token that differ if a message's text does


@dataclass(kw_only=True, slots=True)  # one per request: a frozen one would take 1 us more to create
class PrefixMiss:
    """Place and cause of a prefix miss. It never depends on prompts of other tenants."""

    cause: Cause
    token: int  # index of the first prompt token that left what is cached: so many are common
    lost_tokens: int = 0  # that were cached after it and are gone, or can't be used without a snapshot
    seconds_ago: float | None = None  # since they were evicted or became too old
    evicted_for: str = ""  # id of the tenant's own request that took the room, or in words who did
    message: int | None = None  # number of the chat message that has the token, or follows it; from 1
    part: Literal["", "text", "template"] = ""  # of a chat: the message's text, or what the template writes

    def placed(self, texts: Sequence[Range]) -> "PrefixMiss":
        """Return the miss with its place in a chat, given the first and last token of each text."""
        if not texts:
            return self
        number = bisect_right(texts, self.token, key=itemgetter(0))
        if number and self.token <= texts[number - 1][1]:
            return replace(self, message=number, part="text")
        following = number + 1 if number < len(texts) else None
        cause: Cause = "template" if self.cause == "changed_text" else self.cause
        return replace(self, cause=cause, message=following, part="template")

    def facts(self) -> dict[str, Any]:
        """Return the cause, the token, and the other fields that say something."""
        return {name: value for name, value in asdict(self).items() if value or name == "token"}


OFF = PrefixMiss(cause="off", token=0)
