"""A door of the fuzzer: bytes on a connection that are nearly HTTP, in pieces, with any end."""

import contextlib
import json
import random
import re
import socket
import ssl
import struct
from time import sleep

from kvq.bench.serve.client import Endpoint

_PATIENCE_S = 1.0  # for an answer to what may be no whole request, before we say that no more comes
_ANSWER_S = 45.0  # on a busy machine; bodies have 30 s to come
_STATUS = re.compile(rb"HTTP/1\.1 (\d{3}) ")
_MOST_READ = 1 << 20
_TOKENS = [
    b"\r\n", b"\n", b"\r", b"\0", b" ", b":", b";", b"\xff", b"\x80abc", b"\r\n\r\n", b"0\r\n\r\n",
    b"a" * 5000, b"a:\r\n" * 100, b"a:\r\n" * 5000,
    b"Transfer-Encoding: chunked\r\n", b"Transfer-Encoding: gzip, chunked\r\n", b"Content-Length: 0\r\n",
    b"Content-Length: 5\r\n", b"Content-Length: -1\r\n", b"Content-Length: 99999999999999999999\r\n",
    b"Content-Length: 8388609\r\n", b"Expect: 100-continue\r\n", b"Connection: upgrade\r\nUpgrade: h2c\r\n",
    b"Connection: keep-alive\r\n", b"Host: evil.example\r\n", b"Host: \r\n", b"Origin: null\r\n",
    b"Authorization: Bearer \xff\r\n", b"Authorization: Basic \r\n", b"X: " + b"a" * 70_000 + b"\r\n",
    b"X: a\r\n b\r\n", b"ffffffffffffffff\r\n", b"-1\r\n", b"0x1\r\n", b"1;" + b"a" * 300 + b"\r\nb\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"HTTP/0.9", b"HTTP/1.0", b"\x16\x03\x01\x00\x05hello", b"GET",
    b"X-Forwarded-For: 1.2.3.4\r\n", b"Content-Type: text/plain\r\n", b"Content-Encoding: br\r\n",
]  # fmt: skip


def case(odds: random.Random, target: Endpoint, *, may_refuse: bool = False) -> str | None:
    """Send something and read what comes. `may_refuse`: 503 is no finding, since the server may be ending."""
    raw = _raw(odds, target)
    ending = odds.choice(("wait", "wait", "half", "half", "reset", "gone"))
    got = b""
    with contextlib.suppress(OSError), _connected(target) as sock:
        for piece in _pieces(odds, raw):
            sock.sendall(piece)
            if odds.random() < 0.1:
                sleep(odds.random() * 0.01)
        if ending == "gone":
            return None
        if ending == "reset":
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            return None
        if ending == "wait":
            got = _read(sock, _PATIENCE_S)[0]
        if target.tls is None:
            sock.shutdown(socket.SHUT_WR)
        more, is_ended = _read(sock, _ANSWER_S)
        got += more
        if not is_ended:
            return f"no end within {_ANSWER_S:g} s: {raw[:400]!r}: {got[-200:]!r}"
    bad = [int(status) for status in _STATUS.findall(got) if status >= b"500"]
    if any(status != 503 or not may_refuse for status in bad):
        return f"statuses {bad} for {raw[:400]!r}: {got[-400:]!r}"
    if b"Traceback" in got:
        return f"a traceback in the answer to {raw[:400]!r}"
    return None


def _read(sock: socket.socket, timeout_s: float) -> tuple[bytes, bool]:
    """Read a response; returns it, and True if it was complete."""
    sock.settimeout(timeout_s)
    got = b""
    try:
        while len(got) < _MOST_READ and (part := sock.recv(1 << 16)):
            got += part
    except TimeoutError:
        return got, False
    return got, True


def _connected(target: Endpoint) -> socket.socket:
    sock = socket.create_connection((target.host, target.port), timeout=_ANSWER_S)
    if target.tls is None:
        return sock
    try:
        wrapped: ssl.SSLSocket = target.tls.wrap_socket(sock, server_hostname=target.host)
    except BaseException:
        sock.close()
        raise
    return wrapped


def _raw(odds: random.Random, target: Endpoint) -> bytes:
    """One to three requests, broken in some places; the last one ends the connection."""
    count = odds.choice((1, 1, 1, 2, 3))
    raw = b"".join(_request(odds, target, is_last=i == count - 1) for i in range(count))
    for _ in range(odds.choice((0, 1, 1, 2, 3, 6))):
        at = odds.randrange(len(raw) + 1)
        end = min(len(raw), at + odds.choice((1, 2, 8, 40)))
        put = odds.choice((b"", raw[at:end] * 2, odds.randbytes(end - at), *odds.sample(_TOKENS, 4)))
        raw = raw[:at] + put + raw[odds.choice((at, end)) :]
    return raw or b"\r\n"


def _request(odds: random.Random, target: Endpoint, *, is_last: bool) -> bytes:
    method, path, body = odds.choice(_requests(target.model))
    lines = [f"{method} {path} HTTP/1.1", f"Host: {target.host}:{target.port}"]
    lines.append(f"Authorization: Bearer {target.key}")
    if is_last:
        lines.append("Connection: close")
    if body is None:
        return "\r\n".join([*lines, "", ""]).encode()
    encoded = json.dumps(body).encode()
    lines.append("Content-Type: application/json")
    if odds.random() < 0.5:
        return "\r\n".join([*lines, f"Content-Length: {len(encoded)}", "", ""]).encode() + encoded
    chunks = b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in _pieces(odds, encoded))
    return "\r\n".join([*lines, "Transfer-Encoding: chunked", "", ""]).encode() + chunks + b"0\r\n\r\n"


def _requests(model: str) -> list[tuple[str, str, dict[str, object] | None]]:
    text = {"model": model, "prompt": "The sea", "max_tokens": 3}
    said = {"model": model, "input": "Hi", "max_output_tokens": 3, "stream": True}
    talk = {"model": model, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}
    return [
        ("GET", "/health", None),
        ("HEAD", "/health/ready", None),
        ("GET", "/v1/models", None),
        ("GET", "/metrics", None),
        ("GET", "/", None),
        ("OPTIONS", "/v1/completions", None),
        ("POST", "/v1/completions", text),
        ("POST", "/v1/completions", text | {"stream": True}),
        ("POST", "/v1/chat/completions", talk),
        ("POST", "/v1/chat/completions", talk | {"stream": True}),
        ("POST", "/v1/messages", talk),
        ("POST", "/v1/responses", said),
        ("POST", "/tokenize", {"prompt": "a b c"}),
    ]


def _pieces(odds: random.Random, raw: bytes) -> list[bytes]:
    """Cut somewhere, or into single bytes."""
    if odds.random() < 0.05 and len(raw) < 2000:
        return [raw[i : i + 1] for i in range(len(raw))]
    cuts = sorted(odds.randrange(len(raw)) for _ in range(odds.choice((0, 0, 1, 3, 8)))) if raw else []
    found = [raw[a:b] for a, b in zip([0, *cuts], [*cuts, len(raw)], strict=True)]
    return [piece for piece in found if piece]
