"""Engines are of the process that made them: a forked child has none of their threads and processes."""

import os

from kvq.errors import EngineError


class Home:
    """The process that something was made in."""

    def __init__(self) -> None:
        self._pid = os.getpid()

    @property
    def is_here(self) -> bool:
        """False in a forked child."""
        return self._pid == os.getpid()

    def check(self) -> None:
        """Raise EngineError in a forked child."""
        if not self.is_here:
            raise EngineError(
                f"this engine was made in process {self._pid}, which process {os.getpid()} was forked from: "
                "its threads are not here; make an engine in each process, or start processes by 'spawn' "
                "(multiprocessing.get_context)"
            )
