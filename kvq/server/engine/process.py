"""Handle of the engine process, to start it, end it and write to its socket."""

import asyncio
import contextlib
import socket
import subprocess
import sys
from dataclasses import dataclass, field
from time import monotonic
from typing import Self

from kvq.server.engine.frames import encode
from kvq.server.engine.messages import ToEngine

# D297: shutdown waits for no client
_END_S = 0.4  # time for the process to exit by itself; it has nothing to save


def start_module(name: str, end: socket.socket, *, is_quiet: bool = False) -> subprocess.Popen[bytes]:
    """Start a module of this library in a new process, and pass it one end of a socket pair.

    `is_quiet`: discard output: a crash could quote a prompt. Raises OSError if memory or descriptors run out.
    """
    output = subprocess.DEVNULL if is_quiet else None
    return subprocess.Popen(
        # -P: modules in the working directory, which may be a model folder, do not shadow the library
        [sys.executable, "-P", "-m", name, str(end.fileno())],
        pass_fds=[end.fileno()],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        process_group=0,  # an interrupt at the terminal reaches only the parent
    )


@dataclass(slots=True, eq=False)
class EngineProcess:
    """Process that runs `kvq.server.engine.worker`."""

    popen: subprocess.Popen[bytes]
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    answered_s: float = field(default_factory=monotonic)  # time of its last message
    is_ready: bool = False  # the process has sent `Ready`

    @classmethod
    async def spawn(cls) -> Self:
        """Start a process.

        Raises:
            OSError: no memory or no descriptor is left.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            popen = start_module("kvq.server.engine.worker", theirs)
        try:
            reader, writer = await asyncio.open_connection(sock=ours)
        except BaseException:  # the caller has no handle of the process yet
            popen.kill()
            popen.wait()
            raise
        return cls(popen, reader, writer)

    def say(self, message: ToEngine) -> None:
        """Write a message; do nothing if the socket is closed."""
        if not self.writer.is_closing():
            self.writer.write(encode(message))

    async def send(self, message: ToEngine) -> None:
        """Write a message, and wait while the engine has too much unread data."""
        self.say(message)
        with contextlib.suppress(ConnectionError):  # the reader notices the end
            await self.writer.drain()

    async def end(self) -> None:
        """Close the socket, which makes the process exit; kill the process if it does not exit in time."""
        self.writer.close()
        with contextlib.suppress(ConnectionError):
            await self.writer.wait_closed()
        waiting = asyncio.create_task(asyncio.to_thread(self.popen.wait, _END_S))
        try:
            await asyncio.shield(waiting)
        except asyncio.CancelledError:
            self.popen.kill()
            raise
        except subprocess.TimeoutExpired:
            self.popen.kill()
            await asyncio.to_thread(self.popen.wait)
