"""Prompts as text or token ids, and request options: parameters, tenant, priority and pins."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any, TypedDict, cast

from kvq.blockmgr.prefix import token_array
from kvq.engine.params import MAX_PIN_S, MAX_SALT, MAX_SESSION, PrefixPin, SamplingParams
from kvq.errors import RequestError, not_one_of
from kvq.models.parts.inputs import check_holds_items, check_token_ids, check_unicode
from kvq.scheduler import Priority

Prompt = str | Sequence[int]  # text, or token ids
_PROMPT = "a prompt is a text or a list of token ids"


def as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Convert one prompt or several, passed as lists, arrays or tensors, to a list of prompts.

    Raises:
        RequestError: `prompts` contains neither prompts nor token ids.
    """
    if isinstance(prompts, str):
        return [prompts]
    if hasattr(prompts, "tolist") and not isinstance(prompts, memoryview):
        prompts = prompts.tolist()  # an array of token ids, or of prompts
    check_holds_items(prompts, _PROMPT)
    items = list(prompts)
    if items and all(isinstance(item, Integral) for item in items):
        return [cast(list[int], items)]
    return cast(list[Prompt], items)


def prompt_tokens(prompt: Prompt, tokenizer: Any, vocab_size: int) -> "array[int]":
    """Return the token ids of a prompt.

    Raises:
        RequestError: the prompt is neither text nor token ids, is empty, isn't Unicode, or has an id outside
            the vocabulary.
    """
    if isinstance(prompt, array) and prompt.typecode == "I":  # from the server
        tokens = prompt
    elif isinstance(prompt, str):
        check_unicode(prompt, "the prompt")
        tokens = token_array(tokenizer(prompt, return_attention_mask=False)["input_ids"])
    else:
        check_token_ids(prompt, _PROMPT)
        tokens = token_array(prompt)
    check_known(tokens, vocab_size)
    return tokens


def check_known(tokens: Sequence[int], vocab_size: int) -> None:
    """Raise RequestError if a prompt has no tokens or contains a token outside the vocabulary."""
    if not tokens:
        raise RequestError("the prompt is empty; give some text to go on from")
    if max(tokens) >= vocab_size:
        raise RequestError(
            f"token id {max(tokens)} is outside the vocabulary of 0 to {vocab_size - 1}; "
            f"if a tokenizer made it, it is not this model's"
        )


def as_priority(priority: str | Priority) -> Priority:
    """Return the priority with a given name.

    Raises:
        RequestError: the name is unknown.
    """
    if isinstance(priority, Priority):
        return priority
    names = {p.name.lower(): p for p in Priority}
    if priority not in names:
        raise RequestError(not_one_of("priority", priority, names))
    return names[priority]


POOLING_PARAMS = SamplingParams(max_tokens=1, temperature=0.0)  # the token is dropped


class RequestFields(TypedDict, total=False):
    """Fields of `RequestOptions` that callers may leave out."""

    pins: Sequence[PrefixPin]
    priority: str | Priority
    tenant: str
    shared_salt: str | None
    cache_salt: str | None
    request_id: str | None
    session: str | None
    retain_s: float | None
    adapter: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestOptions:
    """Options of a request, that is, everything except its prompt; their types are checked here.

    `pins`: prefixes of the prompt to keep cached, for the request's tenant or salt only.
    `cache_salt`: 1 to 1,024 characters; the request shares cached prefixes only with requests of its tenant
    that have the same salt.
    `session`: name of the conversation, 1 to 256 characters. `retain_s`: seconds for which its KV should be
    kept after the request. See `kvq.engine.requests.sessions`. `adapter`: name of the LoRA adapter to use.

    Raises:
        RequestError: a value has the wrong type, or the priority is unknown.
    """

    params: SamplingParams = field(default_factory=SamplingParams)
    pins: Sequence[PrefixPin] = ()
    priority: str | Priority = Priority.INTERACTIVE
    tenant: str = ""
    shared_salt: str | None = None
    cache_salt: str | None = None
    request_id: str | None = None
    session: str | None = None
    retain_s: float | None = None
    adapter: str | None = None  # None: the base model
    kv_format: str | None = None  # in servers with several; None: the default
    texts: tuple[tuple[int, int], ...] = ()  # of a chat's messages, as token ranges, to tell where it missed
    pools: bool = False  # the result is an embedding or a score; `params` are then POOLING_PARAMS
    dimensions: int | None = None  # of an embedding; None: all

    def __post_init__(self) -> None:
        for name in ("tenant", "shared_salt", "request_id", "adapter"):
            value = getattr(self, name)
            if not isinstance(value, str) and (value is not None or name == "tenant"):
                raise RequestError(f"{name} must be a text, got {value!r}")
        salt = self.cache_salt
        if salt is not None and not (isinstance(salt, str) and 1 <= len(salt) <= MAX_SALT):
            raise RequestError(f"cache_salt must be a text of 1 to {MAX_SALT} characters, got {salt!r:.100}")
        session, retain = self.session, self.retain_s
        if session is not None and not (isinstance(session, str) and 1 <= len(session) <= MAX_SESSION):
            raise RequestError(
                f"session must be a text of 1 to {MAX_SESSION} characters, got {session!r:.99}"
            )
        if retain is not None and not (isinstance(retain, int | float) and 0 <= retain <= MAX_PIN_S):
            raise RequestError(f"retain_s must be 0 to {MAX_PIN_S} seconds, got {retain!r:.100}")
        if retain is not None and session is None:
            raise RequestError("retain_s needs the name of a session; give session too, or leave it out")
        object.__setattr__(self, "priority", as_priority(self.priority))
        if self.pools:
            object.__setattr__(self, "params", POOLING_PARAMS)


DEFAULT_OPTIONS = RequestOptions()
