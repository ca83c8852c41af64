"""A model over two processes of vLLM, for which it needs a main module: prompts in, tokens out, as JSON."""

import json
import os
import sys

from tests.scale.vllm.kit import greedy, served

os.environ |= {
    "GLOO_SOCKET_IFNAME": "lo",
    "VLLM_CPU_OMP_THREADS_BIND": "0|1",
    "VLLM_HOST_IP": "127.0.0.1",
}


def main() -> None:
    """`{"kv": ..., "prompts": ..., "count": ...}` in a line of stdin; the tokens are stdout's last line."""
    asked = json.loads(sys.stdin.readline())
    over = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    with served(asked["kv"], **over) as llm:
        tokens = greedy(llm, asked["prompts"], asked["count"])
    print(json.dumps(tokens))


if __name__ == "__main__":
    main()
