"""Who only occupies a connection gives way; the limit of descriptors is known; trouble is told once."""

import asyncio
import contextlib
import errno
import logging
import random
import resource
import socket
import ssl
import threading

import pytest
import trustme
import uvicorn

from kvq.errors import ConfigError
from kvq.server.http import listener as listener_module
from kvq.server.http.listener import Listener
from kvq.server.http.protocol import Connection
from tests.server.kit import Server
from tests.waiting import HANG_S, wait_for

GET = b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"


class World:
    """A listener over an application whose answers to /slow wait until they may be given."""

    def __init__(self, *, max_connections=8, max_per_address=8, tls=None):
        self.sock = socket.create_server(("127.0.0.1", 0), backlog=1024)
        self.options = {
            "max_connections": max_connections,
            "max_per_address": max_per_address,
            "tls": tls if tls is None or callable(tls) else lambda: tls,
        }
        self.may_answer, self.ready, self.ended = threading.Event(), threading.Event(), threading.Event()
        self.thread = threading.Thread(target=lambda: asyncio.run(self._main()))

    async def _main(self):
        config = uvicorn.Config(
            self._app, interface="asgi3", http=Connection, ws="none", lifespan="off", log_config=None
        )
        server = uvicorn.Server(config)
        server.capture_signals = contextlib.nullcontext
        self.listener = Listener(self.sock, **self.options)
        config.load()
        self.listener.open(
            lambda slot: Connection(config, server.server_state, {}, asyncio.get_running_loop(), slot)
        )
        serving = asyncio.create_task(server.serve(sockets=[]))
        self.ready.set()
        while not self.ended.is_set():
            await asyncio.sleep(0.01)
        self.listener.close()
        server.should_exit = True
        await serving

    async def _app(self, scope, receive, send):
        while scope["path"] == "/slow" and not self.may_answer.is_set():
            await asyncio.sleep(0.01)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})

    def __enter__(self):
        self.thread.start()
        assert self.ready.wait(HANG_S)
        return self

    def __exit__(self, *_):
        self.may_answer.set()
        self.ended.set()
        self.thread.join()

    def connect(self, source="127.0.0.1"):
        return socket.create_connection(self.sock.getsockname(), HANG_S, source_address=(source, 0))


def ask(sock, path=b"/"):
    sock.sendall(GET.replace(b"/", path, 1))
    return answer(sock)


def answer(sock):
    """All of it, or what came before the end."""
    got = b""
    while not got.endswith(b"ok") and (more := sock.recv(1 << 16)):
        got += more
    return got


def is_closed(sock):
    """The server has closed it, maybe after an error object."""
    sock.settimeout(HANG_S)
    with contextlib.suppress(ConnectionError):
        while sock.recv(1 << 16):
            pass
    return True


@pytest.fixture(scope="module")
def authority():
    return trustme.CA()


@pytest.fixture(scope="module")
def tls(authority):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("localhost").configure_cert(context)
    return context


@pytest.fixture
def client_tls(authority):
    context = ssl.create_default_context()
    authority.configure_trust(context)
    return context


def greeting(client_tls):
    """A client's first words, and what goes on from there: (bytes, the client, its ears, its mouth)."""
    coming, going = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = client_tls.wrap_bio(coming, going, server_hostname="localhost")
    with pytest.raises(ssl.SSLWantReadError):
        client.do_handshake()
    return going.read(), client, coming, going


def test_a_flood_of_silent_connections_keeps_nobody_out(caplog):
    with World() as world, contextlib.ExitStack() as stack:
        silent = [stack.enter_context(world.connect()) for _ in range(60)]
        for _ in range(20):
            with world.connect() as polite:
                assert ask(polite).startswith(b"HTTP/1.1 200")
            silent.append(stack.enter_context(world.connect()))
        assert all(is_closed(sock) for sock in silent[:50]), "the oldest gave way"
        assert world.listener.num_connections <= 8
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_connections_in_their_handshake_count_and_give_way(tls, client_tls, caplog):
    with World(tls=tls) as world, contextlib.ExitStack() as stack:
        silent = [stack.enter_context(world.connect()) for _ in range(60)]
        for _ in range(5):
            raw = stack.enter_context(world.connect())
            with client_tls.wrap_socket(raw, server_hostname="localhost") as polite:
                assert ask(polite).startswith(b"HTTP/1.1 200")
        assert world.listener.num_connections <= 8
        assert all(is_closed(sock) for sock in silent[:40])
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_who_has_not_said_a_word_takes_no_handshake_from_others(tls, client_tls, monkeypatch):
    monkeypatch.setattr(listener_module, "_TO_SPEAK_S", 10 * HANG_S)
    monkeypatch.setattr(listener_module, "_MAX_HANDSHAKES", 2)
    with World(tls=tls, max_connections=40, max_per_address=40) as world, contextlib.ExitStack() as stack:
        for _ in range(20):
            stack.enter_context(world.connect())
        raw = stack.enter_context(world.connect())
        with client_tls.wrap_socket(raw, server_hostname="localhost") as polite:
            assert ask(polite).startswith(b"HTTP/1.1 200")


def test_the_oldest_handshake_gives_way(tls, client_tls, monkeypatch):
    monkeypatch.setattr(listener_module, "_MAX_HANDSHAKES", 2)
    with World(tls=tls, max_connections=40, max_per_address=40) as world, contextlib.ExitStack() as stack:
        begun = [stack.enter_context(world.connect()) for _ in range(6)]
        for sock in begun:
            sock.sendall(greeting(client_tls)[0])
        raw = stack.enter_context(world.connect())
        with client_tls.wrap_socket(raw, server_hostname="localhost") as polite:
            assert ask(polite).startswith(b"HTTP/1.1 200")
        assert all(is_closed(sock) for sock in begun[:4])


def test_a_closed_door_forgets_who_waits_for_a_handshake(tls, client_tls, monkeypatch):
    monkeypatch.setattr(listener_module, "_MAX_HANDSHAKES", 1)
    monkeypatch.setattr(listener_module, "_TO_SPEAK_S", 10 * HANG_S)
    with contextlib.ExitStack() as stack:
        with World(tls=tls) as world:
            socks = [stack.enter_context(world.connect()) for _ in range(4)]
            for sock in socks[:3]:
                sock.sendall(greeting(client_tls)[0])
            wait_for(lambda: len(world.listener._spoken) == 2, "two to wait")
        assert all(map(is_closed, socks))
        assert not world.listener._addresses


def test_greetings_that_end_at_once_begin_their_handshakes_in_turns(tls, client_tls):
    """Their last byte is what costs; until it is there, they are in no handshake."""
    with World(tls=tls, max_connections=40, max_per_address=40) as world, contextlib.ExitStack() as stack:
        begun = []
        for _ in range(20):
            hello, *client = greeting(client_tls)
            sock = stack.enter_context(world.connect())
            for piece in (hello[:3], hello[3:-1]):
                sock.sendall(piece)
            begun.append((sock, hello[-1:], *client))
        wait_for(lambda: world.listener.num_connections == 20, "all to be accepted")
        assert not world.listener._handshakes
        for sock, last, *_ in begun:
            sock.sendall(last)
        for sock, _, client, coming, going in begun:
            while True:
                with contextlib.suppress(ssl.SSLWantReadError):
                    client.do_handshake()
                    break
                coming.write(sock.recv(1 << 16))
            client.write(GET)
            sock.sendall(going.read())
            got = b""
            while not got.endswith(b"ok"):
                coming.write(sock.recv(1 << 16))
                with contextlib.suppress(ssl.SSLWantReadError):
                    while True:
                        got += client.read()
            assert got.startswith(b"HTTP/1.1 200")


def test_garbage_in_place_of_a_handshake_frees_its_place(tls, client_tls):
    with World(tls=tls) as world:
        for sent in (b"", b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x00\x05hello", bytes(500)):
            with world.connect() as sock:
                sock.sendall(sent)
                sock.shutdown(socket.SHUT_WR)
                assert is_closed(sock)
        wait_for(lambda: world.listener.num_connections == 0, "all places to be free")
        with client_tls.wrap_socket(world.connect(), server_hostname="localhost") as polite:
            assert ask(polite).startswith(b"HTTP/1.1 200")


def test_who_waits_for_an_answer_does_not_give_way_and_new_ones_wait(caplog):
    caplog.set_level(logging.INFO, logger="kvq")
    with World() as world, contextlib.ExitStack() as stack:
        busy = [stack.enter_context(world.connect()) for _ in range(8)]
        for sock in busy:
            sock.sendall(GET.replace(b"/", b"/slow", 1))
        wait_for(lambda: world.listener._num[listener_module.Stage.BUSY] == 8, "all to be busy")
        late = [stack.enter_context(world.connect()) for _ in range(20)]
        for sock in late:
            sock.sendall(GET)
        wait_for(lambda: "busy" in caplog.text, "accepting to be paused")
        world.may_answer.set()
        for sock in busy + late:
            assert answer(sock).startswith(b"HTTP/1.1 200")
            sock.close()
    told = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert told == ["all 8 connections are busy; new ones wait"]


def test_idle_connections_give_way_after_silent_ones():
    with World(max_connections=4, max_per_address=4) as world, contextlib.ExitStack() as stack:
        idle = [stack.enter_context(world.connect()) for _ in range(3)]
        assert all(ask(sock).startswith(b"HTTP/1.1 200") for sock in idle)
        silent = stack.enter_context(world.connect())
        wait_for(lambda: world.listener.num_connections == 4, "all to be there")
        new = stack.enter_context(world.connect())
        assert ask(new).startswith(b"HTTP/1.1 200")
        assert is_closed(silent)
        another = stack.enter_context(world.connect())
        assert ask(another).startswith(b"HTTP/1.1 200")
        assert is_closed(idle[0])
        assert ask(idle[1]).startswith(b"HTTP/1.1 200")


def test_an_address_has_its_share():
    with World(max_per_address=3) as world, contextlib.ExitStack() as stack:
        busy = [stack.enter_context(world.connect()) for _ in range(3)]
        for sock in busy:
            sock.sendall(GET.replace(b"/", b"/slow", 1))
        wait_for(lambda: world.listener._num[listener_module.Stage.BUSY] == 3, "all to be busy")
        assert is_closed(stack.enter_context(world.connect()))
        other = stack.enter_context(world.connect("127.0.0.2"))
        assert ask(other).startswith(b"HTTP/1.1 200")
        world.may_answer.set()
        assert all(answer(sock).startswith(b"HTTP/1.1 200") for sock in busy)
        again = stack.enter_context(world.connect())
        assert ask(again).startswith(b"HTTP/1.1 200"), "one of its idle ones gave way"


def test_no_descriptors_are_told_once_and_got_over(monkeypatch, caplog):
    monkeypatch.setattr(listener_module, "_AGAIN_S", 0.01)
    with World() as world:
        calls = []

        class Short:
            def __getattr__(self, name):
                return getattr(world.sock, name)

            def accept(self):
                calls.append(1)
                if len(calls) < 30:
                    raise OSError(errno.EMFILE, "Too many open files")
                return world.sock.accept()

        world.listener._sock = Short()
        with world.connect() as sock:
            assert ask(sock).startswith(b"HTTP/1.1 200")
    told = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert told == ["no connection can be accepted: Too many open files"]


def test_the_limit_of_descriptors_bounds_connections(monkeypatch):
    limits = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (64, 100))
    monkeypatch.setattr(resource, "setrlimit", lambda _, given: limits.append(given))
    monkeypatch.setattr(listener_module, "_num_open", lambda: 20)
    with socket.create_server(("127.0.0.1", 0)) as sock:
        listener = Listener(sock, tls=None, max_connections=4096, max_per_address=2048)
        assert (listener.max_connections, limits) == (100 - 20 - listener_module._FOR_OTHERS, [(100, 100)])
        monkeypatch.setattr(resource, "getrlimit", lambda _: (40, 40))
        with pytest.raises(ConfigError, match=r"40 files may be open.*ulimit -n"):
            Listener(sock, tls=None, max_connections=4096, max_per_address=2048)


@pytest.mark.parametrize("is_tls", [False, True], ids=["plain", "tls"])
@pytest.mark.parametrize("seed", range(5))
def test_random_coming_and_going_loses_no_place(seed, is_tls, tls):
    rng = random.Random(seed)
    with World(max_connections=6, max_per_address=4, tls=tls if is_tls else None) as world:
        socks = []
        for _ in range(150):
            choice = rng.random()
            with contextlib.suppress(OSError):
                if choice < 0.5 or not socks:
                    socks.append(world.connect(rng.choice(["127.0.0.1", "127.0.0.2", "127.0.0.3"])))
                elif choice < 0.7:
                    socks.pop(rng.randrange(len(socks))).close()
                else:
                    rng.choice(socks).sendall(rng.choice([GET, GET[:9], b"\0\r\n\r\n"]))
            assert world.listener.num_connections <= 6
        for sock in socks:
            sock.close()
        wait_for(lambda: world.listener.num_connections == 0, "all places to be free")
        assert not world.listener._addresses
        assert not world.listener._handshakes
        assert not world.listener._spoken


def test_a_server_with_few_descriptors_serves_more_clients_than_those():
    """64 of them: 80 silent connections, then polite ones."""
    few = ("sh", "-c", 'ulimit -n 64; exec "$@"', "sh")
    with Server("--kv", "int4", "--num-blocks", "64", before=few) as server, contextlib.ExitStack() as stack:
        for _ in range(80):
            stack.enter_context(socket.create_connection(("127.0.0.1", server.port), HANG_S))
        for path in ("/health/live", "/health/ready"):
            assert server.status(path) == 200
        assert "accept" not in server.log
