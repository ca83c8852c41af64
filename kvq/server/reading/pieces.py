"""Long texts of a job, sent ahead of it in pieces: encoding megabytes at once holds up the event loop."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from kvq.server.reading.jobs import Chat, Job, Piece, Text

PIECE = 1 << 17  # characters


def in_pieces(job: Job) -> tuple[list[Piece], Job]:
    """What is sent before a job, and what is left of it: a number of pieces where a long text was."""
    pieces: list[Piece] = []
    if isinstance(job, Text) and len(job.text) > PIECE:
        pieces += _cut(job.text)
        return pieces, msgspec.structs.replace(job, text="")
    if isinstance(job, Chat):
        turns = [_short(turn, pieces) for turn in job.turns]
        return pieces, msgspec.structs.replace(job, turns=turns) if pieces else job
    return pieces, job


def put_together(job: Job, pieces: Sequence[str]) -> Job:
    """The whole job again, from what came before it."""
    if not pieces:
        return job
    if isinstance(job, Text):
        return msgspec.structs.replace(job, text="".join(pieces))
    assert isinstance(job, Chat), "no other has long texts"
    left = iter(pieces)
    return msgspec.structs.replace(job, turns=[_long(turn, left) for turn in job.turns])


def _cut(text: str) -> list[Piece]:
    return [Piece(text=text[at : at + PIECE]) for at in range(0, len(text), PIECE)]


def _short(turn: Mapping[str, Any], pieces: list[Piece]) -> dict[str, Any]:
    content = turn.get("content")
    if isinstance(content, list):
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str) or len(content) <= PIECE:
        return dict(turn)
    cut = _cut(content)
    pieces += cut
    return {**turn, "content": len(cut)}


def _long(turn: Mapping[str, Any], pieces: Iterator[str]) -> dict[str, Any]:
    count = turn.get("content")
    if not isinstance(count, int):
        return dict(turn)
    return {**turn, "content": "".join(next(pieces) for _ in range(count))}
