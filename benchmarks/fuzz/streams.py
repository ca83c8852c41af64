"""A door: `kvq chat --url` and `kvq bench serve --url` against a server that answers anything."""

import asyncio
import json
import random
import socket
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Thread

from benchmarks.fuzz.mutate import mutated, mutated_bytes
from kvq.bench.engine.load import LoadRequest
from kvq.bench.serve.client import Endpoint, send
from kvq.commands.chat.client import ServerPartner
from kvq.commands.chat.partner import ChatSampling
from kvq.errors import KVQError

_EVENTS = [
    {"id": "1", "choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None}]},
    {"id": "1", "choices": [{"index": 0, "delta": {"content": "sea"}, "text": "sea"}], "usage": None},
    {"id": "1", "choices": [], "usage": {
        "prompt_tokens": 9, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 0}}},
]  # fmt: skip
_ERROR = {"error": {"message": "no room in the context", "type": "invalid_request_error", "code": None}}
_STATUSES = ("200 OK", "200 OK", "200 OK", "400 Bad Request", "302 Found", "500 Oops", "999 \xff", "", "abc")


def case(odds: random.Random) -> str | None:
    """One answer to one request; a finding, if something else than an error of kvq's came of it."""
    answer = _answer(odds)
    ask = odds.choice((_chat, _models, _bench))
    with served(answer) as port:
        try:
            ask(port)
        except KVQError:
            return None
        except Exception:  # noqa: BLE001 - which is what is looked for
            return f"{ask.__name__} of {answer!r:.2000}\n{traceback.format_exc()}"
    return None


def _chat(port: int) -> None:
    sampling = ChatSampling(temperature=0.0, top_p=1.0, max_tokens=4, seed=None)
    partner = ServerPartner(f"http://127.0.0.1:{port}/v1", None, "m", sampling)
    said: list[str] = []
    done = partner.answer([{"role": "user", "content": "hi"}], said.append)
    "".join(said).encode()
    f"{done.prompt_tokens:,} {done.generated_tokens:,} {done.tokens_per_s:.1f}".encode()


def _models(port: int) -> None:
    sampling = ChatSampling(temperature=0.0, top_p=1.0, max_tokens=4, seed=None)
    ServerPartner(f"http://127.0.0.1:{port}", "key", None, sampling).name.encode()


def _bench(port: int) -> None:
    target = Endpoint(host="127.0.0.1", port=port, model="m")
    request = LoadRequest(index=0, prompt=[1], output_tokens=3)
    asyncio.run(send(target, request, 0.0))


def _answer(odds: random.Random) -> bytes:
    """A whole answer: what is wrong with it may be in its head, its frame or its events."""
    events = [_event(odds, event) for event in _EVENTS]
    if odds.random() < 0.2:
        events.insert(odds.randrange(4), _event(odds, _ERROR))
    lines = b"".join(b"data: " + event + b"\n\n" for event in events)
    if odds.random() < 0.8:
        lines += b"data: [DONE]\n\n"
    if odds.random() < 0.2:
        lines += b"data: " + _event(odds, _EVENTS[1]) + b"\n\n"
    if odds.random() < 0.3:
        models = {"object": "list", "data": [{"id": "m", "object": "model", "vocab_size": 9}]}
        lines = _event(odds, odds.choice((models, _ERROR)))
    if odds.random() < 0.15:
        lines = mutated_bytes(odds, lines)
    head = [f"HTTP/1.1 {odds.choice(_STATUSES)}", "Content-Type: text/event-stream", "Connection: close"]
    if odds.random() < 0.5:
        cut = odds.randrange(len(lines) + 1)
        parts = [part for part in (lines[:cut], lines[cut:]) if part]
        body = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"
        head.append("Transfer-Encoding: chunked")
    else:
        length = odds.choice((len(lines), len(lines), len(lines) + 5, -1, "x", 10**30))
        body, head = lines, [*head, f"Content-Length: {length}"]
    if odds.random() < 0.1:
        head += ["Location: http://127.0.0.1:9/", *(f"X-{n}: 1" for n in range(odds.choice((1, 300))))]
    whole = "\r\n".join([*head, "", ""]).encode("latin-1") + body
    if odds.random() < 0.1:
        whole = whole[: odds.randrange(len(whole) + 1)]
    return mutated_bytes(odds, whole) if odds.random() < 0.15 else whole


def _event(odds: random.Random, event: object) -> bytes:
    value = mutated(odds, event) if odds.random() < 0.3 else event
    return json.dumps(value).encode()


@contextmanager
def served(answer: bytes) -> Iterator[int]:
    """A port that gives that answer to whoever asks, once."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = Thread(target=_serve, args=(listener, answer), daemon=True)
        thread.start()
        yield listener.getsockname()[1]
        thread.join(10)


def _serve(listener: socket.socket, answer: bytes) -> None:
    connection, _ = listener.accept()
    with connection:
        try:
            connection.recv(1 << 16)
            connection.sendall(answer)
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(1 << 16):
                pass
        except OSError:
            pass
