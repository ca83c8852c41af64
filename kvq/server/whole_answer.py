"""A whole answer for one reader, who may be slow or stop reading."""

import asyncio
from collections.abc import Callable

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

_PIECE = 64 << 10  # bytes
_PATIENCE_S = 10.0  # for a reader to take one


class WholeAnswer(Response):
    """JSON, sent as fast as it is taken. Who takes no piece for ten seconds is cut off."""

    media_type = "application/json"

    def __init__(self, content: bytes, *, on_cut: Callable[[], object], on_end: Callable[[], object]) -> None:
        """`on_cut` is called if the reader is too slow, `on_end` when nothing is left to send."""
        super().__init__(content)
        self._on_cut = on_cut
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it, or as much as the reader takes."""
        content = bytes(self.body)
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            for start in range(0, len(content), _PIECE):
                end = start + _PIECE
                piece = {"body": content[start:end], "more_body": end < len(content)}
                async with asyncio.timeout(_PATIENCE_S):
                    await send({"type": "http.response.body", **piece})
        except TimeoutError:
            cut_off(scope, self._on_cut)
        finally:
            self._on_end()


def cut_off(scope: Scope, on_cut: Callable[[], object]) -> None:
    """End a connection whose reader is too slow, whatever is still to be sent."""
    on_cut()
    transport = scope.get("state", {}).get("kvq_transport")
    if transport is not None:
        transport.abort()
