"""Publisher of block events: sends batches over ZeroMQ from a separate thread, in vLLM's format.

Every message has three frames: the topic, an 8-byte big-endian sequence number, and the batch. A subscriber
that missed batches sends the first missing number to the replay address (DEALER: an empty frame, then 8
bytes). The reply contains all retained batches from there on, each after an empty frame, then the number -1.
"""

import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from time import monotonic, time, time_ns

import zmq

from kvq.errors import ConfigError
from kvq.server.kv_events.config import EventsConfig
from kvq.server.kv_events.stream import Change, encode

_log = logging.getLogger("kvq")
_QUEUED = 10_000  # batches that wait to be sent
_KEPT = 10_000  # batches retained for replays
_WAITING = 100_000  # messages queued per slow subscriber; ZeroMQ drops further messages
_POLL_S = 0.1
_JOIN_S = 1.0  # minimum time between two reports of all blocks
_END = (-1).to_bytes(8, "big", signed=True)


class Publisher:
    """Sender of batches to all subscribers of an address. Call its methods from a single thread."""

    def __init__(
        self, config: EventsConfig, *, block_size: int, on_join: Callable[[], object] = lambda: None
    ) -> None:
        """`on_join` is called in the publisher's thread after new subscriptions, at most once a second.

        Raises:
            ConfigError: an address can't be bound.
        """
        self._topic = config.topic.encode()
        self._form = config.form
        self._block_size = block_size
        self._on_join = on_join
        self._queue: queue.Queue[Sequence[Change] | None] = queue.Queue(_QUEUED)
        self._kept: deque[tuple[bytes, bytes]] = deque(maxlen=_KEPT)  # sequence number, batch
        # Above all numbers of an earlier engine, since routers drop lower numbers
        self._number = time_ns() // 1000
        self._is_joined = False  # a new subscriber has not received all blocks yet
        self._told_s = -_JOIN_S
        self._context = zmq.Context()
        try:
            self._out = self._bound(zmq.XPUB, config.address)  # like PUB, but reports subscriptions
            self._out.setsockopt(zmq.XPUB_VERBOSE, 1)  # even for a topic that has subscribers
            self._replay = None if config.replay is None else self._bound(zmq.ROUTER, config.replay)
        except ConfigError:
            self._context.destroy(linger=0)
            raise
        if not config.is_local:
            _log.warning("block events: %s", config.warning)
        self._thread = threading.Thread(target=self._run, name="kvq-events", daemon=True)
        self._thread.start()

    def put(self, changes: Sequence[Change]) -> bool:
        """Queue a batch; return False if the queue is full."""
        try:
            self._queue.put_nowait(changes)
        except queue.Full:
            return False
        return True

    def close(self) -> None:
        """Send the queued batches for at most a second, then stop."""
        try:
            self._queue.put(None, timeout=1.0)
        except queue.Full:
            _log.warning("block events that waited were not sent")
        self._thread.join(timeout=1.0)

    def _bound(self, kind: int, address: str) -> "zmq.Socket[bytes]":
        socket = self._context.socket(kind)
        socket.set_hwm(_WAITING)
        socket.setsockopt(zmq.IPV6, int("[" in address))
        try:
            socket.bind(address)
        except zmq.ZMQError as error:
            raise ConfigError(f"can't listen on {address} for block events: {error}; give another") from error
        return socket

    def _run(self) -> None:
        while True:
            try:
                self._listen()
                changes = self._queue.get(timeout=_POLL_S)
                if changes is None:
                    break
                self._send(changes)
            except queue.Empty:
                continue
            except Exception:  # noqa: BLE001 - a faulty message must not stop the others
                _log.exception("a batch of block events was not sent")
        self._context.destroy(linger=200)  # ms

    def _send(self, changes: Sequence[Change]) -> None:
        number = self._number.to_bytes(8, "big")
        content = encode(changes, block_size=self._block_size, now=time(), form=self._form)
        self._number += 1
        self._kept.append((number, content))
        self._out.send_multipart((self._topic, number, content))

    def _listen(self) -> None:
        """Handle pending subscriptions and replay requests, without waiting."""
        while self._out.poll(0):
            if self._out.recv().startswith(b"\x01"):
                self._is_joined = True
        if self._is_joined and monotonic() - self._told_s >= _JOIN_S:
            self._is_joined, self._told_s = False, monotonic()
            self._on_join()
        while self._replay is not None and self._replay.poll(0):
            self._answer(self._replay, self._replay.recv_multipart())

    def _answer(self, replay: "zmq.Socket[bytes]", frames: list[bytes]) -> None:
        if len(frames) != 3 or len(frames[2]) != 8:
            _log.warning("a replay of block events must be asked for with 8 bytes, the first number missed")
            return
        client, _, first = frames
        for number, content in self._kept:
            if number >= first:
                replay.send_multipart((client, b"", self._topic, number, content))
        replay.send_multipart((client, b"", b"", _END, b""))
