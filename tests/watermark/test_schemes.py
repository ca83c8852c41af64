"""Schemes are read from texts and written as such; numbers out of range are refused with a reason."""

import pytest

from kvq.errors import ConfigError
from kvq.watermark import Green, Tournament, parse_scheme
from kvq.watermark.schemes import spelled


@pytest.mark.parametrize(
    ("text", "scheme"),
    [
        ("green", Green()),
        ("green,delta=3", Green(delta=3)),
        ("green,gamma=0.5,context=1,delta=0.75", Green(gamma=0.5, context=1, delta=0.75)),
        ("tournament", Tournament()),
        ("tournament,layers=7,context=3", Tournament(layers=7, context=3)),
    ],
)
def test_a_scheme_is_its_name_and_unusual_numbers(text, scheme):
    assert parse_scheme(text) == scheme
    assert parse_scheme(spelled(scheme)) == scheme


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("gren", "did you mean 'green'"),
        ("green,layers=3", "got 'layers=3'"),
        ("green,delta=3,delta=4", "each once"),
        ("green,delta=many", "is no number"),
        ("green,delta=nan", "delta of green must be a number of 0.01 to 100, got nan"),
        ("green,gamma=1", "gamma of green must be a number of 0.01 to 0.99, got 1"),
        ("green,context=0", "context of green must be a whole number of 1 to 16, got 0"),
        ("green,context=1.5", "whole number"),
        ("tournament,layers=65", "layers of tournament must be a whole number of 1 to 64, got 65"),
    ],
)
def test_what_is_wrong_is_said(text, said):
    with pytest.raises(ConfigError, match=said):
        parse_scheme(text)
