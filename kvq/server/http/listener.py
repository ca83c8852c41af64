"""Listener that limits connections, in total and per address, including those in a TLS handshake."""

import asyncio
import contextlib
import errno
import logging
import resource
import socket
import ssl
from asyncio import sslproto
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from kvq.errors import ConfigError
from kvq.server.http.loop_budget import Again, LoopBudget

_log = logging.getLogger("kvq")
_HANDSHAKE_S = 10.0  # for a handshake to start, and again for it to finish
_MAX_HANDSHAKES = 256  # concurrent handshakes; silent connections cost only a descriptor
_SHARE = 0.5  # share of the loop's time for handshakes and parsing
_AT_A_TIME = 8  # connections accepted before the loop runs other work
_FOR_OTHERS = 32  # descriptors left for everything except connections
_AGAIN_S = 1.0  # delay after the system ran out of descriptors
_TO_SPEAK_S = 0.1  # minimum time that a silent connection is kept
_REST_S = 0.05  # before an incomplete ClientHello is checked again
_HEAD, _RECORD = 5, 5 + (16 << 10)  # bytes of a TLS record's header, and of a full record
_QUIET_S = 60.0  # time without problems before the next one is logged
_READ = 32 << 10  # bytes per read; asyncio would read 256 KB from each connection
_TLS_BUFFER = 16 << 10  # bytes per connection, one TLS record; asyncio would use 256 KB
_SHORT = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Stage(Enum):
    """Activity of a connection; the least active connections are closed first."""

    SILENT = "silent"  # before or during its handshake, or before its first request
    IDLE = "idle"  # between two requests
    BUSY = "busy"


@dataclass(slots=True, eq=False)
class Slot:
    """One connection, from accept to close."""

    listener: "Listener"
    address: str
    sock: socket.socket | None  # until its handshake starts
    since_s: float  # time of accept, or of the start of its handshake
    stage: Stage = Stage.SILENT
    timer: asyncio.TimerHandle | None = None  # deadline for its first bytes
    rest: asyncio.TimerHandle | None = None  # until an incomplete ClientHello is checked again
    task: asyncio.Task[None] | None = None  # its handshake
    transport: asyncio.Transport | None = None  # after its handshake

    def enter(self, stage: Stage) -> None:
        self.listener._move(self, stage)

    def leave(self) -> None:
        """Free the slot of a closed connection. Further calls do nothing."""
        self.listener._leave(self)

    def drop(self) -> None:
        """Close the connection immediately."""
        if self.transport is not None:
            self.transport.abort()
        elif self.task is not None:
            self.task.cancel()
        if self.sock is not None:
            self.listen_no_more()
            self.sock.close()
        self.leave()

    def listen_no_more(self) -> None:
        """Stop waiting for the first bytes of the connection."""
        if self.timer is not None and self.sock is not None:
            self.timer.cancel()
            self.timer = None
            if self.rest is not None:
                self.rest.cancel()
            asyncio.get_running_loop().remove_reader(self.sock)


@dataclass(slots=True)
class _Address:
    """Connections of one client address, grouped by stage and sorted by time in the stage, longest first."""

    slots: dict[Stage, OrderedDict[Slot, None]] = field(
        default_factory=lambda: {stage: OrderedDict() for stage in Stage}
    )

    def __len__(self) -> int:
        return sum(map(len, self.slots.values()))


class Listener:  # D306: asyncio accepts without a limit
    """Acceptor of connections that closes unused connections to make room for new ones.

    When all slots are taken, a silent connection is closed: the oldest of the address that has the most. If
    none is silent, the same rule applies to idle connections. If all are busy, clients wait in the system's
    queue. At its own limit, an address loses an unused connection, or its new connection is refused.
    """

    def __init__(
        self,
        sock: socket.socket,
        *,
        tls: Callable[[], ssl.SSLContext | None] | None,
        max_connections: int,
        max_per_address: int,
    ) -> None:
        """`tls` returns the context for a new handshake. `max_connections` is lowered to the number that
        the system's limit on descriptors allows.

        Raises:
            ConfigError: the limit on descriptors allows no connections.
        """
        self.budget = LoopBudget(_SHARE)  # for handshakes and heads
        self.body_budget = LoopBudget(_SHARE)  # separate, so heads never wait for bodies
        self.max_connections = min(max_connections, _room(max_connections))
        self._max_per_address = min(max_per_address, self.max_connections)
        self._sock = sock
        self._tls = tls
        self._addresses: dict[str, _Address] = {}
        self._num = dict.fromkeys(Stage, 0)
        self._handshakes: OrderedDict[Slot, None] = OrderedDict()
        self._spoken: OrderedDict[Slot, None] = OrderedDict()  # connections that wait for a handshake
        self._is_admitting = False  # a timer for `_admit_on` is set
        self._num_owed = 0  # handshakes that found no room when it was their turn
        self._make: Callable[[Slot], asyncio.Protocol] | None = None
        self._is_accepting = False
        self._troubled_s = -_QUIET_S
        if self.max_connections < max_connections:
            _log.info("%d connections at once, by the limit of open files (ulimit -n)", self.max_connections)

    @property
    def num_connections(self) -> int:
        """Number of open connections, including those still in a handshake."""
        return sum(self._num.values())

    def open(self, make: Callable[[Slot], asyncio.Protocol]) -> None:
        """Start accepting connections; `make` returns the protocol for a slot."""
        if self._tls is not None:
            sslproto.SSLProtocol.max_size = _TLS_BUFFER
        self._make = make
        self._sock.setblocking(False)
        self._resume()

    def close(self) -> None:
        """Stop accepting connections, and close those that have not finished their handshake."""
        self._pause()
        self._make = None
        self._sock.close()
        for slot in self._slots():
            if slot.stage is Stage.SILENT and slot.transport is None:
                slot.drop()

    def drop_all(self) -> None:
        for slot in self._slots():
            slot.drop()

    def _slots(self) -> list[Slot]:
        return [slot for one in self._addresses.values() for stage in Stage for slot in one.slots[stage]]

    def _resume(self) -> None:
        if self._make is not None and not self._is_accepting:
            self._is_accepting = True
            asyncio.get_running_loop().add_reader(self._sock, self._accept)

    def _pause(self, duration_s: float | None = None) -> None:
        """Stop accepting until a connection ends or becomes idle, or for `duration_s` at most."""
        if self._is_accepting:
            self._is_accepting = False
            asyncio.get_running_loop().remove_reader(self._sock)
        if duration_s is not None:
            asyncio.get_running_loop().call_later(duration_s, self._resume)

    def _accept(self) -> None:
        for _ in range(_AT_A_TIME):
            if not self._make_room():
                return
            try:
                sock, address = self._sock.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in _SHORT:
                    raise
                self._pause(_AGAIN_S)
                self._tell(f"no connection can be accepted: {error.strerror}")
                return
            self._enter(sock, str(address[0]))

    def _make_room(self) -> bool:
        """Return True if a connection can be accepted now; otherwise, pause until one can."""
        if self.num_connections < self.max_connections:
            return True
        for stage in (Stage.SILENT, Stage.IDLE):
            if self._num[stage]:
                most = max(self._addresses.values(), key=lambda one: len(one.slots[stage]))
                slot = next(iter(most.slots[stage]))  # the longest in this stage
                if (left_s := self._left_to_speak(slot)) > 0:
                    self._pause(left_s)
                    return False
                slot.drop()
                return True
        self._pause()
        self._tell(f"all {self.max_connections} connections are busy; new ones wait")
        return False

    def _left_to_speak(self, slot: Slot) -> float:
        if slot.stage is not Stage.SILENT:
            return 0
        return slot.since_s + _TO_SPEAK_S - asyncio.get_running_loop().time()

    def _enter(self, sock: socket.socket, address: str) -> None:
        loop = asyncio.get_running_loop()
        known = self._addresses.get(address)
        if known is not None and len(known) >= self._max_per_address:
            slot = next(iter(known.slots[Stage.SILENT] or known.slots[Stage.IDLE]), None)
            if slot is None or self._left_to_speak(slot) > 0:
                sock.close()
                return
            slot.drop()
        slot = Slot(self, address, sock, loop.time())
        self._put(slot, Stage.SILENT)
        if self._tls is None:
            slot.task = loop.create_task(self._begin(slot))
            return
        sock.setblocking(False)
        slot.timer = loop.call_later(_HANDSHAKE_S, slot.drop)
        loop.add_reader(sock, self._speaks, slot)

    def _speaks(self, slot: Slot) -> None:
        """Handle the first bytes of a connection, or the end of its stream."""
        assert slot.sock is not None, "it is listened to"
        loop = asyncio.get_running_loop()
        if not _has_hello(
            slot.sock
        ):  # the costly part of the handshake follows the last byte, and must wait its turn
            loop.remove_reader(slot.sock)
            slot.rest = loop.call_later(_REST_S, loop.add_reader, slot.sock, self._speaks, slot)
            return
        slot.listen_no_more()
        self._spoken[slot] = None
        self.budget.soon(slot.address, self._admit)

    def _admit(self) -> Again:
        """Start a handshake; if too many are in progress, drop the oldest after its minimum time."""
        loop = asyncio.get_running_loop()
        if not self._spoken:  # the connection was dropped in the meantime
            return Again.NO
        if len(self._handshakes) >= _MAX_HANDSHAKES:
            oldest = next(iter(self._handshakes))
            if (left_s := self._left_to_speak(oldest)) > 0:
                self._num_owed += 1
                if not self._is_admitting:
                    self._is_admitting = True
                    loop.call_later(left_s, self._admit_on)
                return Again.NO
            oldest.drop()
        slot, _ = self._spoken.popitem(last=False)
        self._move(slot, Stage.SILENT)  # now the newest silent connection
        self._handshakes[slot] = None
        slot.since_s = loop.time()
        slot.task = loop.create_task(self._begin(slot))
        return Again.NO

    def _admit_on(self) -> None:
        self._is_admitting = False
        owed, self._num_owed = self._num_owed, 0
        for slot in list(self._spoken)[:owed]:
            self.budget.soon(slot.address, self._admit)

    async def _begin(self, slot: Slot) -> None:
        """Perform the handshake, and create the connection's protocol."""
        make, (sock, slot.sock) = self._make, (slot.sock, None)
        assert make is not None, "a closed listener drops connections that have not begun"
        assert sock is not None, "it begins once"
        try:
            slot.transport, _ = await asyncio.get_running_loop().connect_accepted_socket(
                lambda: make(slot),
                sock,  # the loop closes it from here on
                ssl=None if self._tls is None else self._tls(),
                ssl_handshake_timeout=None if self._tls is None else _HANDSHAKE_S,
            )
            if self._tls is None:
                slot.transport.max_size = _READ  # type: ignore[attr-defined]
        except (OSError, TimeoutError):
            slot.leave()
        finally:
            slot.task = None
            self._handshakes.pop(slot, None)
            if self._num_owed:
                self._num_owed -= 1
                self.budget.soon(slot.address, self._admit)

    def _move(self, slot: Slot, stage: Stage) -> None:
        if self._take(slot):
            self._put(slot, stage)
            if stage is not Stage.BUSY:
                self._resume()

    def _leave(self, slot: Slot) -> None:
        if self._take(slot):
            if not self._addresses[slot.address]:
                del self._addresses[slot.address]
            self._handshakes.pop(slot, None)
            self._spoken.pop(slot, None)
            self._resume()

    def _put(self, slot: Slot, stage: Stage) -> None:
        slot.stage = stage
        self._addresses.setdefault(slot.address, _Address()).slots[stage][slot] = None
        self._num[stage] += 1

    def _take(self, slot: Slot) -> bool:
        """Remove a connection from its stage; return False if it has already left."""
        theirs = self._addresses.get(slot.address)
        if theirs is None or slot not in theirs.slots[slot.stage]:
            return False
        del theirs.slots[slot.stage][slot]
        self._num[slot.stage] -= 1
        return True

    def _tell(self, trouble: str) -> None:
        """Log a warning, unless the problems have continued since the last warning."""
        now = asyncio.get_running_loop().time()
        if now - self._troubled_s >= _QUIET_S:
            _log.warning("%s", trouble)
        self._troubled_s = now


def _has_hello(sock: socket.socket) -> bool:  # D308: a handshake begins with a complete ClientHello
    """Return False as long as the first record of a TLS handshake is incomplete."""
    try:
        begun = sock.recv(_RECORD, socket.MSG_PEEK)
    except OSError:  # the next read gets the same error and reports it
        return True
    is_handshake = begun[:1] == b"\x16"
    return not is_handshake or (len(begun) >= _HEAD and len(begun) >= _HEAD + int.from_bytes(begun[3:_HEAD]))


def _room(wanted: int) -> int:
    """Return the number of connections that the descriptor limit allows, after raising it as far as possible.

    Raises:
        ConfigError: the limit allows no connections.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = _num_open() + _FOR_OTHERS
    most = wanted + taken
    if hard != resource.RLIM_INFINITY:
        most = min(most, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        soft = most
    left = wanted if soft == resource.RLIM_INFINITY else soft - taken
    if left < 1:
        raise ConfigError(
            f"{soft} files may be open, which leaves none for connections; raise it to {taken + 64} "
            "at least (ulimit -n)"
        )
    return left


def _num_open() -> int:
    with contextlib.suppress(OSError):
        return len(list(Path("/proc/self/fd").iterdir()))
    return 32
