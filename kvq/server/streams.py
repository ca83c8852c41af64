"""Streams of messages: several as one, and the end of those nobody reads."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.types import Receive

from kvq.server.problems import Problem

T = TypeVar("T")


async def merge(streams: Sequence[AsyncGenerator[T]]) -> AsyncGenerator[tuple[int, T]]:
    """(index of its stream, item) as they come; the first failure ends all."""
    if len(streams) == 1:
        async with aclosing(streams[0]) as only:
            async for item in only:
                yield 0, item
        return
    queue: asyncio.Queue[tuple[int, T] | BaseException | None] = asyncio.Queue(64)

    async def pump(index: int, stream: AsyncGenerator[T]) -> None:
        try:
            async with aclosing(stream):
                async for item in stream:
                    await queue.put((index, item))
        except Exception as error:  # noqa: BLE001 - raised where it is read
            await queue.put(error)
        else:
            await queue.put(None)

    tasks = [asyncio.create_task(pump(i, stream)) for i, stream in enumerate(streams)]
    try:
        left = len(tasks)
        while left:
            taken = await queue.get()
            if isinstance(taken, BaseException):
                raise taken
            if taken is None:
                left -= 1
            else:
                yield taken
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T | None:
    """The result of some work; None, and the work is cancelled, if the client goes before."""
    task = asyncio.create_task(work)
    watch = asyncio.create_task(until_gone(request.receive))
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        return None
    finally:
        for one in (task, watch):
            one.cancel()
            with contextlib.suppress(asyncio.CancelledError, Problem):
                await one


async def first_of(chunks: AsyncGenerator[T]) -> AsyncGenerator[T]:
    """Wait for the first item, so that what fails at once is an error and not a broken stream."""
    try:
        first = await anext(chunks)
    except StopAsyncIteration:
        return _chain([], chunks)
    return _chain([first], chunks)


async def _chain(first: list[T], rest: AsyncGenerator[T]) -> AsyncGenerator[T]:
    async with aclosing(rest):
        for item in first:
            yield item
        async for item in rest:
            yield item


async def until_gone(receive: Receive) -> None:
    """Return when the client went; what it still sends is dropped."""
    while (await receive())["type"] != "http.disconnect":
        pass
