"""Server process that runs `kvq serve`, optionally pinned to cores."""

import asyncio
import os
import random
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from types import TracebackType
from typing import Any, Self

from kvq.bench.serve.client import Endpoint, first_model, get
from kvq.errors import EngineError

_POLL_S = 0.1  # polling takes processor time from the startup
_ENGINE = b"kvq.server.engine.worker"  # part of the engine's command line
_END_S = 90.0
_PORTS = range(20_000, 32_000)  # below the ephemeral ports of operating systems


def free_port() -> int:
    """Return a free, non-ephemeral port on this machine, for a server that is about to start.

    Raises:
        EngineError: no free port is found.
    """
    for port in random.sample(_PORTS, 100):
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise EngineError(f"no port of 100 between {_PORTS[0]} and {_PORTS[-1]} is free")


class ServerProcess:
    """Server on a free port of this machine, with a separate engine process.

    With `pin`, the HTTP process shares the first core with this process, and the engine uses the other cores.
    """

    def __init__(
        self,
        options: Sequence[str],
        *,
        pin: bool = False,
        key: str = "none",
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """Start the server. `options`: for `kvq serve`, without a port. `tls`: for clients if HTTPS is on."""
        port = free_port()
        self.target = Endpoint(host="127.0.0.1", port=port, model="", key=key, tls=tls)
        self.model: dict[str, Any] = {}  # entry in /v1/models
        self._cores = sorted(os.sched_getaffinity(0)) if pin else []
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - open while the server runs
        plain = ("--generation-config", "none")  # loads set their own sampling
        command = [sys.executable, "-m", "kvq", "serve", "--port", str(port), *plain, *options]
        environment = {name: value for name, value in os.environ.items() if name != "KVQ_API_KEY"}
        if len(self._cores) > 1:
            environment["OMP_NUM_THREADS"] = str(len(self._cores) - 1)
        self.process = subprocess.Popen(command, stderr=self._log, stdin=subprocess.DEVNULL, env=environment)

    async def __aenter__(self) -> Self:
        try:
            await self.wait_ready(300)
            self.model = await first_model(self.target)
        except BaseException as error:  # __aexit__ isn't called if the start is interrupted
            await self.__aexit__(type(error), error, None)
            raise
        self.target = replace(self.target, model=self.model["id"])
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            await asyncio.to_thread(self.process.wait, _END_S)
        finally:
            self.process.kill()
            self._log.close()
            if self._cores:
                os.sched_setaffinity(0, self._cores)

    @property
    def log(self) -> str:
        """Log output of the server so far, as text."""
        return os.pread(self._log.fileno(), 1 << 26, 0).decode(errors="replace")

    @property
    def engine_pid(self) -> int:
        """Process id of the engine.

        Raises:
            EngineError: there is currently no engine process.
        """
        pid = self.process.pid
        with open(f"/proc/{pid}/task/{pid}/children", encoding="ascii") as file:
            children = file.read().split()
        engines = [child for child in children if _ENGINE in Path(f"/proc/{child}/cmdline").read_bytes()]
        if len(engines) != 1:
            raise EngineError(f"the server has {len(engines)} engine processes")
        return int(engines[0])

    async def wait_ready(self, timeout_s: float) -> float:
        """Wait until the server accepts requests; return the waiting time in seconds.

        Raises:
            EngineError: the server ends, or takes longer than `timeout_s`.
        """
        began = perf_counter()
        while await self.status("/health/ready") != 200:
            if self.process.poll() is not None or perf_counter() - began > timeout_s:
                raise EngineError(f"the server is not ready: {self.log[-2000:]}")
            await asyncio.sleep(_POLL_S)
        self._pin()
        return perf_counter() - began

    async def status(self, path: str) -> int:
        """Return the status of a GET request, or 0 if there is no valid response."""
        try:
            return (await get(self.target, path))[0]
        except (OSError, EOFError, ValueError, TimeoutError):
            return 0

    def _pin(self) -> None:
        if len(self._cores) > 1:
            os.sched_setaffinity(0, self._cores[:1])
            _pin_threads(self.process.pid, self._cores[:1])
            _pin_threads(self.engine_pid, self._cores[1:])


def _pin_threads(pid: int, cores: Sequence[int]) -> None:
    for thread in os.listdir(f"/proc/{pid}/task"):
        os.sched_setaffinity(int(thread), cores)
