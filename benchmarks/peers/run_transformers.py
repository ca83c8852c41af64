"""transformers' `generate` as a contender, over a batch of its own cache."""

from typing import Any

import torch
import transformers

from benchmarks.peers.answering import answer
from benchmarks.peers.run_kvq import load_model, requests_of
from kvq.bench.engine.hf import StaticBatches, load_rival
from kvq.engine import EngineConfig


class Transformers:
    """One model, as transformers runs it."""

    def __init__(self, given: dict[str, Any]) -> None:
        self._rival = StaticBatches(load_rival(load_model(given)), EngineConfig(), 0)
        self.about = {
            "version": transformers.__version__,
            "torch": torch.__version__,
            "torch_threads": torch.get_num_threads(),
            "attention": "sdpa",
        }

    def run(self, prompts: list[list[int]], output_tokens: int) -> dict[str, Any]:
        """Run a load; see `Engine.run`."""
        served = self._rival.run(requests_of(prompts, output_tokens), None).served
        return {"tokens": [one.tokens for one in served], "token_s": [one.token_s for one in served]}


if __name__ == "__main__":
    answer(Transformers)
