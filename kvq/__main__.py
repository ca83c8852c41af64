"""`kvq` and `python -m kvq`."""

import os
import signal
from types import FrameType


def main() -> None:
    """The command. Signals while its own modules are loaded end it as later on: in one line, with 130."""
    heard = [n for n in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(n) is not signal.SIG_IGN]
    before = {number: signal.signal(number, _end) for number in heard}
    from kvq.cli import main as run

    for number, handler in before.items():
        signal.signal(number, handler)
    run()


def _end(number: int, frame: FrameType | None) -> None:
    os.write(2, b"kvq: interrupted\n")
    os._exit(130)


if __name__ == "__main__":
    main()
