"""A door of the fuzzer: TLS that is nearly right, or ends where nobody expects it."""

import contextlib
import random
import socket
import ssl
from dataclasses import replace

from benchmarks.fuzz import wire
from kvq.bench.serve.client import Endpoint

_SHORT_S = 0.3  # for an answer to what may have none


def case(odds: random.Random, target: Endpoint) -> str | None:
    """One connection. The server may be ending."""
    assert target.tls is not None, "a server with TLS"
    kind = odds.choice(("noise", "hello", "hello", "records", "plain", "whole", "whole"))
    if kind == "whole":
        return wire.case(odds, target, may_refuse=True)
    if kind == "plain":  # HTTP where a handshake belongs
        return wire.case(odds, replace(target, tls=None), may_refuse=True)
    with contextlib.suppress(OSError), socket.create_connection((target.host, target.port), 10) as sock:
        sock.settimeout(_SHORT_S)
        if kind == "noise":
            sock.sendall(odds.randbytes(odds.choice((1, 5, 100, 20_000))))
        elif kind == "hello":
            sock.sendall(_broken(odds, _hello(target.tls)))
        else:
            with contextlib.suppress(ValueError):
                _after_handshake(odds, sock, target.tls)
        sock.recv(1 << 16)
    return None


def _hello(context: ssl.SSLContext) -> bytes:
    """The first message of a client."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = context.wrap_bio(incoming, outgoing, server_hostname="127.0.0.1")
    with contextlib.suppress(ssl.SSLWantReadError):
        client.do_handshake()
    return outgoing.read()


def _broken(odds: random.Random, raw: bytes) -> bytes:
    changed = bytearray(raw)
    for _ in range(odds.choice((0, 1, 2, 10))):
        changed[odds.randrange(len(changed))] = odds.randrange(256)
    return bytes(changed[: odds.randrange(1, len(changed) + 1)] if odds.random() < 0.5 else changed)


def _after_handshake(odds: random.Random, sock: socket.socket, context: ssl.SSLContext) -> None:
    """A handshake, then records that are none, or broken ones."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = context.wrap_bio(incoming, outgoing, server_hostname="127.0.0.1")
    sock.settimeout(10)
    while True:
        try:
            client.do_handshake()
            break
        except ssl.SSLWantReadError:
            sock.sendall(outgoing.read())
            if not (part := sock.recv(1 << 16)):
                return
            incoming.write(part)
    client.write(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
    raw = outgoing.read()
    sock.sendall(raw if odds.random() < 0.3 else _broken(odds, raw))
    sock.sendall(
        odds.choice((b"", odds.randbytes(50), b"\x15\x03\x03\x00\x02\x02\x28", b"\x17\x03\x03\xff\xff"))
    )
    sock.settimeout(_SHORT_S)
