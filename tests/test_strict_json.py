"""JSON of others is taken literally, or refused with the name of the field."""

import json

import pytest

from kvq import strict_json


def test_what_json_means_is_read():
    value = {"a": [1, 2.5, None, True, "\u00fc\U0001f600"], "b": {"c": -(1 << 63), "d": (1 << 64) - 1}}
    assert strict_json.loads(json.dumps(value)) == value
    assert strict_json.loads(b'\xef\xbb\xbf{"a": "\\ud83d\\ude00"}') == {"a": "\U0001f600"}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "Expecting value"),
        ("[1, NaN]", r"\[1\]: numbers must be finite"),
        ('{"rows": [{"kl": 1e999}]}', r"rows\[0\]\.kl: numbers must be finite"),
        ('{"a": -Infinity}', "a: numbers must be finite"),
        ('{"a": %s}' % ("9" * 400), "a: integers may have 64 bits"),
        ("9" * 5000, "integer string conversion"),
        ('{"a": 1, "a": 2}', "the name a is twice in one object"),
        ('{"a": "\\ud800"}', "a: texts must be Unicode"),
        ('{"\\udfff": 1}', "texts must be Unicode"),
        ("[" * 65 + "]" * 65, "nested 64 levels deep"),
        ("[" * 100_000, "nested 64 levels deep"),
        (b"\xff", "can't decode"),
    ],
)
def test_the_rest_is_refused(text, said):
    with pytest.raises(ValueError, match=said):
        strict_json.loads(text)


def test_files_may_not_be_without_end(monkeypatch, tmp_path):
    path = tmp_path / "a.json"
    path.write_text("[1, 2]")
    assert strict_json.read(path) == [1, 2]
    monkeypatch.setattr(strict_json, "MAX_FILE", 5)
    with pytest.raises(ValueError, match="5 bytes"):
        strict_json.read(path)
