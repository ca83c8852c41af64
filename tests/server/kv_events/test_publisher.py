"""Block events over real sockets of this machine."""

import json
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

pytest.importorskip("zmq")

import zmq

from kvq.bench.serve.process import free_port
from kvq.errors import ConfigError
from kvq.server import check
from kvq.server.admission.config import ServerConfig
from kvq.server.kv_events.config import EventsConfig
from kvq.server.kv_events.publisher import Publisher
from tests.server.kit import Server
from tests.server.kv_events.router import Router
from tests.waiting import HANG_S, wait_for

MS = int(HANG_S * 1000)


def address() -> str:
    return f"tcp://127.0.0.1:{free_port()}"


@contextmanager
def socket(kind: int, where: str, topic: str = "") -> Iterator[object]:
    context = zmq.Context()
    made = context.socket(kind)
    made.setsockopt(zmq.RCVTIMEO, MS)
    if kind == zmq.SUB:
        made.setsockopt(zmq.SUBSCRIBE, topic.encode())
    made.connect(where)
    try:
        yield made
    finally:
        context.destroy(linger=0)


def block(name: int) -> tuple[int, None, bytes]:
    return name, None, (7).to_bytes(4, "little")


@pytest.fixture
def config(tmp_path):
    return EventsConfig(address=address(), topic="kv@here@tiny", replay=f"ipc://{tmp_path}/replay")


def test_batches_come_in_order_and_missed_ones_again(config):
    joined = []
    publisher = Publisher(config, block_size=1, on_join=lambda: joined.append(1))
    try:
        publisher.put([block(0)])
        wait_for(lambda: publisher._kept, "the batch is sent, to nobody")
        with socket(zmq.SUB, config.address, "kv@here") as events:
            wait_for(lambda: joined, "the publisher sees a subscriber")
            publisher.put([block(1)])
            publisher.put([block(2), None])
            got = [events.recv_multipart() for _ in range(2)]
        assert [topic for topic, _, _ in got] == [b"kv@here@tiny"] * 2
        first, second = (int.from_bytes(number, "big") for _, number, _ in got)
        assert second == first + 1
        router = Router()
        router.take(got[0][2])
        assert router.held == {1: (None, (7,))}
        router.take(got[1][2])
        assert router.held == {}
        with socket(zmq.DEALER, config.replay) as replay:
            replay.send_multipart((b"", b"nonsense", b"and more"))
            replay.send_multipart((b"", got[0][1]))
            again = [replay.recv_multipart() for _ in range(3)]
        assert again == [[b"", *frames] for frames in got] + [[b"", b"", b"\xff" * 8, b""]]
    finally:
        publisher.close()


def test_numbers_never_fall_from_one_engine_to_the_next_on_an_address(config):
    numbers = []
    for _ in range(2):
        publisher = Publisher(config, block_size=1)
        with socket(zmq.DEALER, config.replay) as replay:
            publisher.put([None])
            wait_for(lambda kept=publisher._kept: kept, "the batch is sent")
            replay.send_multipart((b"", bytes(8)))
            numbers.append(replay.recv_multipart()[2])
        publisher.close()
    assert numbers[0] < numbers[1]


def test_an_address_that_is_taken_is_refused_and_free_again_after_closing(config):
    publisher = Publisher(config, block_size=1)
    with pytest.raises(ConfigError, match="can't listen on"):
        Publisher(config, block_size=1)
    publisher.close()
    Publisher(config, block_size=1).close()


def test_a_check_looks_whether_the_addresses_are_free(config):
    asked = ServerConfig(kv_events=config)
    [fine] = check._events(asked)
    assert (fine.is_error, fine.text) == (False, f"block events: {config.address} is free")
    publisher = Publisher(config, block_size=1)
    [taken] = check._events(asked)
    publisher.close()
    assert taken.is_error
    assert "can't listen on" in taken.text
    open_to_all = replace(config, address=config.address.replace("127.0.0.1", "*"))
    *_, warning = check._events(ServerConfig(kv_events=open_to_all))
    assert (warning.level, "token ids" in warning.text) == ("warning", True)


def test_a_server_tells_who_subscribes_of_all_its_blocks():
    where = address()
    with Server("--kv", "int4", "--num-blocks", "40", "--kv-events", where) as server:
        _ask(server, "Once upon a time there was a city. " * 9)
        router = Router()
        with socket(zmq.SUB, where) as events:
            router.take(events.recv_multipart()[2])  # everything is cleared
            router.take(events.recv_multipart()[2])
            before = len(router.held)
            _ask(server, "Another city had walls and a river. " * 9)
            router.take(events.recv_multipart()[2])
        assert 0 < before < len(router.held)
        assert {len(tokens) for _, tokens in router.held.values()} == {32}
        with urllib.request.urlopen(server.url + "/metrics", timeout=HANG_S) as answer:
            assert "kvq_kv_events_total" in answer.read().decode()


def _ask(server, prompt):
    body = json.dumps({"prompt": prompt, "max_tokens": 3}).encode()
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(server.url + "/v1/completions", body, headers)
    with urllib.request.urlopen(request, timeout=HANG_S):
        pass
