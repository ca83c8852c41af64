"""A real server in a process of its own."""

import os
import signal
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from pathlib import Path

from kvq.bench.serve.process import free_port
from tests.waiting import HANG_S, wait_for

# D377: ready? five times a second, not a hundred
_ASK_S = 0.2  # a hundred times a second would take it 2 s of a core until it is ready


class Server:
    """`kvq serve` on a free port of this machine; `with` ends it."""

    def __init__(
        self, *options: str, model: str | None = "tiny", key: str = "none", before: tuple[str, ...] = ()
    ) -> None:
        """`before`: what the command is given to. `model`: None if the options have it."""
        self.key = key
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        command = [
            *before,
            sys.executable,
            "-m",
            "kvq",
            "serve",
            *([] if model is None else ["--model", model]),
            "--port",
            str(self.port),
            *options,
        ]
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the server lives
        self.process = subprocess.Popen(command, stderr=self._log)

    def __enter__(self) -> "Server":
        try:
            self.wait_ready()
        except BaseException:
            self.process.kill()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(HANG_S)
        finally:
            self.process.kill()

    def wait_ready(self) -> None:
        """Return when it takes requests."""

        def is_ready() -> bool:
            assert self.process.poll() is None, self.log
            return self.status("/health/ready") == 200

        wait_for(is_ready, lambda: f"the server is ready\n{self.log}", every_s=_ASK_S)

    @property
    def log(self) -> str:
        """What the server has written so far."""
        return os.pread(self._log.fileno(), 1 << 26, 0).decode()

    def status(self, path: str, key: str | None = "") -> int:
        """The status that a GET is answered with, with the server's key unless told otherwise.

        0 if nobody listens.
        """
        key = self.key if key == "" else key
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        request = urllib.request.Request(self.url + path, headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=HANG_S) as answer:
                return answer.status
        except urllib.error.HTTPError as error:
            return error.code
        except OSError:
            return 0

    @property
    def engine_pid(self) -> int:
        """The engine process."""
        return self._child("kvq.server.engine.worker")

    @property
    def reading_pid(self) -> int:
        """The process that those that read prompts are forked from."""
        return self._child("kvq.server.reading.host")

    def _child(self, module: str) -> int:
        [pid] = self.children(module)
        return pid

    def children(self, module: str) -> list[int]:
        """The processes that run a module."""
        children = f"/proc/{self.process.pid}/task/{self.process.pid}/children"
        with open(children, encoding="ascii") as file:
            pids = file.read().split()
        return [int(pid) for pid in pids if module in Path(f"/proc/{pid}/cmdline").read_text().split("\0")]

    def processor_s(self) -> float:
        """Seconds of processor time that the HTTP process has taken."""
        with open(f"/proc/{self.process.pid}/stat", encoding="ascii") as file:
            user, system = file.read().rpartition(")")[2].split()[11:13]
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")

    def is_gone(self, pid: int) -> bool:
        """True if there is no such process any more."""
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        return False
