"""vLLM in this process, on CPUs, with nothing that leaves the machine."""

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import kvq

os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "TRITON_INTERPRET": "0",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
}

TINY = Path(kvq.__file__).parent / "models" / "tiny"
MEMORY = 24 << 20  # bytes of KV cache


@contextmanager
def served(kv: str | None, model: Path = TINY, **options: Any) -> Iterator[Any]:
    """A model in vLLM; `kv`: a format of kvq's, or vLLM's own."""
    from vllm import LLM

    asked = {} if kv is None else {"additional_config": {"kvq": kv}}
    given = {
        **{"dtype": "float32", "max_model_len": 512, "max_num_seqs": 8, "enforce_eager": True},
        **{"kv_cache_memory_bytes": MEMORY, "enable_prefix_caching": False},
    }
    llm = LLM(str(model), **given | asked | options)
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()


def greedy(llm: Any, prompts: list[list[int]], count: int) -> list[list[int]]:
    """Tokens after each prompt."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]
