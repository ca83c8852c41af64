"""A contender in a process of its own, which is stopped while others have their turn."""

import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from benchmarks.peers.quota import Group
from kvq.bench.engine.load import LoadRequest, Served, ServedLoad
from kvq.errors import EngineError

_ROOT = Path(__file__).parents[2]
_TICKS = os.sysconf("SC_CLK_TCK")  # a second, of /proc/PID/stat
_END_S = 30.0
_TOLD = 2000  # characters of what a process wrote before it ended


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """Result of a contender's turn."""

    run: ServedLoad
    cpu_s: float  # processor time of its process meanwhile


class Process:  # D116: one process per peer, stopped between turns
    """A worker of `answering.answer`: `python -m MODULE` from this repository, in any interpreter."""

    def __init__(
        self, python: str | Path, module: str, settings: dict[str, Any], group: Group | None = None
    ) -> None:
        """Start it and wait until its engine is open. `group`: where it runs; closed with it.

        Raises:
            EngineError: it ended.
        """
        self._module, self._group = module, group
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the process lives
        self._process = subprocess.Popen(
            [str(python), "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            cwd=_ROOT,
        )
        try:
            if group is not None:
                group.add(self._process.pid)
            self.about = self.ask(settings)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def cpu_s(self) -> float:
        """Processor time of all its threads so far."""
        stat = Path(f"/proc/{self.pid}/stat").read_text(encoding="utf-8", errors="replace")
        user, system = stat.rpartition(")")[2].split()[11:13]  # fields 14 and 15 of proc(5)
        return (int(user) + int(system)) / _TICKS

    def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        """Send a request and wait for its answer; this process sleeps meanwhile, the other one afterwards.

        One that waits on its pipe is stopped, too: engines have threads that look around or spin, a hundredth
        of a core each for kvq's, which the next one's turn should have.

        Raises:
            EngineError: it ended instead.
        """
        assert self._process.stdin is not None, "a pipe"
        assert self._process.stdout is not None, "a pipe"
        self._process.send_signal(signal.SIGCONT)
        try:
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if not answer:
            size = os.fstat(self._log.fileno()).st_size
            told = os.pread(self._log.fileno(), _TOLD, max(0, size - _TOLD)).decode(errors="replace")
            raise EngineError(f"{self._module} ended with {self._process.wait()}: {told.strip()}")
        self._process.send_signal(signal.SIGSTOP)
        found: dict[str, Any] = json.loads(answer)
        return found

    def turn(self, requests: Sequence[LoadRequest]) -> Turn:
        """Serve requests of equal output lengths.

        Raises:
            EngineError: it ended, or gave fewer or more tokens than it should.
        """
        before = self.cpu_s
        (output_tokens,) = {request.output_tokens for request in requests}
        prompts = [request.prompt for request in requests]
        found = self.ask({"prompts": prompts, "output_tokens": output_tokens})
        cpu_s = self.cpu_s - before
        served = [
            Served(request=request, due_s=0.0, token_s=token_s, tokens=tokens)
            for request, token_s, tokens in zip(requests, found["token_s"], found["tokens"], strict=True)
        ]
        return Turn(run=ServedLoad(served=served), cpu_s=cpu_s)

    def close(self) -> None:
        """End it, and its group."""
        assert self._process.stdin is not None, "a pipe"
        self._process.send_signal(signal.SIGCONT)
        try:
            self._process.stdin.close()
            self._process.wait(_END_S)
        except (subprocess.TimeoutExpired, BrokenPipeError):
            self._process.kill()
            self._process.wait()
        finally:
            assert self._process.stdout is not None, "a pipe"
            self._process.stdout.close()
            self._log.close()
            if self._group is not None:
                self._group.close()
