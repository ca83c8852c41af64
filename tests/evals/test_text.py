"""The default text is what CPython ships, and holds nothing long that other topics share."""

from pydoc_data.topics import topics

import pytest

from kvq.errors import RequestError
from kvq.evals.data import read_text
from kvq.evals.text import calibration_text, default_text, is_held_out, token_windows

HELD_OUT = ("await", "calls", "comparisons", "conversions", "dict", "floating", "raise", "return", "unary")


def long_lines(text):
    return {line.strip() for line in text.splitlines() if len(line.strip()) > 40}


def test_held_out_text_shares_no_long_line_with_any_other_topic():
    held_out = long_lines(default_text().text)
    assert len(held_out) > 300
    for name, text in topics.items():
        if not is_held_out(name):
            assert not held_out & long_lines(text), name
    # ... nor do two held-out topics share one: each long line comes from exactly one topic
    for line in held_out:
        assert sum(line in long_lines(text) for text in topics.values()) == 1, line


def test_calibration_text_and_evaluation_text_are_disjoint():
    assert not long_lines(calibration_text().text) & long_lines(default_text().text)
    assert len(calibration_text().text) > 3 * len(default_text().text)


def test_about_a_fifth_of_the_topics_is_held_out_by_the_hash_of_their_names():
    held_out = [name for name in topics if is_held_out(name)]
    assert 0.1 < len(held_out) / len(topics) < 0.35
    # SHA-256 as an integer modulo 5, computed apart from this code
    assert not any(is_held_out(name) for name in ("assert", "lambda", "while", "import", "class"))
    assert all(is_held_out(name) for name in HELD_OUT)


def test_the_digest_names_the_text(tmp_path):
    (tmp_path / "a.txt").write_text("some text", encoding="utf-8")
    (tmp_path / "b.txt").write_text("some text.", encoding="utf-8")
    a, b = read_text(tmp_path / "a.txt"), read_text(tmp_path / "b.txt")
    assert a.digest == "b94f6f125c79e3a5ffaa826f584c10d52ada669e6762051b826b55776d05aed2"
    assert a.digest != b.digest


@pytest.mark.parametrize(
    ("content", "says"),
    [(b"", "is empty"), (b" \n\t\n", "is empty"), (b"caf\xe9 " * 10, "not UTF-8"), (None, "can't read")],
)
def test_unusable_texts_are_refused_by_name(tmp_path, content, says):
    path = tmp_path / "input.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(RequestError, match=says) as caught:
        read_text(path)
    assert "input.txt" in str(caught.value)


class Letters:
    """A tokenizer of one token per letter, with or without a begin token."""

    def __init__(self, begin=None):
        self.bos_token_id = begin

    def __call__(self, text, add_special_tokens=True, **_):
        prefix = [self.bos_token_id] if add_special_tokens and self.bos_token_id is not None else []
        return {"input_ids": prefix + [ord(c) for c in text]}


def test_windows_are_neighbours_and_the_rest_is_left_out():
    windows = token_windows(Letters(), "abcdefgh", context=3)
    assert windows == [[97, 98, 99], [100, 101, 102]]


def test_every_window_starts_with_the_begin_token_where_the_tokenizer_adds_one():
    assert token_windows(Letters(begin=1), "abcdefgh", context=3) == [
        [1, 97, 98],
        [1, 99, 100],
        [1, 101, 102],
        [1, 103, 104],
    ]


def test_a_limit_takes_the_first_windows():
    assert len(token_windows(Letters(), "x" * 100, context=10, max_windows=4)) == 4


@pytest.mark.parametrize(
    ("text", "context", "limit", "says"),
    [
        ("abc", 4, None, r"3 tokens, one window needs 4; .*--context 3"),
        ("abc", 1, None, "at least 2 tokens"),
        ("abc", 2, 0, "at least 1"),
    ],
)
def test_what_can_not_be_cut_is_refused_with_what_would_fit(text, context, limit, says):
    with pytest.raises(RequestError, match=says):
        token_windows(Letters(), text, context=context, max_windows=limit)
