"""Where block events may be listened for, and what is said of addresses that can't be."""

import pytest

from kvq import extras
from kvq.commands.use.serve import _events, _ServeOptions
from kvq.errors import ConfigError
from kvq.server.kv_events.config import EventsConfig, listening


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("5557", "tcp://127.0.0.1:5557"),
        ("tcp://*:5557", "tcp://*:5557"),
        ("tcp://[::1]:1", "tcp://[::1]:1"),
        ("ipc:///run/kvq/events", "ipc:///run/kvq/events"),
    ],
)
def test_a_port_alone_is_loopbacks(text, address):
    assert listening(text, "--kv-events") == address


@pytest.mark.parametrize(
    "text", ["", "0", "65536", "tcp://5557", "http://a:1", "ipc://", "tcp://a:b", "inproc://a"]
)
def test_other_addresses_are_refused(text):
    with pytest.raises(ConfigError, match="--kv-events must be a port, tcp://HOST:PORT or ipc://PATH"):
        listening(text, "--kv-events")


@pytest.mark.parametrize(
    ("address", "is_local"),
    [
        ("tcp://127.0.0.1:1", True),
        ("tcp://127.9.9.9:1", True),
        ("tcp://[::1]:1", True),
        ("tcp://localhost:1", True),
        ("ipc:///tmp/a", True),
        ("tcp://*:1", False),
        ("tcp://10.0.0.1:1", False),
        ("tcp://[::]:1", False),
        ("tcp://eth0:1", False),
    ],
)
def test_who_can_listen_in_is_known(address, is_local):
    assert EventsConfig(address=address).is_local is is_local
    assert EventsConfig(address="ipc:///tmp/b", replay=address).is_local is is_local


def test_options_that_need_each_other_say_so(monkeypatch):
    monkeypatch.setattr(extras, "is_installed", lambda module: True)
    assert _events(_ServeOptions()) is None
    with pytest.raises(ConfigError, match="need --kv-events"):
        _events(_ServeOptions(kv_events_replay="5558"))
    with pytest.raises(ConfigError, match="need an address each"):
        _events(_ServeOptions(kv_events="5557", kv_events_replay="tcp://127.0.0.1:5557"))
    made = _events(_ServeOptions(kv_events="5557", kv_events_topic="kv@a@b", kv_events_form="arrays"))
    assert made == EventsConfig(address="tcp://127.0.0.1:5557", topic="kv@a@b", form="arrays")


def test_without_pyzmq_there_is_a_remedy(monkeypatch):
    monkeypatch.setattr(extras, "is_installed", lambda module: module != "zmq")
    with pytest.raises(ConfigError, match=r"--kv-events needs pyzmq, .* pip install '\.\[events\]'"):
        _events(_ServeOptions(kv_events="5557"))
