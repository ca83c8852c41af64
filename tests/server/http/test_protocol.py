"""What connections have from their listening socket, and how slowly their requests may begin."""

import contextlib
import json
import select
import socket
import threading
from types import SimpleNamespace

import pytest
import uvicorn

from kvq.server.http import protocol
from kvq.server.http.loop_budget import Again
from kvq.server.http.protocol import Connection, _LimitedParser, prepare
from tests.waiting import HANG_S, wait_for

HEAD = b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n"


def test_answers_are_written_at_once():
    """An answer's body does not wait for the acknowledgement of its head."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        prepare(listener)
        with socket.create_connection(listener.getsockname()), listener.accept()[0] as connection:
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)


async def empty(_scope, _receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b""})


@pytest.fixture
def connect():
    """Connects to a server in this process that gives empty answers."""
    config = uvicorn.Config(empty, http=Connection, ws="none", lifespan="off", log_config=None)
    server = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        yield lambda: socket.create_connection(listener.getsockname(), timeout=HANG_S)
        server.should_exit = True
        thread.join()


def answer(sock):
    """Status and body, when the server has closed the connection."""
    head, _, body = b"".join(iter(lambda: sock.recv(1 << 16), b"")).partition(b"\r\n\r\n")
    return int(head.split()[1]), body


@pytest.mark.parametrize("sent", [b"", HEAD])
def test_a_head_that_never_ends_is_given_up(connect, monkeypatch, sent):
    monkeypatch.setattr(protocol, "HEAD_S", 0.1)
    with connect() as sock:
        sock.sendall(sent)
        status, body = answer(sock)
    assert status == 408
    assert "no request came within 0.1 s" in json.loads(body)["error"]["message"]


def test_a_head_that_drips_has_no_more_time(connect, monkeypatch):
    monkeypatch.setattr(protocol, "HEAD_S", 0.1)
    with connect() as sock:
        sock.sendall(HEAD)

        def drip():
            with contextlib.suppress(OSError):  # it was closed meanwhile
                sock.sendall(b"X-A: b\r\n")
            return select.select([sock], [], [], 0)[0]

        wait_for(drip, "an answer to a head that drips")
        assert sock.recv(1 << 16).startswith(b"HTTP/1.1 408")


def test_a_head_that_comes_in_time_is_answered(connect, monkeypatch):
    monkeypatch.setattr(protocol, "HEAD_S", HANG_S)
    with connect() as sock:
        for byte in HEAD + b"\r\n":
            sock.sendall(bytes([byte]))
        assert answer(sock)[0] == 200


@pytest.mark.parametrize("method", ["HEAD", "GET"])
def test_a_broken_body_of_any_method_is_refused(connect, caplog, method):
    """The answer to HEAD has no body, whatever its head says."""
    head = f"{method} / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
    with connect() as sock:
        sock.sendall(head + b"zz\r\n")
        status, body = answer(sock)
    assert status == 400
    assert bool(body) == (method == "GET")
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_who_is_gone_before_its_turn_is_not_read_on():
    """A closed TLS transport has nothing to pause or resume any more."""
    connection = object.__new__(Connection)
    connection.transport = SimpleNamespace(is_closing=lambda: True)
    connection.conn, connection.flow = _LimitedParser(), None
    connection._slot = connection._head_timer = None
    connection._is_in_line, connection._is_resting = True, True
    assert connection._parse_on() is Again.NO
    connection._rest_no_more()
