"""kvq over unquantized weights and KV, which every contender's tokens are compared with."""

from typing import Any

from benchmarks.peers.answering import answer
from benchmarks.peers.run_kvq import make_server, requests_of


class Reference:
    """Tokens, and how far the likeliest of each step was above the next one in log-probability."""

    def __init__(self, given: dict[str, Any]) -> None:
        self._server = make_server(given)
        self.about: dict[str, Any] = {}

    def run(self, prompts: list[list[int]], output_tokens: int) -> dict[str, Any]:
        """Run a load, with `gaps` in place of times; see `Engine.run`."""
        outputs = self._server.generate(requests_of(prompts, output_tokens))
        steps = [output.logprobs or () for output in outputs]
        return {
            "tokens": [output.token_ids for output in outputs],
            "gaps": [[one.top[0][1] - one.top[1][1] for one in each] for each in steps],
        }


if __name__ == "__main__":
    answer(Reference)
