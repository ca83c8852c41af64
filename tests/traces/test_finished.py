"""Finished parts: an interrupted measurement goes on, and never with another one's parts."""

import stat

import pytest

from kvq.errors import ConfigError
from kvq.traces.finished import Finished

ABOUT = {"model": "m"}


def never():
    raise AssertionError("made a second time")


def test_parts_are_made_once(tmp_path):
    path = tmp_path / "parts"
    first = Finished(path, ABOUT)
    assert first.of("a", lambda: {"x": (1, 2)}) == {"x": [1, 2]}
    assert first.of("a", never) == {"x": [1, 2]}
    again = Finished(path, ABOUT)
    assert again.of("a", never) == {"x": [1, 2]}
    assert again.of("b", lambda: 3) == 3
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize("cut", range(1, 30))
def test_interrupted_while_writing(tmp_path, cut):
    path = tmp_path / "parts"
    first = Finished(path, ABOUT)
    first.of("a", lambda: "kept")
    first.of("b", lambda: "lost")
    path.write_bytes(path.read_bytes()[:-cut])
    again = Finished(path, ABOUT)
    assert again.of("a", never) == "kept"
    assert again.of("b", lambda: "new") == "new"
    assert Finished(path, ABOUT).of("b", never) == "new"


def test_others_are_refused(tmp_path):
    path = tmp_path / "parts"
    Finished(path, ABOUT).of("a", lambda: 1)
    with pytest.raises(ConfigError, match="another measurement"):
        Finished(path, {"model": "n"})
    for text in ("no json\n", "[1]\n"):
        path.write_text(text)
        with pytest.raises(ConfigError, match="parts"):
            Finished(path, ABOUT)


@pytest.mark.parametrize("damage", [b"{", b'{"part": "b"}', b"[]", b"\xff"])
def test_a_damaged_part_is_made_again(tmp_path, damage):
    path = tmp_path / "parts"
    first = Finished(path, ABOUT)
    for name in "abc":
        first.of(name, lambda name=name: name)
    lines = path.read_bytes().split(b"\n")
    path.write_bytes(b"\n".join([*lines[:2], damage, *lines[3:]]))
    again = Finished(path, ABOUT)
    assert (again.of("a", never), again.of("c", never)) == ("a", "c")
    assert again.of("b", lambda: "new") == "new"


def test_without_a_file():
    parts = Finished(None, ABOUT)
    assert [parts.of("a", lambda: 1), parts.of("a", lambda: 2)] == [1, 2]
