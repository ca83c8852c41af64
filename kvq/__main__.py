"""`kvq` and `python -m kvq`."""

import os
import signal
import sys
from types import FrameType


def main() -> None:
    """The command. Signals while its own modules are loaded end it as later on: in one line, with 130."""
    heard = [n for n in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(n) is not signal.SIG_IGN]
    before = {number: signal.signal(number, _end) for number in heard}
    from kvq.cli import main as run

    for number, handler in before.items():
        signal.signal(number, handler)
    try:
        run()
    except SystemExit as end:
        if sys.argv[1:2] != ["serve"] or not isinstance(end.code, int | None):
            raise
        _leave(end.code or 0)


def _leave(status: int) -> None:
    """End now: a server has put its things away, and taking modules apart takes a second or more."""
    from contextlib import suppress

    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # nobody reads it any more
            stream.flush()
    os._exit(status)


def _end(number: int, frame: FrameType | None) -> None:
    os.write(2, b"kvq: interrupted\n")
    os._exit(130)


if __name__ == "__main__":
    main()
