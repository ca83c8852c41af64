"""Link: a socket to another engine, the typed messages that it carries, and the handshake that begins it.

After hello, the sender announces tokens and sends their blocks; digests bind their bytes to their place. For
a request, the receiver then returns the tokens that follow. A connection has one transfer; ending it early
cancels the transfer.
"""

import hashlib
import hmac
import os
import socket
from collections.abc import Mapping
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path
from typing import Any, NoReturn, Self, TypeVar

import msgspec
import xxhash

from kvq.blockmgr.prefix import TOKEN_BYTES
from kvq.engine.requests.outputs import TokenLogprobs
from kvq.engine.requests.request_options import RequestOptions
from kvq.errors import ConfigError, EngineError

VERSION = 1
Block = tuple[int, int, bytes, bytearray]  # layer group, index in the sequence, digest, content


class _Message(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    pass


class _Hello(_Message, frozen=True):
    """First message of both sides. `facts`: what must be the same on both sides, by name."""

    version: int
    nonce: bytes
    has_key: bool
    facts: dict[str, str] = {}


class _Proof(_Message, frozen=True):
    """Message: a proof that the sender knows the key."""

    mac: bytes


class _Refused(_Message, frozen=True):
    """Message: why the transfer has failed."""

    reason: str


class Begin(_Message, frozen=True):
    """Message: the tokens whose blocks follow: a prefix, or a request's prompt and its generated tokens."""

    tokens: bytes  # ids, packed
    length: int  # leading tokens whose K and V are complete
    options: RequestOptions  # of a prefix, only tenant and salts count
    prompt_length: int = 0  # of a request; 0: a prefix
    seed: int = 0


class Answer(_Message, frozen=True):
    """Message: how many tokens' blocks the receiver wants, and then, how many tokens it has taken over."""

    tokens: int


class Blocks(_Message, frozen=True):
    """Message: blocks. The receiver reads the next message once they are stored."""

    blocks: list[Block]
    are_last: bool


class Tokens(_Message, frozen=True):
    """Message: the next tokens of a request. It ends with the last message, perhaps by an error."""

    tokens: list[int]
    logprobs: list[TokenLogprobs] | None
    are_last: bool = False
    kv_digest: str = ""
    error: str | None = None


AnyMessage = _Hello | _Proof | _Refused | Begin | Answer | Blocks | Tokens
encoder = msgspec.msgpack.Encoder()
decoder: "msgspec.msgpack.Decoder[AnyMessage]" = msgspec.msgpack.Decoder(AnyMessage)


def block_names(tokens: bytes, block_size: int) -> list[bytes]:
    """Return a digest for each block of these tokens and all before it. The last block may be partial."""
    step, last, found = block_size * TOKEN_BYTES, b"kvq hand-over", []
    for at in range(0, len(tokens), step):
        last = hashlib.sha256(last + tokens[at : at + step]).digest()
        found.append(last)
    return found


def block_digest(context: bytes, name: bytes, place: tuple[int, int], content: Any) -> bytes:
    """Return the digest of a block's bytes, any buffer: xxh3-128.

    `context`: of layout and recipe. `name`: from `block_names`. `place`: layer group and index.
    """
    hasher = xxhash.xxh3_128(context + name + b"".join(number.to_bytes(8, "little") for number in place))
    hasher.update(content)
    return hasher.digest()


M = TypeVar("M")
Address = str | tuple[str, int]  # path of a Unix socket, or host and port
_MOST_EARLY = 1 << 16  # bytes of a message, before both sides have said hello
_MOST = 64 << 20  # afterwards
_CONNECT_S = 10.0
_SILENT_S = 120.0  # until a silent peer counts as gone; a step may take as long
_KEEPALIVE_S = 10
_HEAD = 4  # bytes of a message's length


def parse_address(text: str, key: bytes | None) -> Address:
    """Return the address that `HOST:PORT`, `unix:PATH` or a port of loopback stands for.

    Raises:
        ConfigError: the text is none of these, or other machines can reach it and there is no key.
    """
    if text.startswith("unix:") and len(text) > len("unix:"):
        return text.removeprefix("unix:")
    host, _, port = (text if ":" in text else f"127.0.0.1:{text}").rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"hand-overs need a port, HOST:PORT or unix:PATH, got {text!r}; use 7100")
    is_local = host == "localhost"
    with suppress(ValueError):
        is_local = ip_address(host).is_loopback
    if key is None and not is_local:
        raise ConfigError(
            f"{text} can be reached from other machines: give both engines the same hand_over_key_file "
            f"(--hand-over-key-file), or use a port of loopback"
        )
    return host, int(port)


def listen(address: Address) -> socket.socket:
    """Return a listening socket; a Unix socket is its owner's only. Raise ConfigError if it can't be."""
    sock = _socket(address)
    try:
        if not isinstance(address, str):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        elif Path(address).is_socket():  # left by an engine that was killed
            os.unlink(address)
        sock.bind(address)
        if isinstance(address, str):
            os.chmod(address, 0o600)
        sock.listen()
    except OSError as error:
        sock.close()
        raise ConfigError(f"can't listen for hand-overs at {address}: {error.strerror or error}") from error
    return sock


def _socket(address: Address) -> socket.socket:
    return socket.socket(socket.AF_UNIX if isinstance(address, str) else socket.AF_INET)


class Link:
    """Connection with one transfer. As a context manager, it closes itself."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock, self._most, self._buffer = sock, _MOST_EARLY, bytearray()
        sock.settimeout(_SILENT_S)
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            if hasattr(socket, "TCP_KEEPIDLE"):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEPALIVE_S)

    @classmethod
    def connect(cls, address: Address) -> Self:
        """Connect to an engine that listens. Raise OSError if there is none."""
        sock = _socket(address)
        try:
            sock.settimeout(_CONNECT_S)
            sock.connect(address)
        except BaseException:
            sock.close()
            raise
        return cls(sock)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.abort()
        self._sock.close()

    def abort(self) -> None:
        """End the connection, from any thread; a thread that reads gets an error."""
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def wait_forever(self) -> None:
        """Let the peer be silent from now on."""
        self._sock.settimeout(None)

    def shake_hands(self, facts: Mapping[str, str], key: bytes | None, *, is_caller: bool) -> None:
        """Compare versions and facts with the peer, and prove to each other that both know the key.

        Raises:
            EngineError: something differs; the message names it.
        """
        own, (role, other) = os.urandom(32), (b"caller", b"listener")[:: 1 if is_caller else -1]
        self.send(_Hello(VERSION, own, key is not None, dict(facts)))
        hello = self.expect(_Hello)
        if hello.version != VERSION:
            self.refuse(f"version {hello.version} there, {VERSION} here")
        if hello.has_key != (key is not None):
            self.refuse("only one of the engines has a key")
        for name in sorted(facts.keys() | hello.facts.keys()):
            there, here = hello.facts.get(name), facts.get(name)
            if there != here:
                self.refuse(f"another {name}: {there!r:.100} there, {here!r:.100} here")
        if key is not None:
            self.send(_Proof(hmac.digest(key, role + own + hello.nonce, "sha256")))
            known = hmac.digest(key, other + hello.nonce + own, "sha256")
            if not hmac.compare_digest(self.expect(_Proof).mac, known):
                self.refuse("another key")
        self._most = _MOST

    def send(self, message: AnyMessage) -> None:
        """Send a message."""
        encoder.encode_into(message, self._buffer, _HEAD)
        self._buffer[:_HEAD] = (len(self._buffer) - _HEAD).to_bytes(_HEAD, "little")
        self._sock.sendall(self._buffer)

    def expect(self, *kinds: type[M]) -> M:
        """Return the next message, which must be of one of these types.

        Raises:
            EngineError: it is not, or is too long, or the peer has refused or ended the transfer.
        """
        length = int.from_bytes(self._receive(_HEAD), "little")
        if length > self._most:
            raise EngineError(f"a message of {length} bytes; {self._most} are allowed")
        try:
            message = decoder.decode(self._receive(length))
        except msgspec.DecodeError as error:
            raise EngineError(f"not a message of version {VERSION}: {error}") from error
        if isinstance(message, kinds):
            return message
        reason = message.reason if isinstance(message, _Refused) else f"{type(message).__name__} out of turn"
        raise EngineError(f"the other engine refused the hand-over: {reason:.500}")

    def refuse(self, reason: str) -> NoReturn:
        """Tell the peer why the transfer fails, and raise EngineError."""
        with suppress(OSError):
            self.send(_Refused(reason))
        raise EngineError(f"hand-over refused: {reason}")

    def _receive(self, count: int) -> bytearray:
        content = bytearray(count)
        left = memoryview(content)
        while left:
            got = self._sock.recv_into(left)
            if not got:
                raise EngineError("the other engine ended the connection")
            left = left[got:]
        return content
