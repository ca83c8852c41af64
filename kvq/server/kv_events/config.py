"""Addresses at which block events are published."""

import re
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Literal

from kvq.errors import ConfigError

Form = Literal["maps", "arrays"]  # the format of vLLM 0.32, and of earlier versions
_TCP = re.compile(r"tcp://(.+):([0-9]{1,5})")


@dataclass(frozen=True, kw_only=True, slots=True)
class EventsConfig:
    """Addresses to listen on, in ZeroMQ's notation; see `listening`."""

    address: str
    topic: str = ""
    replay: str | None = None  # address at which subscribers request missed batches
    form: Form = "maps"  # encoding of the events in a batch

    def __post_init__(self) -> None:
        if self.replay == self.address:
            raise ConfigError(
                f"--kv-events and --kv-events-replay need an address each, both are {self.address}"
            )

    @property
    def warning(self) -> str:
        """Warning to log if an address is reachable from other machines."""
        return f"they hold the token ids of prompts; whoever reaches {self.address} can read them"

    @property
    def is_local(self) -> bool:
        """True if only programs on this machine can subscribe."""
        return all(_is_local(address) for address in (self.address, self.replay) if address is not None)


def listening(text: str, option: str) -> str:
    """Return an address to listen on: a port on loopback, `tcp://HOST:PORT`, or `ipc://PATH`.

    Raises:
        ConfigError: `text` is none of these.
    """
    address = f"tcp://127.0.0.1:{text}" if text.isdecimal() else text
    if address.startswith("ipc://") and len(address) > len("ipc://"):
        return address
    found = _TCP.fullmatch(address)
    if found is None or not 1 <= int(found[2]) <= 65535:
        raise ConfigError(
            f"{option} must be a port, tcp://HOST:PORT or ipc://PATH to listen on, got {text!r}; "
            f"use 5557, or tcp://*:5557 for other machines"
        )
    return address


def _is_local(address: str) -> bool:
    found = _TCP.fullmatch(address)
    if found is None or found[1] == "localhost":
        return True
    try:
        return ip_address(found[1].strip("[]")).is_loopback
    except ValueError:  # a host name, or *
        return False
