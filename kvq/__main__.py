"""`kvq` and `python -m kvq`."""

import atexit
import os
import signal
import sys
from types import FrameType

_ended: list[int] = []  # the command's exit status, once it has one


def main() -> None:
    """The command. Signals while its own modules are loaded end it as later on: in one line, with 130."""
    atexit.register(_leave)  # the first, so that it runs after all others
    heard = [n for n in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(n) is not signal.SIG_IGN]
    before = {number: signal.signal(number, _end) for number in heard}
    from kvq.cli import main as run

    for number, handler in before.items():
        signal.signal(number, handler)
    try:
        run()
    except SystemExit as end:
        if isinstance(end.code, int | None):
            _ended.append(end.code or 0)
            if sys.argv[1:2] == ["serve"]:  # which has put its things away, whatever its threads wait for
                _leave()
        raise


def _leave() -> None:
    """End now: taking torch's modules apart takes a second of processor time."""
    if not _ended:
        return
    try:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
    except (AttributeError, OSError, ValueError):  # nobody reads it, or the disk is full: Python says so
        return
    os._exit(_ended[0])


def _end(number: int, frame: FrameType | None) -> None:
    os.write(2, b"kvq: interrupted\n")
    os._exit(130)


if __name__ == "__main__":
    main()
