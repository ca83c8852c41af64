"""Windows are neighbours in the text, whole, and start as the model was trained to start."""

import pytest

from kvq.errors import RequestError
from kvq.evals.windows import token_windows


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
