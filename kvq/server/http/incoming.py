"""Limits on request bodies: size, arrival time, and total bytes in memory."""

import asyncio
import contextlib
from collections import Counter

from starlette.types import Message, Receive

from kvq.cache.heap import give_back
from kvq.server.http.problems import Problem, unavailable

MAX_BODY = 8 << 20  # bytes
MAX_BODIES = 256 << 20  # bytes, in total for all unanswered requests
FREE = 64 << 10  # uncounted bytes of each body; large bodies then never shut out small ones
BODY_S = 30.0  # for a body to arrive
_SKIP_S = 1.0
_TRIM_S = 0.5  # delay after a large body is freed


class Incoming:
    """Byte counts of the bodies of unanswered requests; a tenant may use three quarters of the limit."""

    def __init__(self, most: int = MAX_BODIES) -> None:
        self.num_bytes = 0
        self._of: Counter[str] = Counter()  # bytes per tenant
        self._most = most
        self._is_trimming = False

    def body(self) -> "_RequestBody":
        """Provide the body of a new request, and free its bytes when the request has been answered."""
        return _RequestBody(self)

    def take(self, tenant: str, count: int) -> None:  # D303: one key may use three quarters
        """Count `count` more bytes for a tenant; raise Problem if a limit would be exceeded."""
        if self.num_bytes + count > self._most:
            raise unavailable(f"the requests at hand have {self.num_bytes} bytes; try again later")
        if self._of[tenant] + count > self._most * 3 // 4:
            raise unavailable(f"your requests at hand have {self._of[tenant]} bytes; try again later")
        self.num_bytes += count
        self._of[tenant] += count

    def give(self, tenant: str, count: int) -> None:
        """Subtract `count` bytes; soon afterwards, make the C library return freed memory to the system."""
        self.num_bytes -= count
        self._of[tenant] -= count
        if not self._of[tenant]:
            del self._of[tenant]
        if count and not self._is_trimming:
            self._is_trimming = True
            asyncio.get_running_loop().call_later(_TRIM_S, self._trim)

    def _trim(self) -> None:
        self._is_trimming = False
        asyncio.get_running_loop().run_in_executor(None, give_back)


class _RequestBody:
    def __init__(self, incoming: Incoming) -> None:
        self._incoming = incoming
        self._tenant = ""
        self._num_bytes = 0  # counted bytes

    # D311: read before the application is called
    async def read(self, receive: Receive, tenant: str = "", most: int = MAX_BODY) -> Receive | None:
        """Read a body of at most `most` bytes. Return a `receive` function that first returns this body and
        then forwards to the original one, or None if the client disconnected.

        Raises:
            Problem: the body is too large, arrives too slowly, or would exceed the limit on total bytes.
        """
        self._tenant = tenant
        body, more = bytearray(), True  # joined on arrival: several bodies may end at the same time
        try:
            async with asyncio.timeout(BODY_S):
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    body += message.get("body", b"")
                    more = message.get("more_body", False)
                    if len(body) > most:
                        raise too_large(most)
                    counted = max(0, len(body) - FREE)
                    self._incoming.take(tenant, counted - self._num_bytes)
                    self._num_bytes = counted
        except TimeoutError as error:
            raise Problem(408, f"the body did not arrive within {BODY_S:g} s") from error
        whole: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
        del body

        async def again() -> Message:
            return whole.pop() if whole else await receive()

        return again

    def release(self) -> None:
        self._incoming.give(self._tenant, self._num_bytes)
        self._num_bytes = 0


async def skip(receive: Receive) -> None:
    """Read and discard the rest of a refused body for a moment: if the connection were closed immediately, a
    client that is still sending would get a reset instead of the response.
    """
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_SKIP_S):
            while (await receive()).get("more_body", False):
                pass


def too_large(most: int) -> Problem:
    return Problem(413, f"a request may have {most} bytes here", code="request_too_large")
