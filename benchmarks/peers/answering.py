"""Process of a contender: opens an engine, runs what a pipe brings, reports when tokens came.

Runs in the peers' own interpreters, so it imports nothing but the standard library.
"""

import ctypes
import json
import os
import signal
import sys
from collections.abc import Callable
from typing import Any, Protocol

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


class Engine(Protocol):
    """An engine that was opened."""

    about: dict[str, Any]  # versions, and what it was told

    def run(self, prompts: list[list[int]], output_tokens: int) -> dict[str, Any]:
        """Serve all prompts at once, greedily and beyond any end of text.

        Returns `tokens`, and `token_s`, seconds after the begin at which each was there, a list a prompt.
        """


def answer(open_engine: Callable[[dict[str, Any]], Engine]) -> None:
    """Open an engine as the first line of stdin says, then answer each line that follows with one."""
    # One that is stopped would not see that its pipe has ended
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="ascii")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # libraries print what nobody should read as an answer

    def say(found: dict[str, Any]) -> None:
        answers.write(json.dumps(found) + "\n")
        answers.flush()

    engine = open_engine(json.loads(sys.stdin.readline()))
    say(engine.about)
    for line in sys.stdin:
        say(engine.run(**json.loads(line)))
