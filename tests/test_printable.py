"""Texts from outside can't steer a terminal, and there is no stream they break."""

import io
import sys

import pytest

from kvq.cli import main
from kvq.printable import one_line, printable


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain, \u00fc \u4e2d \U0001f600\n\tnext", "plain, \u00fc \u4e2d \U0001f600\n\tnext"),
        ("\x1b]0;title\x07\x1b[2J", r"\x1b]0;title\x07\x1b[2J"),
        ("over\rwritten\x9b31m\x7f", r"over\rwritten\x9b31m\x7f"),
        ("a\u202eb\u2066c\u2028d", r"a\u202eb\u2066c\u2028d"),
        ("half \ud800", r"half \ud800"),
    ],
)
def test_controls_are_shown_and_letters_are_left(text, shown):
    assert printable(text) == shown
    assert one_line(text) == shown.replace("\n", r"\n").replace("\t", r"\t")


def test_errors_quote_names_without_their_controls(capsys):
    with pytest.raises(SystemExit):
        main(["compare", "no\x1b[31m\u202e\udcff", "b.json"])
    assert r"no\x1b[31m\u202e\udcff" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["compare", "--\x1b[31m", "b.json"])
    assert "\x1b" not in capsys.readouterr().err


def test_what_an_encoding_lacks_is_shown_as_python_writes_it(monkeypatch):
    out = io.TextIOWrapper(io.BytesIO(), encoding="latin-1")
    monkeypatch.setattr(sys, "stdout", out)
    with pytest.raises(SystemExit):
        main(["gpus"])
    assert out.errors == "backslashreplace"
