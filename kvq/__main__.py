"""`kvq` and `python -m kvq`."""

import os
import signal
from types import FrameType


def main() -> None:
    """The command. Ctrl-C while its own modules are loaded ends it as later on: in one line, with 130."""
    before = signal.signal(signal.SIGINT, _end)
    from kvq.cli import main as run

    signal.signal(signal.SIGINT, before)
    run()


def _end(number: int, frame: FrameType | None) -> None:
    os.write(2, b"kvq: interrupted\n")
    os._exit(128 + number)


if __name__ == "__main__":
    main()
