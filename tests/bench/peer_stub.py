"""A contender without an engine, for tests: tokens and times that its formats' names ask for."""

import threading
import time
from typing import Any

from benchmarks.peers.answering import answer


def _spin() -> None:
    while True:
        pass


class Stub:
    """Weights say what goes wrong."""

    def __init__(self, given: dict[str, Any]) -> None:
        print("libraries print")
        if given["weights"] == "broken":
            raise ValueError("no such weights")
        if given["weights"] == "spinning":
            threading.Thread(target=_spin, daemon=True).start()
        self._step = 2 if given["weights"] == "wrong" else 1
        self._token_s = 0.02 if given["threads"] == 1 else 0.001
        self.about = {"version": "stub", "threads": given["threads"]}

    def run(self, prompts: list[list[int]], output_tokens: int) -> dict[str, Any]:
        time.sleep(0.001)
        steps = range(1, output_tokens + 1)
        return {
            "tokens": [[prompt[-1] + self._step * i for i in steps] for prompt in prompts],
            "token_s": [[self._token_s * i for i in steps] for _ in prompts],
            "gaps": [[0.5] * output_tokens for _ in prompts],
        }


if __name__ == "__main__":
    answer(Stub)
