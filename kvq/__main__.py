"""Entry point of the `kvq` command and `python -m kvq`."""

import atexit
import os
import signal
import sys
from types import FrameType


def main() -> None:
    """Run the command. A signal during imports ends it like a later one: with one line and status 130."""
    status: list[int] = []  # exit status of the command, once it has one
    atexit.register(_leave, status)  # registered first, so that it runs last
    handled = [n for n in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(n) is not signal.SIG_IGN]
    before = {number: signal.signal(number, _end) for number in handled}
    from kvq.cli import main as run

    for number, handler in before.items():
        signal.signal(number, handler)
    try:
        run()
    except SystemExit as end:
        if isinstance(end.code, int | None):
            status.append(end.code or 0)
            if sys.argv[1:2] == ["serve"]:  # the server has cleaned up; its threads may still wait
                _leave(status)
        raise


def _leave(status: list[int]) -> None:  # D298: os._exit: unloading modules takes seconds
    """Exit the process immediately, since unloading torch's modules would take a second of processor time."""
    if not status:
        return
    try:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
    except (AttributeError, OSError, ValueError):  # a closed pipe or a full disk, which Python reports
        return
    os._exit(status[0])


def _end(number: int, frame: FrameType | None) -> None:
    os.write(2, b"kvq: interrupted\n")
    os._exit(130)


if __name__ == "__main__":
    main()
