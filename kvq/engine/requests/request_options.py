"""What a request comes with beside its prompt: parameters, whose it is, what shall stay cached."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvq.engine.params import MAX_SALT, PrefixPin, SamplingParams
from kvq.errors import RequestError
from kvq.scheduler import Priority


def as_priority(priority: str | Priority) -> Priority:
    """A priority from its name.

    Raises:
        RequestError: no such class.
    """
    if isinstance(priority, Priority):
        return priority
    names = {p.name.lower(): p for p in Priority}
    if priority not in names:
        raise RequestError(f"priority must be one of {', '.join(names)}, got {priority!r}")
    return names[priority]


@dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    """Whose a request is, and how urgent.

    `cache_salt`: it shares cached prefixes only with requests of its tenant that name the same, of 1 to 1,024
    characters.

    Raises:
        RequestError: one of another type, or a priority that there is none of.
    """

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


@dataclass(frozen=True, kw_only=True, slots=True)
class Terms:
    """What a request asks for beside its prompt. `pins`: prefixes of the prompt that shall stay cached, for
    its tenant or its salt only.
    """

    params: SamplingParams = field(default_factory=SamplingParams)
    origin: Origin = Origin()
    pins: Sequence[PrefixPin] = ()
