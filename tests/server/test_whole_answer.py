"""Whole answers and those who don't read them."""

import asyncio

from kvq.server.openai import respond
from kvq.server.openai.respond import _WholeAnswer
from tests.waiting import HANG_S


class Transport:
    aborted = False

    def abort(self):
        self.aborted = True


def deliver(content, send, patience_s=HANG_S):
    """Whether it was cut off, and what was told."""
    told, transport = [], Transport()
    answer = _WholeAnswer(content, on_cut=lambda: told.append("cut"), on_end=lambda: told.append("end"))
    scope = {"type": "http", "state": {"kvq_transport": transport}}
    old, respond._PIECE_S = respond._PIECE_S, patience_s
    try:
        asyncio.run(answer(scope, None, send))
    finally:
        respond._PIECE_S = old
    return transport.aborted, told


def test_everything_is_sent_in_pieces():
    sent = []

    async def send(message):
        sent.append(message)

    content = bytes(range(256)) * 1000
    assert deliver(content, send) == (False, ["end"])
    start, *pieces = sent
    assert dict(start["headers"])[b"content-length"] == b"256000"
    assert b"".join(piece["body"] for piece in pieces) == content
    assert [piece["more_body"] for piece in pieces] == [True, True, True, False]


def test_a_reader_who_stops_is_cut_off():
    sent = []

    async def send(message):
        sent.append(message)
        if len(sent) > 3:
            await asyncio.Event().wait()

    assert deliver(b"a" * 1_000_000, send, patience_s=0.05) == (True, ["cut", "end"])
    assert len(sent) == 4
