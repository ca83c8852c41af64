"""llama.cpp as a contender, by llama-cpp-python: one sequence, flash attention."""

from time import perf_counter
from typing import Any

import llama_cpp
import numpy as np

from benchmarks.peers.answering import answer

_CACHE_TYPES = {
    "f32": llama_cpp.GGML_TYPE_F32,
    "f16": llama_cpp.GGML_TYPE_F16,
    "q8_0": llama_cpp.GGML_TYPE_Q8_0,
    "q4_0": llama_cpp.GGML_TYPE_Q4_0,
}
_STEP_TOKENS = 2048


class Llama:
    """One context over a GGUF file."""

    def __init__(self, given: dict[str, Any]) -> None:
        kind = _CACHE_TYPES[given["kv"]]
        self._model = llama_cpp.Llama(
            given["model"],
            n_ctx=given["tokens"],
            n_batch=_STEP_TOKENS,
            n_threads=given["threads"],
            n_threads_batch=given["threads"],
            flash_attn=True,
            type_k=kind,
            type_v=kind,
            verbose=False,
        )
        self.about = {
            "version": llama_cpp.__version__,
            "system": llama_cpp.llama_print_system_info().decode(),
            "n_threads": self._model.n_threads,
            "n_batch": _STEP_TOKENS,
            "n_ubatch": self._model.context_params.n_ubatch,
            "flash_attn": True,
        }

    def run(self, prompts: list[list[int]], output_tokens: int) -> dict[str, Any]:
        """Run a load, one prompt after another; see `Engine.run`."""
        tokens, token_s = [], []
        began = perf_counter()
        for prompt in prompts:
            self._model.reset()
            found: list[int] = []
            times: list[float] = []
            fed = prompt
            for _ in range(output_tokens):
                self._model.eval(fed)
                fed = [self._likeliest()]
                found += fed
                times.append(perf_counter() - began)
            tokens.append(found)
            token_s.append(times)
        return {"tokens": tokens, "token_s": token_s}

    def _likeliest(self) -> int:
        logits = llama_cpp.llama_get_logits_ith(self._model.ctx, -1)
        return int(np.ctypeslib.as_array(logits, (self._model.n_vocab(),)).argmax())


if __name__ == "__main__":
    answer(Llama)
