"""What is cut, foreign, exchanged or damaged: refused by both sides, and nothing is left of it."""

import socket
import struct
import threading
import time
from contextlib import suppress
from dataclasses import replace

import pytest

from kvq.engine import SamplingParams
from kvq.engine.handover import link as wire
from kvq.engine.handover.link import Link, parse_address
from kvq.errors import ConfigError, EngineError
from tests.engine.kit import engine, pair, submit, tokens_of
from tests.handover.kit import Pair, num_files, num_threads
from tests.helpers_models import random_tokens

PARAMS = SamplingParams(max_tokens=24, ignore_eos=True)
PROMPT = random_tokens(90, seed=1)


def expected(model):
    with engine(model) as alone:
        return tokens_of(alone.generate([PROMPT], PARAMS))


def refused(caplog):
    return " ".join(record.getMessage() for record in caplog.records)


@pytest.mark.parametrize("kv", ["bf16", "int4+sinks=4+recent=5"])
def test_a_connection_cut_at_every_message_leaves_nothing_on_either_side(kv, monkeypatch):
    """Before and within every message of either side, for a request and for a prefix."""
    model = pair("llama")[0].with_kv(kv)
    monkeypatch.setattr("kvq.engine.handover.moving.PIECE", 1)  # a block in each message
    send, whole = Link.send, expected(model)
    both = Pair(model)
    files = num_files()
    sent, cut_at, within = 0, -1, False

    def send_or_cut(link, message):
        nonlocal sent
        sent += 1
        if sent != cut_at:
            send(link, message)
            return
        if within:
            payload = wire.encoder.encode(message)
            link._sock.sendall((len(payload).to_bytes(4, "little") + payload)[: 4 + len(payload) // 2])
        link.abort()

    monkeypatch.setattr(Link, "send", send_or_cut)
    most = 0
    for at in range(20):
        for within in (False, True):  # noqa: B007 - read above
            both.a.hand_over.moves_all, sent, cut_at = False, 0, -1
            _, found = submit(both.a, PROMPT, PARAMS)
            both.steps(4)
            cut_at = at
            both.drain()
            assert tokens_of([found.output]) == whole, f"cut at message {at}"
            both.check()
            most = max(most, sent)
            both.until(lambda: num_files() <= files)
            both.a.hand_over.moves_all, sent = False, 0
            prefix = both.a.hand_over.send_prefix(PROMPT)
            both.until(prefix.done)
            if 0 < at <= sent:
                assert isinstance(prefix.exception(), EngineError), f"cut at message {at}"
            both.b.core.scheduler.manager.drop_cached()
            both.check()
            both.until(lambda: num_files() <= files)
    assert most >= 12, "hello, blocks and answers were all cut"
    both.close()


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("model", lambda: pair("llama", seed=1)[0]),
        ("layout", lambda: pair("llama")[0].with_kv("int8")),
        ("layout", lambda: pair("qwen3")[0]),
    ],
)
def test_foreign_models_recipes_and_layouts_are_refused_by_name_on_both_sides(name, make, caplog):
    receiver = engine(make(), hand_over_listen="0")
    sender = engine(pair("llama")[0], hand_over_to=receiver.hand_over.address)
    _, found = submit(sender, PROMPT, replace(PARAMS, max_tokens=150))
    sender.step()
    sender.hand_over.move_requests()
    while sender.core.has_work:
        sender.step()
        receiver.step()
        time.sleep(0.005)  # the connection has to be refused before the request ends
    assert found.output.error is None
    receiver.close()
    sender.close()
    told = [record.getMessage() for record in caplog.records if "hand-over refused" in record.getMessage()]
    assert len(told) == 2, "both sides say why"
    assert all(f"another {name}" in one for one in told)


def test_another_order_of_heads_in_the_layout_is_refused(monkeypatch, caplog):
    """A layout that differs in nothing but the place of a region."""
    model = pair("llama")[0]
    receiver = engine(model, hand_over_listen="0")
    receiver.hand_over._facts["layout"] = "0" * 64
    sender = engine(model, hand_over_to=receiver.hand_over.address)
    sent = send_a_prefix(sender, receiver)
    with pytest.raises(EngineError, match="another layout"):
        sent.result()
    receiver.close()
    assert "another layout" in refused(caplog)


def test_another_version_is_refused(monkeypatch, caplog):
    model = pair("llama")[0]
    receiver = engine(model, hand_over_listen="0")
    with Link.connect(parse_address(receiver.hand_over.address, None)) as link:
        link.send(wire._Hello(wire.VERSION + 1, b"", False, {}))
        link.expect(wire._Hello)
        with pytest.raises(EngineError, match=f"version {wire.VERSION + 1} there, {wire.VERSION} here"):
            link.expect()


def send_a_prefix(sender, receiver):
    sender.generate([PROMPT], PARAMS)
    sent = sender.hand_over.send_prefix(PROMPT)
    while not sent.done():
        sender.step()
        receiver.step()
    return sent


def exchange_blocks(blocks):
    (g, i, d, a), (h, j, e, b), *rest = blocks
    return [(g, i, e, b), (h, j, d, a), *rest]


def rename_blocks(blocks):
    (g, i, d, a), (h, j, e, b), *rest = blocks
    return [(h, j, d, a), (g, i, e, b), *rest]


def other_group(blocks):
    (g, i, d, a), *rest = blocks
    return [(g + 1, i, d, a), *rest]


def twice(blocks):
    return [blocks[0], blocks[0], *blocks[2:]]


def left_out(blocks):
    return blocks[1:]


def shorter(blocks):
    (g, i, d, a), *rest = blocks
    return [(g, i, d, bytes(a)[:-1]), *rest]


def changed(layout, edit):
    def change(blocks):
        (g, i, d, a), *rest = blocks
        raw = bytearray(a)
        edit(raw, layout.groups[g].layers[0])
        assert raw != a, "the edit changes something"
        return [(g, i, d, raw), *rest]

    return change


def swap_regions(raw, first, second):
    a, b = ((r.offset, r.offset + r.nbytes) for r in (first, second))
    raw[slice(*a)], raw[slice(*b)] = raw[slice(*b)], raw[slice(*a)]


def swap_scales(raw, layer):
    swap_regions(raw, layer.k_scales, layer.v_scales)


def shuffle_heads(raw, layer):
    for region in (layer.k_codes, layer.v_codes, layer.k_scales, layer.v_scales):
        size = region.nbytes // layer.geometry.kv_heads
        own = raw[region.offset : region.offset + region.nbytes]
        raw[region.offset : region.offset + region.nbytes] = own[size:] + own[:size]


def flip_a_bit(raw, _layer):
    raw[7] ^= 1


@pytest.mark.parametrize(
    ("edit", "reason"),
    [
        (swap_scales, "block 0 of layer group 0 is damaged"),
        (shuffle_heads, "block 0 of layer group 0 is damaged"),
        (flip_a_bit, "block 0 of layer group 0 is damaged"),
        (exchange_blocks, "block 0 of layer group 0 is damaged, or belongs elsewhere"),
        (rename_blocks, "layer group 0 is damaged, or belongs elsewhere"),
        (other_group, "is not wanted"),
        (twice, "comes twice"),
        (left_out, "1 blocks are missing"),
        (shorter, "bytes"),
    ],
)
def test_what_is_changed_on_the_way_is_refused_and_nothing_is_indexed(edit, reason, monkeypatch):
    model = pair("llama")[0].with_kv("int4")
    if edit in (swap_scales, shuffle_heads, flip_a_bit):
        edit = changed(model.layout, edit)
    both = Pair(model)
    send = Link.send

    edited = []  # links whose first message, with the blocks of group 0, was changed

    def tamper(link, message):
        if isinstance(message, wire.Blocks) and link not in edited:
            edited.append(link)
            message = wire.Blocks(edit(message.blocks), message.are_last)
        send(link, message)

    monkeypatch.setattr(Link, "send", tamper)
    both.a.generate([PROMPT], PARAMS)
    sent = both.a.hand_over.send_prefix(PROMPT)
    both.until(sent.done)
    with pytest.raises(EngineError, match=reason):
        sent.result()
    assert both.b.core.scheduler.manager.prefixes.held(both.b.core.scheduler.manager.prompt(PROMPT))[0] == 0
    _, found = submit(both.a, PROMPT, PARAMS)
    both.steps(3)
    both.drain()
    assert tokens_of([found.output]) == expected(model)
    assert both.b.core.scheduler.counters.added == 0
    both.check()
    both.close()


def test_blocks_of_other_tokens_are_refused(monkeypatch):
    """The digests are right for the blocks, but the tokens that are announced are others."""
    both = Pair(pair("llama")[0])
    send = Link.send

    def other_tokens(link, message):
        if isinstance(message, wire.Begin):
            tokens = bytearray(message.tokens)
            tokens[0] ^= 1
            message = wire.Begin(bytes(tokens), message.length, message.options)
        send(link, message)

    monkeypatch.setattr(Link, "send", other_tokens)
    sent = send_a_prefix(both.a, both.b)
    with pytest.raises(EngineError, match="belongs elsewhere"):
        sent.result()
    both.check()
    both.close()


@pytest.mark.parametrize(
    "change",
    [
        {"length": 10**6},
        {"length": -1},
        {"length": 89},
        {"tokens": b"123"},
        {"tokens": b""},
        {"tokens": struct.pack("<I", 1 << 31) * 90},
        {"prompt_length": 10**6},
        {"prompt_length": -5},
    ],
)
def test_announcements_that_can_not_be_are_refused(change, monkeypatch):
    both = Pair(pair("llama")[0])
    send = Link.send

    def announce(link, message):
        if isinstance(message, wire.Begin):
            fields = {name: getattr(message, name) for name in message.__struct_fields__}
            message = wire.Begin(**(fields | change))
        send(link, message)

    monkeypatch.setattr(Link, "send", announce)
    sent = send_a_prefix(both.a, both.b)
    assert isinstance(sent.exception(), EngineError)
    both.check()
    both.close()


def test_both_need_the_same_key(tmp_path, caplog):
    paths = []
    for name in ("one", "two"):
        paths.append(tmp_path / name)
        paths[-1].write_text(name * 16)
        paths[-1].chmod(0o600)
    model = pair("llama")[0]
    receiver = engine(model, hand_over_listen="0", hand_over_key_file=paths[0])
    for key, reason in ((paths[1], "another key"), (None, "only one of the engines has a key")):
        sender = engine(model, hand_over_to=receiver.hand_over.address, hand_over_key_file=key)
        with pytest.raises(EngineError, match=reason):
            send_a_prefix(sender, receiver).result()
    sender = engine(model, hand_over_to=receiver.hand_over.address, hand_over_key_file=paths[0])
    assert send_a_prefix(sender, receiver).result() == 80
    for address in ("0.0.0.0:7100", "example.org:7100", "192.0.2.1:1"):
        with pytest.raises(ConfigError, match="hand_over_key_file"):
            parse_address(address, None)
        assert parse_address(address, b"key")[1] > 0
    for address in ("", "unix:", "host:port", "127.0.0.1:99999", ":1"):
        with pytest.raises(ConfigError, match="unix:PATH"):
            parse_address(address, None)


def test_a_proof_can_not_be_sent_back():
    """An impostor without the key that returns what it gets is refused."""
    ours, theirs = socket.socketpair()
    with Link(ours) as link, Link(theirs) as mirror:

        def reflect():
            mirror.send(mirror.expect(wire._Hello))
            mirror.send(mirror.expect(wire._Proof))

        thread = threading.Thread(target=reflect)
        thread.start()
        with pytest.raises(EngineError, match="another key"):
            link.shake_hands({}, b"key", is_caller=True)
        thread.join()


@pytest.mark.parametrize(
    "raw", [b"", b"\0", b"\xff" * 4, b"\0\0\1\0" + b"x" * 65536, b"\4\0\0\0abcd", b"GET / HTTP/1.1\r\n\r\n"]
)
def test_bytes_that_are_no_messages_end_the_connection(raw):
    both = Pair(pair("llama")[0])
    host, port = parse_address(both.b.hand_over.address, None)
    with socket.create_connection((host, port)) as sock:
        sock.settimeout(30)
        sock.sendall(raw)
        with suppress(OSError):  # the engine may have ended the connection already
            sock.shutdown(socket.SHUT_WR)
        try:
            while sock.recv(1 << 16):
                pass
        except ConnectionResetError:
            pass
    both.check()
    both.close()
    assert num_threads() == 0


def test_all_options_of_a_request_arrive():
    params = SamplingParams(
        max_tokens=5, temperature=0.5, logit_bias={3: 2.0}, stop=["x"], stop_token_ids=[7]
    )
    begin = wire.Begin(b"\0" * 4, 1, wire.RequestOptions(params=params, tenant="t", cache_salt="s"), 1, 2**53)
    found = wire.decoder.decode(wire.encoder.encode(begin))
    for name in (*SamplingParams.__slots__, "stop_strings"):
        one, other = getattr(found.options.params, name), getattr(params, name)
        assert one == other or list(one) == list(other), name
    assert (found.options.tenant, found.options.cache_salt, found.seed) == ("t", "s", 2**53)
