"""Who runs beside others, and who alone."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Turns:
    """Many side by side, or one alone; who wants to be alone goes before those who come after."""

    def __init__(self) -> None:
        self._changed = asyncio.Condition()
        self._beside = 0
        self._wanting = 0  # to be alone, or are

    @asynccontextmanager
    async def beside(self) -> AsyncIterator[None]:
        """Together with others."""
        async with self._changed:
            await self._changed.wait_for(lambda: not self._wanting)
            self._beside += 1
        try:
            yield
        finally:
            self._beside -= 1
            await self._tell()

    @asynccontextmanager
    async def alone(self) -> AsyncIterator[None]:
        """With nobody else, once all others have left."""
        self._wanting += 1
        try:
            async with self._changed:
                await self._changed.wait_for(lambda: not self._beside)
                self._beside += 1
            try:
                yield
            finally:
                self._beside -= 1
        finally:
            self._wanting -= 1
            await self._tell()

    async def _tell(self) -> None:
        async with self._changed:
            self._changed.notify_all()
