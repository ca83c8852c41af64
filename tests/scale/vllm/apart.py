"""vLLM in a process of its own, with a main module that its workers need: prompts in, tokens out, as JSON."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.scale.vllm.kit import greedy, served

LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "VLLM_HOST_IP": "127.0.0.1"}


def greedy_apart(
    folder: Path, kv: str | None, prompts: list[list[int]], count: int, **options: Any
) -> list[list[int]]:
    """Tokens after each prompt, of an engine with those options, whose caches go to `folder`."""
    asked = json.dumps({"kv": kv, "prompts": prompts, "count": count, "options": options})
    done = subprocess.run(
        [sys.executable, "-m", "tests.scale.vllm.apart"],
        input=asked + "\n",
        env=os.environ | LOOPBACK | {"VLLM_CACHE_ROOT": str(folder)},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    tokens: list[list[int]] = json.loads(done.stdout.splitlines()[-1])
    return tokens


def main() -> None:
    """The question is a line of stdin, the tokens are stdout's last line."""
    asked = json.loads(sys.stdin.readline())
    with served(asked["kv"], **asked["options"]) as llm:
        tokens = greedy(llm, asked["prompts"], asked["count"])
    print(json.dumps(tokens))


if __name__ == "__main__":
    main()
