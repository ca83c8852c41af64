"""Dynamo's publisher relays kvq's block events to Dynamo's router, without etcd and without NATS.

    unshare -rn python -m tests.scale.dynamo.relay

One worker over discovery in memory, events over ZeroMQ. Prints the router's overlap with a prompt of 4 whole
blocks before it is computed, after that, and once its blocks are gone.
"""

import asyncio
import json
from time import monotonic

from dynamo.llm import (
    KvEventPublisher,
    KvRouter,
    KvRouterConfig,
    ModelInput,
    ModelType,
    WorkerType,
    register_model,
)
from dynamo.runtime import DistributedRuntime

from kvq.bench.serve.process import free_port
from kvq.models.describe.resolve import resolve_model
from tests.scale.dynamo.replicas import SIZE, WAIT_S, Replica, bring_up_loopback

PROMPT = list(range(4 * SIZE + 1))


async def _generate(request, context=None):
    yield {}


async def _overlaps() -> list[int]:
    runtime = DistributedRuntime(asyncio.get_running_loop(), "mem", "tcp", event_plane="zmq")
    endpoint = runtime.endpoint("kvq.backend.generate")
    serving = endpoint.serve_endpoint(_generate)
    await register_model(
        ModelInput.Tokens,
        ModelType.Completions,
        endpoint,
        str(resolve_model("tiny").folder),
        "tiny",
        worker_type=WorkerType.Aggregated,
        kv_cache_block_size=SIZE,
    )
    replica = Replica(f"tcp://127.0.0.1:{free_port()}")
    relay = KvEventPublisher(
        endpoint, kv_block_size=SIZE, zmq_endpoint=replica.config.address, enable_local_indexer=True
    )
    router = KvRouter(endpoint, SIZE, KvRouterConfig())
    found = [await _settled(replica, router, 0)]
    replica.run(PROMPT, gives_up=False)
    found.append(await _settled(replica, router, 4))
    replica.manager.drop_cached()
    found.append(await _settled(replica, router, 0))
    replica.publisher.close()
    relay.shutdown()
    runtime.shutdown()
    del serving
    return found


async def _settled(replica: Replica, router: KvRouter, expected: int) -> int:
    """The router's overlap once it is what was expected, or in the end."""
    began, overlap = monotonic(), -1
    while overlap != expected and monotonic() - began < WAIT_S:
        await asyncio.sleep(0.05)
        replica.flush()
        try:
            _, _, overlap = await router.best_worker(PROMPT)
        except Exception as error:  # it has not discovered the worker yet
            if "no endpoints" not in str(error):
                raise
    return overlap


def main() -> None:
    """Print what the router finds."""
    bring_up_loopback()
    print("found", json.dumps(asyncio.run(_overlaps())), flush=True)


if __name__ == "__main__":
    main()
