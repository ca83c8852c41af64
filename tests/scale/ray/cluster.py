"""A local Ray on loopback, an application on it, and clients that tell what became of every request."""

import asyncio
import os
import secrets
import signal
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvq.bench.serve.process import free_port
from tests.waiting import HANG_S, wait_for

REPLICA, ENGINE = "ray::ServeReplica:default:kvq-engine", "kvq.server.engine.worker"
_STORE = 100 << 20  # bytes; Ray's least is 75 MiB

# Before Ray is imported: it would write a token into the home directory, and tell its makers what is used
os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"


@contextmanager
def local_ray() -> Iterator[str]:
    """Ray and Serve's proxy; gives the proxy's address."""
    os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    import ray
    from ray import serve

    with tempfile.TemporaryDirectory(prefix="kvq-ray", ignore_cleanup_errors=True) as folder:
        ray.init(
            num_cpus=8,  # of which nobody is; replicas ask for one each
            include_dashboard=False,
            object_store_memory=_STORE,
            log_to_driver=False,
            _node_ip_address="127.0.0.1",
            _temp_dir=folder,
            _system_config={"worker_niceness": 0},  # else 15: whatever else runs here would go first
        )
        try:
            port = free_port()
            serve.start(http_options={"host": "127.0.0.1", "port": port})
            yield f"http://127.0.0.1:{port}"
        finally:
            serve.shutdown()
            ray.shutdown()


def pids_of(what: str) -> list[int]:
    """Processes under this one whose command line has `what`."""
    parents, found = {}, []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            line = (folder / "cmdline").read_text()
        except OSError:
            continue
        if what in line:
            found.append(int(folder.name))
    return [pid for pid in found if _is_under(pid, parents)]


def _is_under(pid: int, parents: dict[int, int]) -> bool:
    while pid in parents:
        if pid == os.getpid():
            return True
        pid = parents[pid]
    return False


def kill_one(what: str) -> int:
    """End the first process of a kind at once; returns which one it was."""
    pid = min(pids_of(what))
    os.kill(pid, signal.SIGKILL)
    return pid


class Load:
    """Clients that stream one completion after the other, until told to stop. Nothing is sent again."""

    def __init__(self, url: str, *, clients: int = 6, max_tokens: int = 60) -> None:
        import openai

        self.ended: Counter[str] = Counter()  # whole, told (by an error object), anything else
        self.texts: set[str] = set()
        self._client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=HANG_S)
        self._num_clients = clients
        self._max_tokens = max_tokens
        self._is_over = False

    async def during(self, work: Callable[[], Any], *, before: int = 12, after: int = 24) -> None:
        """Do something in the midst of the load: after `before` requests, and before `after` more."""
        tasks = [asyncio.create_task(self._ask_on(i)) for i in range(self._num_clients)]
        try:
            await self._until(before)
            await asyncio.to_thread(work)
            await self._until(self.ended.total() + after)
        finally:
            self._is_over = True
            await asyncio.gather(*tasks)
            await self._client.close()

    async def _until(self, count: int) -> None:
        async with asyncio.timeout(HANG_S):
            while self.ended.total() < count:
                await asyncio.sleep(0.02)

    async def _ask_on(self, number: int) -> None:
        while not self._is_over:
            self.ended[await self._ask(f"Client {number} asks how it goes on from here")] += 1

    async def _ask(self, prompt: str) -> str:
        import openai

        finish, text = None, ""
        try:
            stream = await self._client.completions.create(
                model="tiny", prompt=prompt, max_tokens=self._max_tokens, temperature=0, stream=True
            )
            async for chunk in stream:
                text += chunk.choices[0].text
                finish = chunk.choices[0].finish_reason or finish
        except openai.APIError as error:
            is_told = isinstance(error.body, dict) and "send the request again" in error.body["message"]
            return "told" if is_told else f"{type(error).__name__}: {error}"
        self.texts.add(prompt + text)
        return "whole" if finish is not None else "cut off"


def gone(pid: int) -> None:
    """Wait until a process has ended."""
    wait_for(lambda: not Path(f"/proc/{pid}").exists(), f"process {pid} ends")
