"""A key is a secret: read from a file of one's own, shown nowhere, never overwritten."""

import os

import pytest

from kvq.errors import ConfigError
from kvq.watermark import make_key, read_key


def write(path, content: bytes, mode: int = 0o600):
    path.write_bytes(content)
    path.chmod(mode)
    return path


def test_a_new_key_is_its_owners_only_and_random(tmp_path):
    words = set()
    for name in ("a", "b"):
        make_key(tmp_path / name)
        assert os.stat(tmp_path / name).st_mode & 0o777 == 0o600
        words.add(read_key(tmp_path / name).word(b"green", [1, 2]))
    assert len(words) == 2


def test_a_key_is_never_overwritten(tmp_path):
    path = write(tmp_path / "key", b"a" * 20)
    with pytest.raises(ConfigError, match="is there already"):
        make_key(path)
    assert path.read_bytes() == b"a" * 20


@pytest.mark.parametrize("content", [b"0123456789abcdef" * 2, b"sixteen letters!", bytes(range(128, 145))])
def test_sixteen_bytes_are_enough(tmp_path, content):
    assert read_key(write(tmp_path / "a", content)) == read_key(write(tmp_path / "b", content + b"\n"))


@pytest.mark.parametrize(
    ("content", "length"), [(b"0123456789abcdef", 8), (b"fifteen letters", 15), (b" \n", 0)]
)
def test_fewer_are_not(tmp_path, content, length):
    with pytest.raises(ConfigError, match=f"key of {length} bytes; 16 are needed"):
        read_key(write(tmp_path / "key", content))


def test_a_key_that_others_can_read_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="chmod 600"):
        read_key(write(tmp_path / "key", b"a" * 32, 0o644))
    with pytest.raises(ConfigError, match="can't be read"):
        read_key(tmp_path / "none")


def test_nothing_shows_a_key(tmp_path):
    secret = b"a secret that nobody sees"
    key = read_key(write(tmp_path / "key", secret))
    shown = f"{key!r} {key}"
    assert "secret" not in shown
    assert key._secret.hex() not in shown
    assert repr(key._secret) not in shown


def test_words_differ_by_key_scheme_and_every_token_of_the_context(tmp_path):
    keys = [read_key(write(tmp_path / name, name.encode() * 16)) for name in ("w", "z")]
    words = {
        key.word(tag, c) for key in keys for tag in (b"green", b"x") for c in ([1, 2], [2, 1], [1], [1, 3])
    }
    assert len(words) == 16
    assert all(0 <= word < 1 << 64 for word in words)
