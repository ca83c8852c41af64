"""kvq's engine as a contender."""

from typing import Any

import torch

from benchmarks.peers.answering import answer
from kvq.bench.engine.load import LoadRequest
from kvq.bench.engine.server import KvqServer
from kvq.engine import EngineConfig
from kvq.kernels.native.library import loaded
from kvq.models import Model, load
from kvq.scheduler import Priority
from kvq.version import __version__

_AS_STORED = "fp32"  # of a model whose weights are fp32, and as the table calls it


def requests_of(prompts: list[list[int]], output_tokens: int) -> list[LoadRequest]:
    """Prompts that arrive together, in no hurry."""
    return [
        LoadRequest(index=i, prompt=prompt, output_tokens=output_tokens, priority=Priority.BATCH)
        for i, prompt in enumerate(prompts)
    ]


def load_model(given: dict[str, Any]) -> Model:
    """The model, with as many threads and in the weights' format that were asked for."""
    if given["threads"] is not None:
        torch.set_num_threads(given["threads"])
    weights = "auto" if given["weights"] == _AS_STORED else given["weights"]
    return load(given["model"], device="cpu", weights=weights)


def make_server(given: dict[str, Any]) -> KvqServer:
    """An engine whose pool holds the load."""
    most = requests_of([[0] * given["tokens"]] * given["requests"], 0)
    return KvqServer(load_model(given), given["kv"], EngineConfig(prefix_caching=False), most)


class Kvq:
    """One engine."""

    def __init__(self, given: dict[str, Any]) -> None:
        self._server = make_server(given)
        self.about = {
            "version": __version__,
            "kernels": loaded().variant,  # raises without any: the reference is no contender
            "torch": torch.__version__,
            "torch_threads": torch.get_num_threads(),
            "block_size": self._server.llm.model.layout.block_size,
        }

    def run(self, prompts: list[list[int]], output_tokens: int) -> dict[str, Any]:
        """Run a load; see `Engine.run`."""
        served = self._server.run(requests_of(prompts, output_tokens), None).served
        served.sort(key=lambda one: one.request.index)
        return {"tokens": [one.tokens for one in served], "token_s": [one.token_s for one in served]}


if __name__ == "__main__":
    answer(Kvq)
