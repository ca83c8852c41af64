"""Pairs of engines in one process, one of which hands over to the other."""

import os
import threading
import time
from collections.abc import Callable
from typing import Any

from kvq.engine import LLM
from tests.engine.kit import assert_balanced, engine

_HANG_S = 20.0


class Pair:
    """A sender and a receiver over one loaded model, stepped in turns."""

    def __init__(self, model: Any, kv: str = "auto", receiver: Any = None, **options: Any) -> None:
        """`receiver`: its model and options where they are others; `there` in `options`: its alone."""
        there = {"hand_over_listen": "0"} | options | options.pop("there", {})
        options.pop("there", None)
        there.pop("there", None)
        there.pop("hand_over_prefilled", None)  # which is the sender's
        self.b: LLM = engine(receiver or model, kv, **there)
        here = {name: value for name, value in options.items() if name != "hand_over_listen"}
        self.a: LLM = engine(model, kv, hand_over_to=self.b.hand_over.address, **here)

    def steps(self, count: int) -> None:
        """Step both engines."""
        for _ in range(count):
            self.a.step()
            self.b.step()

    def until(self, is_done: Callable[[], bool]) -> None:
        """Step both engines until something is so."""
        end = time.monotonic() + _HANG_S
        while not is_done():
            assert time.monotonic() < end, "nothing happens any more"
            self.steps(1)

    def drain(self) -> None:
        """Move all requests of the sender, and step until they have ended."""
        self.a.hand_over.move_requests()
        self.until(lambda: not self.a.core.has_work)

    def check(self) -> None:
        """Nothing is left in either engine: requests, blocks, threads or sockets."""
        self.until(lambda: not self.b.core.has_work and num_threads() <= 1)
        for llm in (self.a, self.b):
            assert_balanced(llm)
            assert llm.core.scheduler.num_away == 0
            hand_over = llm.hand_over
            assert not any(getattr(hand_over, name) for name in ("_away", "_arrived", "_links", "_tried"))

    def close(self) -> None:
        self.a.close()
        self.b.close()
        assert num_threads() == 0


def num_threads() -> int:
    """The threads of hand-overs; an engine that listens has one."""
    return sum(thread.name == "kvq-hand-over" for thread in threading.enumerate())


def num_files() -> int:
    """The open files and sockets of this process."""
    return len(os.listdir("/proc/self/fd"))
