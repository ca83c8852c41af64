"""Request options: parameters, owner, priority and pins, from the HTTP body to the engine."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvq.engine.params import MAX_SALT, PrefixPin, SamplingParams
from kvq.errors import RequestError
from kvq.scheduler import Priority


def as_priority(priority: str | Priority) -> Priority:
    """Return the priority of a name.

    Raises:
        RequestError: an unknown name.
    """
    if isinstance(priority, Priority):
        return priority
    names = {p.name.lower(): p for p in Priority}
    if priority not in names:
        raise RequestError(f"priority must be one of {', '.join(names)}, got {priority!r}")
    return names[priority]


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestOptions:
    """Everything a request comes with beside its prompt; checked here, once.

    `pins`: prefixes of the prompt that stay cached, for the request's tenant or salt only.
    `cache_salt`: 1 to 1,024 characters; the request shares cached prefixes only with requests of its tenant
    that name the same salt.

    Raises:
        RequestError: a value of another type, or an unknown priority.
    """

    params: SamplingParams = field(default_factory=SamplingParams)
    pins: Sequence[PrefixPin] = ()
    priority: str | Priority = Priority.INTERACTIVE
    tenant: str = ""
    shared_salt: str | None = None
    cache_salt: str | None = None
    request_id: str | None = None

    def __post_init__(self) -> None:
        for name in ("tenant", "shared_salt", "request_id"):
            value = getattr(self, name)
            if not isinstance(value, str) and (value is not None or name == "tenant"):
                raise RequestError(f"{name} must be a text, got {value!r}")
        salt = self.cache_salt
        if salt is not None and not (isinstance(salt, str) and 1 <= len(salt) <= MAX_SALT):
            raise RequestError(f"cache_salt must be a text of 1 to {MAX_SALT} characters, got {salt!r:.100}")
        object.__setattr__(self, "priority", as_priority(self.priority))


DEFAULT_OPTIONS = RequestOptions()
