"""Clients that don't read to the end, and what can be seen of a server that has them."""

import asyncio
import os
import random
import socket
import struct
from collections.abc import Callable

from prometheus_client.parser import text_string_to_metric_families

from kvq.bench.engine.load import LoadRequest
from kvq.bench.serve.client import Leave, get
from kvq.bench.serve.process import ServerProcess


async def reset(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """End the connection so that the other side sees a reset."""
    sock = writer.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


def stall(stall_s: float) -> Leave:
    """Stop reading, and go later."""

    async def leave(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
        reader._transport.pause_reading()  # type: ignore[attr-defined]
        await asyncio.sleep(stall_s)

    return leave


def some_rude(
    *, resets: float, stalls: float, stall_s: float, seed: int
) -> Callable[[LoadRequest], Leave | None]:
    """Choose a share of all clients that reset or stall, by the request's index and the seed."""

    def pick(request: LoadRequest) -> Leave | None:
        drawn = random.Random(f"{seed}/{request.index}").random()
        if drawn < resets:
            return reset
        return stall(stall_s) if drawn < resets + stalls else None

    return pick


async def metrics(server: ServerProcess) -> dict[str, float]:
    """All samples without labels by name, those with labels by name and labels' values."""
    _, body = await get(server.target, "/metrics")
    return {
        "/".join((sample.name, *sample.labels.values())): sample.value
        for family in text_string_to_metric_families(body.decode())
        for sample in family.samples
    }


def memory_bytes(server: ServerProcess) -> dict[str, int]:
    """Resident bytes of both processes."""
    return {"http": _resident(server.process.pid), "engine": _resident(server.engine_pid)}


def num_sockets(server: ServerProcess) -> int:
    """Open sockets of the HTTP process."""
    folder = f"/proc/{server.process.pid}/fd"
    return sum(_link(f"{folder}/{name}").startswith("socket:") for name in os.listdir(folder))


def _resident(pid: int) -> int:
    with open(f"/proc/{pid}/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:  # closed meanwhile
        return ""
