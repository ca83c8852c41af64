"""Credentials: API keys and the TLS certificate, as last read from their files."""

import logging
import re
import secrets
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from kvq.errors import ConfigError
from kvq.fileio import check_secret
from kvq.server.logs import log_event

_log = logging.getLogger("kvq")
WATCHER = "metrics"  # tenant of keys that may only read metrics and health
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#@\s]+")


@dataclass(frozen=True, kw_only=True, slots=True)
class Access:
    """Keys, host names and origins whose requests are accepted."""

    api_keys: tuple[str, ...] = ()  # keys of tenants, in order
    metrics_keys: tuple[str, ...] = ()  # may read metrics and health, and nothing else
    hosts: frozenset[str] | None = None  # names of this server, without ports; None: any
    kv_formats: Mapping[str, str] = field(default_factory=dict)  # of clients' keys that have one
    origins: frozenset[str] = frozenset()  # of pages that may call the server: https://a.org; *: all

    def __post_init__(self) -> None:
        for origin in self.origins:
            if origin != "*" and not _ORIGIN.fullmatch(origin):
                raise ConfigError(f"{origin!r} is no origin; write it as https://a.org or https://a.org:8443")
        if self.metrics_keys and not self.api_keys:
            raise ConfigError(
                "--metrics-key-file needs --api-key-file, --api-key or KVQ_API_KEY: without them anybody "
                "may send any request"
            )
        if set(self.metrics_keys) & set(self.api_keys):
            raise ConfigError(
                "a key of --metrics-key-file allows everything: it is among the clients' keys, too"
            )


def tls_context(certificate: Path, key: Path) -> ssl.SSLContext:
    """Return a TLS context that uses the current PEM files; both paths may name the same file.

    Raises:
        ConfigError: the files are not a certificate and its unencrypted key, or other users may read the key.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(certificate, key, password=lambda: b"")
        holds_key = b"PRIVATE KEY-----" in certificate.read_bytes()
    except (OSError, ValueError) as error:  # SSLError is an OSError
        is_one = certificate == key
        files = f"{certificate} is" if is_one else f"{certificate} and {key} are"
        advice = "; name a key that has a file of its own with --ssl-keyfile" if is_one else ""
        raise ConfigError(f"{files} no PEM certificate and its open key: {error}{advice}") from error
    check_secret(key)
    if holds_key:
        check_secret(certificate)
    return context


class Credentials:
    """Valid keys. A key keeps its tenant while the key is in the file; no other key ever gets this tenant."""

    def __init__(
        self,
        access: Access,
        tls: Callable[[], ssl.SSLContext] | None = None,
        read: Callable[[], Access] | None = None,
    ) -> None:
        """`tls` and `read` return the current content of the files."""
        self.context = None if tls is None else tls()  # used by handshakes that start from now on
        self._tls, self._read = tls, read
        self._tenants: dict[bytes, str] = {}
        self._kv_formats: dict[str, str] = {}  # by tenant
        self._num_tenants = 0
        self._take(access)

    def read_again(self) -> None:  # D329: on SIGHUP, all files or none; a new key is a new tenant
        """Reload the files; if one of them can't be used, log the error and keep all current credentials."""
        try:
            access = None if self._read is None else self._read()
            context = None if self._tls is None else self._tls()
        except ConfigError as error:
            _log.error("keys and certificate stay as they were: %s", error)
            return
        self.context = context
        if access is not None:
            self._take(access)
        log_event("reread", keys=len(self._tenants), certificate=context is not None)

    def tenant(self, given: bytes) -> str | None:
        """Return the tenant of a key, or None for an unknown key; "" if the server has no keys."""
        if not self._tenants:
            return ""
        found = [tenant for key, tenant in self._tenants.items() if secrets.compare_digest(given, key)]
        return found[0] if found else None

    def kv_format(self, tenant: str) -> str | None:
        """Return the KV format of a tenant's requests that name none, or None for the server's."""
        return self._kv_formats.get(tenant)

    def _take(self, access: Access) -> None:
        before, self._tenants = self._tenants, {key.encode(): WATCHER for key in access.metrics_keys}
        for key in map(str.encode, access.api_keys):
            if before.get(key, WATCHER) == WATCHER:
                before[key] = f"key-{self._num_tenants}"
                self._num_tenants += 1
            self._tenants[key] = before[key]
        self._kv_formats = {self._tenants[key.encode()]: kv for key, kv in access.kv_formats.items()}
