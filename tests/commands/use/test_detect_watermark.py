"""`kvq detect-watermark` says what it found, and of what it can't look at why."""

import json

import pytest


@pytest.fixture
def key_file(tmp_path):
    path = tmp_path / "key"
    path.write_text("the secret of these tests")
    path.chmod(0o600)
    return path


@pytest.mark.parametrize("scheme", ["green", "tournament,layers=12"])
def test_generated_texts_are_found_and_others_are_not(key_file, tmp_path, kvq, scheme):
    options = ("generate", "-n", "200", "--ignore-eos", "--temperature", "1", "--seed", "3", "The history of")
    code, text, _ = kvq(*options, "--watermark-key-file", key_file, "--watermark-scheme", scheme)
    assert code == 0
    code, plain, _ = kvq(*options)
    assert code == 0
    assert text != plain
    for name, content in (("marked", text), ("plain", plain), ("short", "Two words")):
        (tmp_path / name).write_text(content, encoding="utf-8")
    files = [tmp_path / name for name in ("marked", "plain", "short")]
    code, out, _ = kvq(
        "detect-watermark", *files, "--key-file", key_file, "--scheme", scheme, "--json", tmp_path / "o"
    )
    assert code == 0
    marked, other, short = out.splitlines()
    assert marked.startswith(f"{files[0]}: marked; z ")
    assert "plain: no mark found; z " in other
    assert "short: too short to tell; z " in short
    found = json.loads((tmp_path / "o").read_text(encoding="utf-8"))
    assert found["scheme"].startswith(scheme.partition(",")[0] + ",")
    assert found["false_alarms"] == 1e-4
    assert [row["is_marked"] for row in found["rows"]] == [True, False, False]


def test_lines_are_texts_of_their_own(key_file, tmp_path, kvq):
    (tmp_path / "texts").write_text("One line of text\n\nAnother line of text\n", encoding="utf-8")
    code, out, _ = kvq("detect-watermark", "--lines", tmp_path / "texts", "--key-file", key_file)
    assert code == 0
    assert [line.partition(": ")[0] for line in out.splitlines()] == [
        f"{tmp_path}/texts:1",
        f"{tmp_path}/texts:3",
    ]


def test_what_is_missing_is_said(key_file, tmp_path, kvq):
    (tmp_path / "text").write_text("a text", encoding="utf-8")
    for options, said in (
        ((tmp_path / "text",), "--key-file is needed"),
        ((tmp_path / "none", "--key-file", key_file), "can't read"),
        ((tmp_path / "text", "--key-file", tmp_path / "none"), "can't read"),
        ((tmp_path / "text", "--key-file", key_file, "--scheme", "red"), "unknown watermark scheme 'red'"),
        ((tmp_path / "text", "--new-key", tmp_path / "new"), "looks at no text"),
        (("--new-key", key_file), "is there already"),
    ):
        code, _, err = kvq("detect-watermark", *options)
        assert code == 2
        assert said in err
    assert not (tmp_path / "new").exists()


def test_a_new_key_is_made_and_not_shown(tmp_path, kvq):
    code, out, _ = kvq("detect-watermark", "--new-key", tmp_path / "key")
    assert code == 0
    assert "keep a copy" in out
    assert (tmp_path / "key").read_text(encoding="ascii").strip() not in out
    assert (tmp_path / "key").stat().st_mode & 0o777 == 0o600
