"""Models, and the engines that run them, stay in the process that made them: what they hold is in no copy."""

import os
from typing import NoReturn

from kvq.errors import EngineError


class StaysHere:
    """What can't be pickled or copied."""

    def __reduce__(self) -> NoReturn:
        name = type(self).__name__
        raise EngineError(
            f"{name} can't be pickled or copied: it holds memory, threads and processes; "
            "pass on the model's folder or name, and make it where it is used"
        )


class Home:
    """The process that something was made in: a forked child has none of its threads and processes."""

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
                "its threads are not here; start processes by 'spawn' (multiprocessing.get_context), each "
                "with an engine of its own"
            )
