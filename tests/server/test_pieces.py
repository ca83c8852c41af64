"""Long texts on their way to a reader."""

import random

import pytest

from kvq.server.engine.frames import Decoder, encode
from kvq.server.reading import jobs
from kvq.server.reading.jobs import Job, ToReader, in_pieces, put_together


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(jobs, "PIECE", 10)


def sent(job):
    """As the other side has it in the end, and the longest frame."""
    before, last = in_pieces(job)
    frames = [encode(message) for message in (*before, last)]
    decoder = Decoder(ToReader)
    *texts, job = [decoder.decode(frame[4:]) for frame in frames]
    return put_together(job, texts), max(map(len, frames))


@pytest.mark.parametrize("length", [0, 1, 10, 11, 20, 63])
def test_a_text_arrives_whole(length):
    text = ("ab\u00e9d\n" * 20)[:length]
    job = Job(task="encode", given={"text": text, "special": True, "plain": False, "max_tokens": None})
    assert sent(job)[0] == job


@pytest.mark.parametrize("seed", range(20))
def test_a_conversation_arrives_whole(seed):
    rng = random.Random(seed)
    turns = []
    for _ in range(rng.randrange(6)):
        content = rng.choice([None, "", "x" * rng.randrange(40), [{"type": "text", "text": "y" * 7}] * 3])
        turns.append({"role": "user", "content": content} if rng.random() < 0.9 else {"role": "user"})
    arrived = sent(Job(task="encode_chat", given={"turns": turns, "options": {"a": [1]}}))[0].given
    assert arrived["options"] == {"a": [1]}
    assert [turn | {"content": said(turn)} for turn in arrived["turns"]] == [
        turn | {"content": said(turn)} for turn in turns
    ]


def said(turn):
    content = turn.get("content")
    return "".join(part["text"] for part in content) if isinstance(content, list) else content


def test_no_frame_is_long():
    turns = [{"role": "user", "content": "z" * 5000}, {"role": "tool", "content": "w" * 300}]
    arrived, longest = sent(Job(task="encode_chat", given={"turns": turns, "options": {}}))
    assert arrived.given["turns"] == turns
    assert longest < 300
