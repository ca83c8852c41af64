"""Client of the prompt readers in the HTTP process: forks readers, sends jobs to them, and ends them."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from kvq.errors import ConfigError, EngineError
from kvq.models.templates.forms import Forms
from kvq.server.engine.frames import Decoder, encode, read_async, receive
from kvq.server.engine.process import start_module
from kvq.server.reading.host import FORK, ID_BYTES
from kvq.server.reading.jobs import JobResult, Setup

_TRIES = 2  # attempts to fork, since the host may have ended unnoticed
_LOAD_S = 300.0  # enough for a large tokenizer on a busy machine


@dataclass(slots=True, eq=False)
class Reader:
    """Process that runs one job at a time."""

    pid: int
    sock: socket.socket
    host: subprocess.Popen[bytes] | None  # process that the reader was forked from

    async def do(self, pieces: Sequence[str], job: bytes) -> JobResult | None:
        """Send the pieces of a job's texts, then the job; return the result, or None if the reader ended."""
        loop = asyncio.get_running_loop()
        if self.sock.fileno() < 0:  # closed since the lane chose this reader
            return None
        with contextlib.suppress(ConnectionError):  # the receive below then returns nothing
            for piece in pieces:
                await loop.sock_sendall(self.sock, encode(piece))
                await asyncio.sleep(0)
            await loop.sock_sendall(self.sock, job)
        return await read_async(partial(receive, self.sock), _decoder)

    def yield_to_others(self, niceness: int) -> None:
        """Lower the process's priority."""
        with contextlib.suppress(OSError):  # the process has just ended
            os.setpriority(os.PRIO_PROCESS, self.pid, niceness)


class Readers:
    """Prompt readers for one model, forked from a host process that has loaded its tokenizer.

    The host is started by `start` or at first use, and restarted if it has ended. Make all calls from event
    loops, one loop at a time.
    """

    forms: Forms | None = None  # forms of the chat template, after its trial
    trying: asyncio.Lock  # held during a trial

    def __init__(self, setup: Setup) -> None:
        self.trying = asyncio.Lock()
        self._setup = setup
        self._host: subprocess.Popen[bytes] | None = None
        self._sock: socket.socket | None = None
        self._turn = asyncio.Lock()  # held while exchanging messages with the host
        self._readers: set[Reader] = set()
        self._is_closed = False

    async def start(self) -> None:
        """Load the tokenizer if it has not been loaded yet.

        Raises:
            ConfigError: the model's tokenizer does not load.
            EngineError: the host ended, or `close` was called.
        """
        async with self._turn:
            await self._connected()

    async def fork(self) -> Reader:
        """Fork a new reader.

        Raises:
            ConfigError: the model's tokenizer does not load.
            EngineError: no reader can be forked, or `close` was called.
        """
        async with self._turn:
            for _ in range(_TRIES):
                host = await self._connected()
                ours, theirs = _pair()
                with theirs:
                    try:
                        socket.send_fds(host, [FORK], [theirs.fileno()])
                        pid = await _number(host)
                    except (OSError, EOFError):
                        ours.close()
                        self._drop_host()
                        continue
                reader = Reader(pid, ours, self._host)
                self._readers.add(reader)
                return reader
        raise EngineError("the process that reads prompts ended")

    async def end(self, reader: Reader) -> int | None:
        """End a reader; return its exit status (negative: the negated signal number), or None if unknown."""
        self._readers.discard(reader)
        reader.sock.close()
        async with self._turn:
            if self._sock is None:
                return None
            try:
                self._sock.send(reader.pid.to_bytes(ID_BYTES, "little"))
                return await _number(self._sock)
            except (OSError, EOFError):
                self._drop_host()
                return None

    def close(self) -> None:
        """Kill all processes, even busy ones, for good."""
        self._is_closed = True
        self.stop()

    def stop(self) -> None:
        """Kill all processes, even busy ones. The next use starts them again."""
        for reader in self._readers:
            if reader.host is self._host:  # the host prevents reuse of the id; others end by themselves
                with contextlib.suppress(ProcessLookupError):
                    os.kill(reader.pid, signal.SIGKILL)
            reader.sock.close()
        self._readers.clear()
        self._drop_host()

    async def _connected(self) -> socket.socket:
        """Return the host's socket; start the host if necessary."""
        if self._is_closed:
            raise EngineError("the server is shutting down")
        if self._sock is not None:
            return self._sock
        ours, theirs = _pair()
        with theirs:
            try:
                self._host = start_module("kvq.server.reading.host", theirs, is_quiet=True)
            except OSError as error:
                ours.close()
                raise _none(error) from error
        self._sock = ours
        try:
            async with asyncio.timeout(_LOAD_S):
                with contextlib.suppress(ConnectionError):
                    await asyncio.get_running_loop().sock_sendall(ours, encode(self._setup))
                loaded = await read_async(partial(receive, ours), _decoder)
        except BaseException:
            self._drop_host()
            raise
        if loaded is not None and loaded.refusal is None:
            return ours
        self._drop_host()
        if loaded is not None:
            raise ConfigError(loaded.refusal)
        raise EngineError("the process that reads prompts ended before it was ready")

    def _drop_host(self) -> None:
        """End the host; busy readers continue to run."""
        host, self._host = self._host, None
        sock, self._sock = self._sock, None
        if sock is not None:
            sock.close()
        if host is not None:
            host.kill()
            host.wait()


_decoder = Decoder(JobResult)


def _pair() -> tuple[socket.socket, socket.socket]:
    """Return the ends of a socket pair; the first end, for this process, is non-blocking.

    Raises:
        EngineError: the system can't create a socket pair.
    """
    try:
        ours, theirs = socket.socketpair()
    except OSError as error:
        raise _none(error) from error
    ours.setblocking(False)
    return ours, theirs


def _none(error: OSError) -> EngineError:
    return EngineError(f"prompts can't be read now: {error.strerror}")


async def _number(sock: socket.socket) -> int:
    """Receive a process id or a status from the host; raise OSError or EOFError if the host has ended."""
    return int.from_bytes(await receive(sock, ID_BYTES), "little", signed=True)
