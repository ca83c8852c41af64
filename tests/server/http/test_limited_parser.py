"""Bodies in crumbs cost who sends them, and nobody else."""

import asyncio
import contextlib
import gc
import json
import random
import socket
import threading
import weakref
from itertools import pairwise
from time import perf_counter

import h11
import pytest
import uvicorn

from kvq.server.http import protocol
from kvq.server.http.guard import Access, Guard
from kvq.server.http.protocol import Connection, _LimitedParser
from tests.waiting import HANG_S, wait_for

HEAD = b"POST / HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n"


async def count(_scope, receive, send):
    """Answers with the number of bytes in the body."""
    total, more = 0, True
    while more:
        message = await receive()
        total += len(message.get("body", b""))
        more = message.get("more_body", False)
    body = str(total).encode()
    length = [(b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 200, "headers": length})
    await send({"type": "http.response.body", "body": body})


class World:
    """A guarded server in a thread, which notes how long its loop is kept."""

    def __enter__(self):
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.longest_s, self.ready = 0.0, threading.Event()
        app = Guard(count, access=Access())
        config = uvicorn.Config(
            app, interface="asgi3", http=Connection, ws="none", lifespan="off", log_config=None
        )
        self.server = uvicorn.Server(config)
        self.server.capture_signals = contextlib.nullcontext
        self.thread = threading.Thread(target=lambda: asyncio.run(self._main()))
        self.thread.start()
        assert self.ready.wait(HANG_S)
        return self

    async def _main(self):
        serving = asyncio.create_task(self.server.serve(sockets=[self.listener]))
        self.ready.set()
        while not serving.done():
            began = perf_counter()
            await asyncio.sleep(0)
            self.longest_s = max(self.longest_s, perf_counter() - began)
            await asyncio.sleep(0.001)
        await serving

    def __exit__(self, *_):
        self.server.should_exit = True
        self.thread.join()

    def connect(self):
        return socket.create_connection(self.listener.getsockname(), HANG_S)

    def post(self, *pieces):
        """Status and body of the answer to a request whose body is sent in these pieces."""
        with self.connect() as sock:
            sock.sendall(HEAD)
            with contextlib.suppress(ConnectionError):  # the answer came first
                for piece in pieces:
                    sock.sendall(piece)
            return read(sock)


def read(sock):
    got = b""
    with contextlib.suppress(ConnectionError):
        while more := sock.recv(1 << 16):
            got += more
    head, _, body = got.partition(b"\r\n\r\n")
    return int(head.split()[1]), body


def chunk(size, end=b""):
    return b"%x%b\r\n%b\r\n" % (size, end, b"a" * size)


@pytest.mark.parametrize(
    ("piece", "said"),
    [
        (b"1\r\na\r\n" * 10_000, "chunks of less than 128 bytes"),
        (chunk(100) * 2_000, "chunks of less than 128 bytes"),
        (chunk(1000, b";" + b"x" * 4_000) * 500, "more around them than in them"),
    ],
)
def test_bodies_of_crumbs_are_refused(piece, said):
    with World() as world:
        status, body = world.post(piece)
        assert status == 400
        assert said in json.loads(body)["error"]["message"]
        assert world.post(chunk(5), b"0\r\n\r\n") == (200, b"5"), "others are served"


@pytest.mark.parametrize("sizes", [[1] * 1_000, [128] * 5_000, [70_000] * 100, [1] * 1_000 + [9_000] * 100])
def test_bodies_in_pieces_that_some_client_may_send_are_read(sizes):
    with World() as world:
        assert world.post(b"".join(map(chunk, sizes)), b"0\r\n\r\n") == (200, b"%d" % sum(sizes))


@pytest.mark.parametrize("seed", range(10))
def test_however_a_body_is_cut_it_arrives_whole(seed):
    rng = random.Random(seed)
    sizes = [rng.choice([1, 2, 300, 5_000]) for _ in range(rng.randrange(1, 400))]
    sent = b"".join(map(chunk, sizes)) + b"0\r\n\r\n"
    cuts = sorted({0, len(sent), *(rng.randrange(len(sent)) for _ in range(rng.randrange(40)))})
    with World() as world:
        pieces = [sent[begin:end] for begin, end in pairwise(cuts)]
        assert world.post(*pieces) == (200, b"%d" % sum(sizes))


def test_one_read_full_of_events_is_parsed_in_turns():
    """64 KB of one-byte chunks: ten thousand events, which would take a third of a second at once."""
    parser = _LimitedParser()
    parser.receive_data(HEAD + b"1\r\na\r\n" * 1000)
    num_events, num_turns = 0, 0
    while num_events < 1001:
        parser.allowance, parser.ran_out, num_turns = protocol.SLICE_EVENTS, False, num_turns + 1
        while parser.next_event() is not h11.NEED_DATA:
            num_events += 1
        assert parser.ran_out == (num_events < 1001)
    assert num_turns == -(-1002 // protocol.SLICE_EVENTS)


def test_requests_behind_one_another_are_all_answered():
    """More of them in one read than are parsed at once."""
    request = b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
    with World() as world, world.connect() as sock:
        sock.sendall(request * 199 + request.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
        got = b"".join(iter(lambda: sock.recv(1 << 16), b""))
    assert got.count(b"HTTP/1.1 200") == 200


def test_small_reads_are_taken_so_many_a_second(monkeypatch):
    reads = []
    received = Connection.data_received
    monkeypatch.setattr(Connection, "data_received", lambda *given: (reads.append(1), received(*given)))
    monkeypatch.setattr(protocol, "_SMALL_READS", 5)
    with World() as world, world.connect() as sock:
        sock.sendall(HEAD)
        held = []
        for _ in range(200):
            sock.sendall(b"1\r\na\r\n")
            wait_for(lambda: reads, "the first to be read")
            held.append(len(reads))
        sock.sendall(b"0\r\n\r\n")
        assert read(sock) == (200, b"200"), "late, and whole"
    assert len(reads) < 100


def test_floods_of_crumbs_keep_nobody_waiting():
    with World() as world:
        stop = threading.Event()

        def flood():
            while not stop.is_set():
                with contextlib.suppress(OSError), world.connect() as sock:
                    sock.sendall(HEAD)
                    while not stop.is_set():
                        sock.sendall(b"1\r\na\r\n" * 2_000)

        floods = [threading.Thread(target=flood) for _ in range(8)]
        for thread in floods:
            thread.start()
        for _ in range(30):
            assert world.post(chunk(5), b"0\r\n\r\n") == (200, b"5")
        stop.set()
        for thread in floods:
            thread.join()


@pytest.mark.parametrize("line", [b"a:\r\n", b"a:\n"])
def test_heads_and_trailers_have_so_many_lines(line):
    """One event of h11 each, however long it takes."""
    head = HEAD.replace(b"\r\n\r\n", b"\r\n")
    many = line * protocol.MAX_LINES
    with World() as world:
        for sent in (head + many + b"\r\n", HEAD + b"0\r\n" + many + 2 * line + b"\r\n"):
            with world.connect() as sock:
                sock.sendall(sent)
                status, body = read(sock)
            assert status in (400, 431)
            assert f"may have {protocol.MAX_LINES} lines" in json.loads(body)["error"]["message"]
        assert world.post(chunk(5), b"0\r\n" + line * 100 + b"\r\n") == (200, b"5")


@pytest.mark.parametrize("count", [1, 64])
def test_heads_that_end_at_once_are_all_answered(count):
    """Most of them in turns."""
    with World() as world, contextlib.ExitStack() as stack:
        socks = [stack.enter_context(world.connect()) for _ in range(count)]
        for sock in socks:
            sock.sendall(HEAD[:-1])
        for sock in socks:
            sock.sendall(b"\n1\r\na\r\n")
        for sock in socks:
            sock.sendall(b"0\r\n\r\n")
        assert [read(sock) for sock in socks] == [(200, b"1")] * count


def test_a_parser_leaves_nothing_to_look_for():
    """Nobody collects garbage in the process that has one for each connection."""
    gc.disable()
    try:
        for data in (HEAD, HEAD[:-2] + b"a:\r\n" * 2 * protocol.MAX_LINES + b"\r\n"):
            parser = _LimitedParser()
            parser.receive_data(data)
            with contextlib.suppress(h11.RemoteProtocolError):
                parser.next_event()
            left = weakref.ref(parser)
            del parser
            assert left() is None
    finally:
        gc.enable()
