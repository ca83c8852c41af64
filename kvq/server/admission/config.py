"""Server configuration: address, model, access and limits."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from ssl import SSLContext
from typing import TYPE_CHECKING, Any

from kvq.errors import ConfigError
from kvq.fileio import check_secret
from kvq.models.templates.pairs import YES_NO
from kvq.server.admission.admission import AdmissionConfig
from kvq.server.admission.rate_limits import TenantLimits
from kvq.server.http.credentials import Access
from kvq.server.http.guard import LOOPBACK
from kvq.server.kv_events.config import EventsConfig
from kvq.server.logs import LogConfig
from kvq.server.recording import Recorder
from kvq.server.tools.formats.registry import find_format
from kvq.server.tools.thoughts import check_name

if TYPE_CHECKING:  # their packages are not needed without them
    from prometheus_client import CollectorRegistry

    from kvq.server.overflow import Overflow
    from kvq.server.tracing import Tracing

LOCAL = ("127.0.0.1", "::1", "localhost")


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerConfig:
    """All options of `kvq serve`; the command checks the bounds of individual numbers."""

    model: str | Path = "tiny"
    kv: str = "auto"
    kv_also: tuple[str, ...] = ()  # formats that requests may ask for, besides `kv`
    kv_also_share: float = 0.2  # of the KV memory, for each of them
    guard_fallback: str | None = None  # of them, for new requests after an alert of the guard
    host: str = "127.0.0.1"
    port: int = 8000
    served_model_name: str | tuple[str, ...] | None = None  # responses use the first one
    access: Access = field(default_factory=Access)
    read_access: Callable[[], Access] | None = None  # returns `access` from the files' current content
    tls: Callable[[], SSLContext] | None = None  # returns the context for the current certificate
    admission: AdmissionConfig = field(default_factory=AdmissionConfig)
    tenants: TenantLimits = field(default_factory=TenantLimits)
    log: LogConfig = field(default_factory=LogConfig)
    max_connections: int = 4096  # lowered if the limit on open files requires it
    max_connections_per_address: int | None = None  # None: half of `max_connections`
    max_restarts: int = 5  # restarts of the engine within ten minutes
    kv_events: EventsConfig | None = None
    record: Callable[[], Recorder] | None = None  # opens the file of recorded chats
    tracing: "Callable[[], Tracing] | None" = None  # makes the tracer of requests
    overflow: "Callable[[CollectorRegistry], Overflow] | None" = None  # where refused requests go
    stored_responses: int = 1000  # of the Responses API, for later requests; 0: none
    stored_responses_bytes: int = 256 << 20  # most bytes of them
    metrics_names: tuple[str, ...] = ("kvq",)  # as `parse_names` returns them
    grace_s: float = 30.0  # time for running requests to finish after SIGTERM
    timeout_s: float | None = 600.0  # limit on a request, from its arrival at the engine
    chat_template: str | None = None  # text of a template that replaces the model's
    tool_call_parser: str = "auto"  # "auto": detected from the chat template; "none"; or a format name
    reasoning_parser: str = "auto"  # "auto": detected from the chat template or tokenizer; "none"; or a name
    strict_requests: bool = False  # refuse unknown fields instead of ignoring them
    generation_config: str = "auto"  # source of defaults for sampling; see `read_defaults`
    # True if control tokens in clients' texts take effect; in chats, in text from users, tools and documents
    trusts_chats: bool = False
    trusts_completions: bool = True
    adapter_folder: Path | None = None  # from which clients may load adapters; None: they may not
    engine: dict[str, Any] = field(default_factory=dict)  # options of `kvq.LLM`

    def __post_init__(self) -> None:
        if self.host not in LOCAL and not self.access.api_keys:
            raise ConfigError(
                f"--host {self.host} can be reached from other machines: give --api-key-file or "
                f"KVQ_API_KEY, or stay on 127.0.0.1"
            )
        if self.served_model_name == "" or "" in tuple(self.served_model_name or ()):
            raise ConfigError(
                "--served-model-name is empty; leave it out for the last part of the model's path"
            )
        if self.chat_template is None and self.engine.get("pooling") == "yes-no":
            object.__setattr__(self, "chat_template", YES_NO)
        if self.overflow is not None and self.engine.get("watermark", "off") != "off":
            raise ConfigError(
                "--overflow-to sends requests to a server that marks no texts; leave --watermark off"
            )
        if self.adapter_folder is not None and not self.adapter_folder.is_dir():
            raise ConfigError(f"--adapter-folder {self.adapter_folder} is no folder; create it first")
        _check_formats(self)
        find_format(self.tool_call_parser, "")
        check_name(self.reasoning_parser)


def _check_formats(config: ServerConfig) -> None:
    """Raise ConfigError unless the KV formats, their shares and the guard's fallback fit together."""
    kv, also, share = config.kv, config.kv_also, config.kv_also_share
    if len({kv, *also}) <= len(also):
        raise ConfigError(f"--kv-also names formats besides {kv}, each once; got {', '.join(also)}")
    if also and not 0 < share * len(also) < 1:
        raise ConfigError(
            f"--kv-also-share {share:g} for each of {len(also)} formats leaves nothing for {kv}; give less"
        )
    if config.guard_fallback is not None:
        if config.guard_fallback not in also:
            raise ConfigError(
                f"--guard-fallback {config.guard_fallback} needs memory of its own; name it in --kv-also, too"
            )
        if not config.engine.get("guard"):
            raise ConfigError("--guard-fallback is what an alert of the guard does; give --guard 0.01, too")


def allowed_hosts(host: str, given: tuple[str, ...]) -> frozenset[str] | None:
    """Return the accepted Host headers: `given` and loopback, or None to accept any.

    None is returned only if `host` is public and `given` is empty. Without the check of Host headers, a web
    page could reach a server on loopback through the page's own host name.
    """
    if not given and host not in LOCAL:
        return None
    return frozenset({name.lower() for name in given} | set(LOOPBACK))


def read_keys(path: Path) -> dict[str, str | None]:
    """Return the API keys in a file, in order, and the KV format of each that has one.

    Each line has a key, and possibly ` kv_format=int8` after it; lines that begin with # are comments.

    Raises:
        ConfigError: the file does not exist, contains no key, or is readable by other users (`check_secret`).
    """
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf8").splitlines()]
        parts = [line.partition(" kv_format=") for line in lines if line and not line.startswith("#")]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} can't be read: {error}") from error
    keys = {key.strip(): kv.strip() or None for key, _, kv in parts}
    if not keys:
        raise ConfigError(f"{path} holds no API key; write one on each line")
    check_secret(path)
    return keys
