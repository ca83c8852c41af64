"""OpenVINO GenAI's continuous batching as a contender, stepped so that each step's tokens have a time."""

from time import perf_counter
from typing import Any

import numpy as np
import openvino
import openvino_genai

from benchmarks.peers.answering import answer

_STEP_TOKENS, _CACHE_GB = 2048, 1  # kvq's steps hold as many


class OpenVino:
    """One pipeline over an exported model."""

    def __init__(self, given: dict[str, Any]) -> None:
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = _CACHE_GB
        scheduler.max_num_batched_tokens = _STEP_TOKENS
        scheduler.enable_prefix_caching = False
        properties = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": given["kv"]}
        if given["threads"] is not None:
            properties["INFERENCE_NUM_THREADS"] = given["threads"]
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(
            given["model"], scheduler, "CPU", properties
        )
        self.about = {
            "version": openvino_genai.__version__,
            "openvino": openvino.__version__,
            "properties": properties,
            "scheduler": {"cache_size": _CACHE_GB, "max_num_batched_tokens": _STEP_TOKENS},
        }

    def run(self, prompts: list[list[int]], output_tokens: int) -> dict[str, Any]:
        """Run a load; see `Engine.run`."""
        config = openvino_genai.GenerationConfig(
            max_new_tokens=output_tokens, ignore_eos=True, do_sample=False, apply_chat_template=False
        )
        tensors = [openvino.Tensor(np.array([prompt], dtype=np.int64)) for prompt in prompts]
        tokens: list[list[int]] = [[] for _ in prompts]
        token_s: list[list[float]] = [[] for _ in prompts]
        began = perf_counter()
        handles = [self._pipeline.add_request(i, tensor, config) for i, tensor in enumerate(tensors)]
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
            now = perf_counter() - began
            for i, handle in enumerate(handles):
                while handle.can_read():
                    for output in handle.read().values():
                        tokens[i] += output.generated_ids
                        token_s[i] += [now] * len(output.generated_ids)
        return {"tokens": tokens, "token_s": token_s}


if __name__ == "__main__":
    answer(OpenVino)
