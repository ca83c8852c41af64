"""Floods: what clients could do to stop a server, beside eight who only want their tokens.

    python benchmarks/floods.py [--parts handshakes,crumbs,...] [--seconds 20]

handshakes: 4,600 connections that never begin their TLS handshake. crumbs: 64 connections of chunks of one
byte. heads: 400 heads of 15,500 lines that end at once. bodies: 32 clients with 8 MiB each, of the shapes
that take longest to read. grammars: one key's 70 schemas of 2,500 properties at a time. template: chats
whose template does not end. Each runs beside 8 streams of another key, which ran before without it. Flooders
take only processor time that nobody else on this machine wants, as if they were elsewhere, and stop by
themselves. Client and HTTP process share one core, the engine has the other.
Writes benchmarks/results/reliability-floods-cpu.json.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import resource
import signal
import ssl
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import trustme

from benchmarks.findings import NO_BOUNDS, RESULTS, Rows, finding, report
from benchmarks.rude import memory_bytes, metrics
from benchmarks.worst_bodies import CHATS, SHAPES, body_of
from kvq.bench.engine.load import LoadRequest
from kvq.bench.serve.client import Endpoint, Sent, get, send
from kvq.bench.serve.process import ServerProcess
from kvq.bench.serve.serve import as_served
from kvq.bench.timing import percentile
from kvq.evals.report.results import source_commit
from kvq.models.describe.resolve import EMBEDDED

KEYS = ("flooder", "polite")
_NUM_POLITE = 8
_REST_S = 35.0  # after a flood, before memory is looked at
_LOOP = "{% for i in range(9999) %}{% for j in range(9999) %}{% for k in range(9999) %}" + "{% endfor %}" * 3
_TEMPLATE = (
    "{% if 'loop' in messages[0].content %}" + _LOOP + "{% endif %}"
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}\n{% endfor %}<|assistant|>\n"
)
Flood = Callable[[str, int], Awaitable[Any]]


# What floods: each of these runs in a process of its own.


async def handshakes(host: str, port: int) -> None:
    """4,600 connections that say nothing; who is closed comes again."""

    async def one() -> None:
        while True:
            with contextlib.suppress(OSError):
                reader, writer = await asyncio.open_connection(host, port)
                _count("connections")
                await reader.read(1)
                writer.close()
            await asyncio.sleep(0.05)

    await asyncio.gather(*(one() for _ in range(4600)))


async def crumbs(host: str, port: int) -> None:
    """64 bodies of chunks of one byte, without an end."""
    head = _head("/v1/completions", "Transfer-Encoding: chunked")

    async def one() -> None:
        while True:
            with contextlib.suppress(OSError):
                _, writer = await asyncio.open_connection(host, port)
                writer.write(head)
                with contextlib.closing(writer):
                    while True:
                        writer.write(b"1\r\na\r\n" * 1000)
                        await writer.drain()
                        _count("chunks", 1000)
            await asyncio.sleep(0.01)

    await asyncio.gather(*(one() for _ in range(64)))


async def heads(host: str, port: int) -> None:
    """400 connections whose heads of 62 KB are all there but for their ends, which then come at once."""
    head = b"GET /v1/models HTTP/1.1\r\nHost: 127.0.0.1\r\n" + b"a:\r\n" * 15_500

    async def one(end: asyncio.Event) -> None:
        with contextlib.suppress(OSError):
            reader, writer = await asyncio.open_connection(host, port)
            with contextlib.closing(writer):
                writer.write(head)
                await end.wait()
                writer.write(b"\r\n")
                _count("heads")
                await reader.read()

    while True:
        end = asyncio.Event()
        asyncio.get_running_loop().call_later(1, end.set)
        await asyncio.gather(*(one(end) for _ in range(400)))


async def bodies(host: str, port: int) -> None:
    """32 clients with 8 MiB each, of every bad shape in turn."""
    shapes = itertools.cycle([(name, body_of(name)) for name in sorted(SHAPES)])

    async def one() -> None:
        while True:
            name, body = next(shapes)
            path = "/v1/chat/completions" if name in CHATS else "/v1/completions"
            await _post(host, port, path, body)

    await asyncio.gather(*(one() for _ in range(32)))


async def grammars(host: str, port: int) -> None:
    """70 schemas at a time, each another one."""
    numbers = itertools.count()

    async def one() -> None:
        while True:
            number = next(numbers)
            fields = {f"field_{number}_{i}": {"type": "string", "minLength": i % 7} for i in range(2500)}
            schema = {"type": "object", "properties": fields, "required": sorted(fields)}
            body = {"prompt": "a", "max_tokens": 1, "guided_json": schema}
            await _post(host, port, "/v1/completions", json.dumps(body).encode())

    await asyncio.gather(*(one() for _ in range(70)))


async def template(host: str, port: int) -> None:
    """16 chats whose template does not end."""
    body = {"model": "tiny", "max_tokens": 1, "messages": [{"role": "user", "content": "loop"}]}

    async def one() -> None:
        while True:
            await _post(host, port, "/v1/chat/completions", json.dumps(body).encode())

    await asyncio.gather(*(one() for _ in range(16)))


_counts: dict[str, int] = {}


def _count(what: str, number: int = 1) -> None:
    _counts[what] = _counts.get(what, 0) + number


def _head(path: str, *more: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: 127.0.0.1", "Content-Type: application/json"]
    lines += [f"Authorization: Bearer {KEYS[0]}", "Connection: close"]
    return "\r\n".join([*lines, *more, "", ""]).encode()


async def _post(host: str, port: int, path: str, body: bytes) -> None:
    """Send a request and read its answer, whatever it is."""
    with contextlib.suppress(OSError):
        reader, writer = await asyncio.open_connection(host, port)
        with contextlib.closing(writer):
            writer.write(_head(path, f"Content-Length: {len(body)}"))
            writer.write(body)
            with contextlib.suppress(ConnectionError):
                await writer.drain()
            status = (await reader.read(12))[9:].decode()
            _count(f"status {status or 'none'}")
            while await reader.read(1 << 16):
                pass
            return
    _count("no connection")
    await asyncio.sleep(0.05)


FLOODS: dict[str, Flood] = {
    one.__name__: one for one in (handshakes, crumbs, heads, bodies, grammars, template)
}


def start_flood(name: str, port: int, seconds: float) -> subprocess.Popen[bytes]:  # D339
    """A process that says so when it begins, and what it did when it has ended.

    Of the lowest priority from its first moment: what it imports would be in the way of what is measured.
    """
    command = [sys.executable, "-m", "benchmarks.floods", "--flood", name]
    command += ["--port", str(port), "--seconds", str(seconds)]
    return subprocess.Popen(["chrt", "--idle", "0", *command], stdout=subprocess.PIPE)


async def _flood(name: str, port: int, seconds: float) -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    print("floods", flush=True)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await FLOODS[name]("127.0.0.1", port)
    print(json.dumps(_counts))


# What is measured beside it.


class Beside:
    """Eight streams, a look at /health/live every 50 ms, and what else one polite key asks for."""

    def __init__(self, server: ServerProcess, name: str) -> None:
        self.sent: list[Sent] = []
        self.live_s: list[float] = []
        self.asked_s: list[float] = []
        self.failed: list[str] = []
        self._server = server
        self._body = {
            "grammars": {"guided_choice": ["yes", "no"], "prompt": "a"},
            "template": {"messages": [{"role": "user", "content": "Hi"}], "model": "tiny"},
        }.get(name)

    async def run(self, seconds: float) -> None:
        """For so long; streams are read to their ends."""
        end_s = perf_counter() + seconds
        tasks = [self._stream(number, end_s) for number in range(_NUM_POLITE)]
        await asyncio.gather(*tasks, self._look(end_s), self._ask(end_s))

    @property
    def itl_ms_p99(self) -> float:
        """Between two tokens, of all streams."""
        return 1e3 * percentile([gap for one in as_served(self.sent).served for gap in one.itl_s], 99)

    @property
    def num_failed(self) -> int:
        """Whoever did not get what they asked for."""
        return len(self.failed) + sum(not one.is_complete for one in self.sent)

    async def _stream(self, number: int, end_s: float) -> None:
        for index in itertools.count():
            if perf_counter() > end_s:
                return
            prompt = [number + 1, index % 100 + 1, 7, 8]
            request = LoadRequest(index=index, prompt=prompt, output_tokens=200)
            self.sent.append(await send(self._server.target, request, perf_counter()))

    async def _look(self, end_s: float) -> None:
        while (began := perf_counter()) < end_s:
            try:
                status, _ = await get(self._server.target, "/health/live")
                if status != 200:
                    self.failed.append(f"/health/live: {status}")
            except (OSError, EOFError, TimeoutError) as error:
                self.failed.append(f"/health/live: {error!r}")
            self.live_s.append(perf_counter() - began)
            await asyncio.sleep(0.05)

    async def _ask(self, end_s: float) -> None:
        while self._body is not None and (began := perf_counter()) < end_s:
            body = json.dumps({**self._body, "max_tokens": 4}).encode()
            path = "/v1/chat/completions" if "messages" in self._body else "/v1/completions"
            status = await _status(self._server.target, path, body)
            self.asked_s.append(perf_counter() - began)
            if status != 200:
                self.failed.append(f"{path}: {status}")
            await asyncio.sleep(0.2)


async def _status(target: Endpoint, path: str, body: bytes) -> int:
    reader, writer = await asyncio.open_connection(target.host, target.port)
    with contextlib.closing(writer):
        head = _head(path, f"Content-Length: {len(body)}").replace(KEYS[0].encode(), target.key.encode())
        writer.write(head + body)
        answer = await reader.read()
    return int(answer[9:12] or b"0")


@contextlib.asynccontextmanager
async def a_server(name: str) -> AsyncIterator[ServerProcess]:
    """One with two keys; for handshakes over TLS, for templates with one that may loop."""
    with tempfile.TemporaryDirectory() as scratch:
        folder, tls = Path(scratch), None
        keys = folder / "keys"
        keys.touch(0o600)
        keys.write_text("\n".join(KEYS))
        options = ["--kv", "int4", "--num-blocks", "1024", "--api-key-file", str(keys), *NO_BOUNDS]
        if name == "handshakes":
            tls = ssl.create_default_context()
            options += ["--ssl-certfile", str(folder / "cert"), "--ssl-keyfile", str(folder / "key")]
            certify(folder, tls)
        if name == "template":
            for file in EMBEDDED["tiny"].iterdir():
                (folder / file.name).write_bytes(file.read_bytes())
            (folder / "chat_template.jinja").write_text(_TEMPLATE)
        model = str(folder) if name == "template" else "tiny"
        options += ["--model", model, "--served-model-name", "tiny"]
        async with ServerProcess(options, pin=True, key=KEYS[1], tls=tls) as server:
            yield server


def certify(folder: Path, trusting: ssl.SSLContext) -> None:
    """Write `cert` and `key` for 127.0.0.1, which `trusting` then trusts."""
    authority = trustme.CA()
    certificate = authority.issue_cert("127.0.0.1")
    certificate.cert_chain_pems[0].write_to_path(str(folder / "cert"))
    (folder / "key").touch(0o600)
    certificate.private_key_pem.write_to_path(str(folder / "key"))
    authority.configure_trust(trusting)


async def beside(name: str, seconds: float) -> Rows:
    """A flood and what it did to others."""
    async with a_server(name) as server:
        calm = Beside(server, name)
        await Beside(server, name).run(seconds / 4)  # everything has been used once
        await calm.run(seconds / 2)
        before, log_bytes = memory_bytes(server), len(server.log)
        flood = start_flood(name, server.target.port, seconds)
        try:
            assert flood.stdout is not None, "it was started with a pipe"
            await asyncio.to_thread(flood.stdout.readline)
            await asyncio.sleep(2)  # in full swing
            during = Beside(server, name)
            await during.run(seconds - 4)
            told, _ = await asyncio.to_thread(flood.communicate, timeout=60)
        finally:
            flood.kill()
        log_bytes = len(server.log) - log_bytes
        await asyncio.sleep(_REST_S)
        after = memory_bytes(server)
        stretch_ms = 1e3 * (await metrics(server))["kvq_http_longest_stretch_seconds"]
    return _rows(name, calm, during, json.loads(told), log_bytes, stretch_ms) + _memory(name, before, after)


def _rows(
    name: str, calm: Beside, during: Beside, counts: dict[str, int], log_bytes: int, stretch_ms: float
) -> Rows:
    p99 = calm.itl_ms_p99, during.itl_ms_p99
    live = 1e3 * percentile(during.live_s, 99)
    rows = [
        finding(f"{name}: polite who failed", during.num_failed, "0", during.num_failed == 0,
                streams=len(during.sent), flood=counts, first=during.failed[:5]),
        finding(f"{name}: between tokens, p99, flooded / calm", p99[1] / p99[0], "2", p99[1] <= 2 * p99[0],
                ms=p99),
        finding(f"{name}: /health/live, p99 ms", live, "100", live <= 100,
                calm=1e3 * percentile(calm.live_s, 99)),
        finding(f"{name}: longest stretch of the loop, ms", stretch_ms, "20", stretch_ms <= 20),
        finding(f"{name}: log, MB", log_bytes / 1e6, "1", log_bytes <= 1e6),
    ]  # fmt: skip
    if during.asked_s:
        calm_s, during_s = (percentile(one.asked_s, 99) for one in (calm, during))
        rows.append(
            finding(f"{name}: another key's own request of the kind, p99 s", during_s, "", True, calm=calm_s)
        )
    return rows


def _memory(name: str, before: dict[str, int], after: dict[str, int]) -> Rows:
    grown = {process: after[process] / before[process] for process in before}
    megabytes = {process: (before[process] / 1e6, after[process] / 1e6) for process in before}
    holds = all(one <= 1.05 for one in grown.values())
    return [finding(f"{name}: memory after / before", grown, "within 5%", holds, megabytes=megabytes)]


async def floods(names: list[str], seconds: float) -> Rows:
    """One after the other, each beside a server of its own."""
    rows: Rows = []
    for name in names:
        rows += await beside(name, seconds)
        print(f"{name} done", file=sys.stderr, flush=True)
    return rows


def main() -> None:
    """Run the parts and write what they found."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", default=",".join(FLOODS))
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--flood", choices=sorted(FLOODS), help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.flood is not None:
        asyncio.run(_flood(given.flood, given.port, given.seconds))
        return
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # servers are ended
    source_commit()
    began = perf_counter()
    rows = asyncio.run(floods(given.parts.split(","), given.seconds))
    holds = report(given.out / "reliability-floods-cpu.json", rows, seconds=perf_counter() - began)
    sys.exit(not holds)


if __name__ == "__main__":
    main()
