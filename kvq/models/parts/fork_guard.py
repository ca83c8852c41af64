"""Guards against using models and engines outside the process that created them and their resources."""

import os
import threading
from typing import ClassVar, NoReturn

from kvq.errors import EngineError

_ADVICE = "start processes by 'spawn' (multiprocessing.get_context), each with an engine of its own"


class NotCopyable:  # D246: forks are detected by process id; pickling is refused
    """Base class of objects that can't be pickled or copied."""

    def __reduce__(self) -> NoReturn:
        name = type(self).__name__
        raise EngineError(
            f"{name} can't be pickled or copied: it holds memory, threads and processes; "
            "pass on the model's folder or name, and make it where it is used"
        )


class Home:
    """The process that an object was created in; a forked child has none of its threads and processes."""

    ENGINE_THREAD: ClassVar[str] = "kvq-engine"
    _stepping: ClassVar[int] = 0  # id of the process that was forked while an engine's thread ran

    def __init__(self) -> None:
        self.check_fork()
        self._pid = os.getpid()

    @classmethod
    def note_fork(cls) -> None:
        """Record whether an engine's thread, which may hold torch's locks, is running during a fork."""
        if cls._stepping in (0, os.getpid()):
            is_stepping = any(thread.name == cls.ENGINE_THREAD for thread in threading.enumerate())
            cls._stepping = os.getpid() if is_stepping else 0

    @classmethod
    def check_fork(cls) -> None:
        """Raise EngineError in a child forked while an engine's thread ran, since it may wait forever."""
        if cls._stepping not in (0, os.getpid()):
            raise EngineError(
                f"process {os.getpid()} was forked from {cls._stepping} while an engine's thread ran there; "
                f"no model and no engine can be made here: {_ADVICE}"
            )

    @property
    def is_here(self) -> bool:
        """True unless this is a forked child process."""
        return self._pid == os.getpid()

    def check(self) -> None:
        """Raise EngineError in a forked child."""
        if not self.is_here:
            raise EngineError(
                f"this engine was made in process {self._pid}, which process {os.getpid()} was forked from: "
                f"its threads are not here; {_ADVICE}"
            )


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=Home.note_fork)
