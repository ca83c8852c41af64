"""Numbers go to the device through pinned segments that are overwritten only once they were copied."""

import numpy as np
import pytest
import torch

from kvq.kernels.uploads import _Ring, send, upload, upload_all

CPU = torch.device("cpu")
NUMBERS = [np.arange(5), np.array([[1, 2, 3]], np.int32), np.array([0.5]), np.array([True, False, True])]


class Copies:
    """Events whose copies end only when they are waited for, and pinned memory that isn't."""

    def __init__(self, monkeypatch):
        self.waited = 0
        self.is_late = False
        self.late_stream = None  # the only one on which they take so long; None: all are late
        self.stream = "first"
        copies = self

        class Event:
            is_done = True

            def record(self, stream):
                self.is_done = not (copies.is_late and copies.late_stream in (None, stream))

            def query(self):
                return self.is_done

            def synchronize(self):
                copies.waited += 1
                self.is_done = True

        empty = torch.empty
        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda _: self.stream)
        monkeypatch.setattr(torch, "empty", lambda *size, pin_memory=False, **rest: empty(*size, **rest))


@pytest.fixture
def copies(monkeypatch):
    return Copies(monkeypatch)


def sent(ring, *arrays):
    target = torch.full((sum(-(-array.nbytes // 16) * 16 for array in arrays),), 99, dtype=torch.uint8)
    ring.send(arrays, target)
    return target.numpy().tobytes()


def test_arrays_lie_one_after_another_whatever_their_size(copies):
    ring = _Ring(CPU, segments=2, segment_bytes=64)
    for count in (1, 3, 8, 9, 40):  # of eight bytes: the last ones pass a segment
        values = np.arange(count) + count
        assert sent(ring, values)[: values.nbytes] == values.tobytes()
    told = sent(ring, *NUMBERS)
    starts = np.cumsum([0] + [-(-array.nbytes // 16) * 16 for array in NUMBERS])
    for start, array in zip(starts, NUMBERS, strict=False):
        assert told[start : start + array.nbytes] == array.tobytes()


def test_a_segment_is_overwritten_only_when_its_copies_have_ended(copies):
    ring = _Ring(CPU, segments=3, segment_bytes=32)
    copies.is_late = True
    for _ in range(6):  # two a segment
        sent(ring, np.zeros(2))
    assert (copies.waited, ring.waits) == (0, 0)
    for i in range(6):
        sent(ring, np.zeros(2))
        assert copies.waited == ring.waits == i // 2 + 1
    copies.is_late = False
    for _ in range(6):  # over what was late before
        sent(ring, np.zeros(2))
    before = ring.waits
    for _ in range(12):
        sent(ring, np.zeros(2))
    assert ring.waits == before


def test_copies_of_one_segment_on_several_streams_are_all_waited_for(copies):
    ring = _Ring(CPU, segments=2, segment_bytes=32)
    copies.is_late, copies.late_stream = True, "first"
    for copies.stream in ("first", "second", "second", "second"):
        sent(ring, np.zeros(2))
    assert copies.waited == 0
    sent(ring, np.zeros(2))
    assert copies.waited == 1, "the copy on the stream that isn't current any more"
    sent(ring, np.zeros(2))
    sent(ring, np.zeros(2))
    assert copies.waited == 1, "those on the other one had ended"


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.float32, torch.float64, torch.bool])
def test_numbers_keep_their_type_and_shape(dtype):
    values = [[1, 0, 1], [0, 0, 1]]
    assert torch.equal(upload(values, CPU, dtype), torch.tensor(values, dtype=dtype))


def test_several_arrays_come_apart_again():
    for array, there in zip(NUMBERS, upload_all(NUMBERS, CPU), strict=True):
        assert np.array_equal(there.numpy(), array)
        assert there.numpy().dtype == array.dtype


def test_what_is_sent_fills_the_tensor():
    target = torch.zeros(6, dtype=torch.int64)
    send(np.arange(6).reshape(2, 3), target)
    assert target.tolist() == list(range(6))
