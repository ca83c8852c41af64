"""Texts of every form are read the same, and what can't be read is refused by name."""

import json

import pytest

from kvq.errors import ConfigError, RequestError
from kvq.evals import data, read_text

ROWS = [{"id": 1, "text": "The first\nrow."}, {"id": 2, "text": "Zweite Zeile: größer \u2028 als 日本."}]
WHOLE = "\n\n".join(row["text"] for row in ROWS)
CHAT = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "Because."}]


def lines(rows):
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def write(path, content):
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def write_parquet(path, rows):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A local folder of a dataset, and no network to look elsewhere."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    folder = tmp_path / "my_data"
    folder.mkdir()
    return folder


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.txt", WHOLE),
        ("a.md", WHOLE),
        ("a.jsonl", lines(ROWS)),
        ("a.ndjson", lines(ROWS).replace("\n", "\r\n\n")),
        ("a.JSONL", "\ufeff" + lines(ROWS)),
        ("a.json", json.dumps(ROWS, indent=2)),
        ("a.json", json.dumps([row["text"] for row in ROWS])),
        ("a.json", lines(ROWS)),
    ],
)
def test_every_form_gives_the_same_text(tmp_path, name, content):
    found = read_text(write(tmp_path / name, content))
    assert (found.name, found.text) == (name, WHOLE)


def test_parquet_gives_the_same_text(tmp_path):
    found = read_text(write_parquet(tmp_path / "a.parquet", ROWS))
    assert (found.name, found.text) == ("a.parquet", WHOLE)
    chat = read_text(write_parquet(tmp_path / "chat.pq", [{"messages": CHAT}] * 2))
    assert chat.text == "Why?\nBecause.\n\nWhy?\nBecause."


def test_a_dataset_gives_the_same_text_by_split(hub):
    write(hub / "train.jsonl", lines(ROWS))
    write(hub / "test.jsonl", lines(ROWS[:1]))
    name = f"hf:{hub}"
    assert (read_text(name).name, read_text(name).text) == (name, WHOLE)
    assert read_text(f"{name}:default:test").text == ROWS[0]["text"]
    with pytest.raises(RequestError, match=r"can't read the dataset hf:.*nothing"):
        read_text(f"{name}:default:nothing")


@pytest.mark.parametrize(
    ("row", "field", "text"),
    [
        ({"prompt": "p", "content": "c", "text": "t"}, None, "t"),
        ({"prompt": "p", "content": "c"}, None, "c"),
        ({"messages": CHAT, "prompt": "p"}, None, "p"),
        ({"messages": CHAT, "id": "x"}, None, "Why?\nBecause."),
        ({"text": "t", "body": "b"}, "body", "b"),
        ({"conversation": CHAT}, "conversation", "Why?\nBecause."),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]}, None, "a"),
        ({"messages": [{"role": "user", "content": None}, *CHAT]}, None, "Why?\nBecause."),
    ],
)
def test_fields_are_found_by_default_and_by_name(tmp_path, row, field, text):
    assert read_text(write(tmp_path / "a.jsonl", lines([row])), field).text == text


@pytest.mark.parametrize(
    ("name", "content", "field", "says"),
    [
        ("a.jsonl", lines([ROWS[0], {"body": "x", "id": 1}]), None, "row 2 has no field text or .*body, id"),
        ("a.jsonl", lines(ROWS), "body", "row 1 has no field body; it has id, text: name one with"),
        ("a.jsonl", "{}\n", None, "it has none"),
        ("a.jsonl", lines(ROWS), "id", "field id must be text or a conversation, got int"),
        ("a.jsonl", '{"text": ["a", "b"]}', None, "must be text or a conversation, got list"),
        ("a.jsonl", "3\n", None, "row 1: expected an object with a field of text, got int"),
        ("a.json", '["a"]', "text", "expected an object with a field of text, got str"),
        ("a.jsonl", lines(ROWS) + "\n{broken\n", None, "a.jsonl, line 4 is not JSON"),
        ("a.jsonl", "[" * 100_000, None, "a.jsonl is not JSON"),
        ("a.json", '[{"text": "a"},', None, "a.json is not JSON"),
        ("a.jsonl", b'{"text": "caf\xe9"}', None, r"a.jsonl is not UTF-8 text \(byte 13\)"),
        ("a.jsonl", '{"text": "\\ud800"}', None, "a.jsonl"),
        ("a.jsonl", "", None, "a.jsonl is empty"),
        ("a.jsonl", '{"text": " \\n"}\n', None, "a.jsonl holds no text"),
        ("a.json", "[]", None, "a.json holds no text"),
        ("a.parquet", "not at all", None, "a.parquet is not Parquet"),
        ("a.parquet", None, None, "can't read .*a.parquet"),
        ("a.json", None, None, "can't read .*a.json"),
    ],
)
def test_what_can_not_be_read_is_refused_by_name(tmp_path, name, content, field, says):
    path = tmp_path / name
    if content is not None:
        write(path, content)
    with pytest.raises(RequestError, match=says):
        read_text(path, field)


def test_a_parquet_file_without_rows_holds_no_text(tmp_path):
    pytest.importorskip("pyarrow")
    import pyarrow

    empty = pyarrow.schema([("text", pyarrow.string())]).empty_table()
    pyarrow.parquet.write_table(empty, tmp_path / "a.parquet")
    with pytest.raises(RequestError, match="holds no text"):
        read_text(tmp_path / "a.parquet")


def test_plain_text_has_no_fields(tmp_path):
    with pytest.raises(ConfigError, match="no field 'body'; leave --text-field out"):
        read_text(write(tmp_path / "a.txt", "words"), "body")


def test_datasets_are_named(hub):
    for name in ("hf:", "hf::config"):
        with pytest.raises(RequestError, match=r"named hf:NAME\[:CONFIG\[:SPLIT\]\]"):
            read_text(name)
    with pytest.raises(RequestError, match=r"can't read the dataset hf:.*is the name right"):
        read_text(f"hf:{hub}/nowhere")


def test_no_more_is_read_than_the_bound(tmp_path, monkeypatch):
    monkeypatch.setattr(data, "_MOST_CHARACTERS", 25)
    rows = lines([{"text": "ten letter"}] * 4) + "{broken"
    assert read_text(write(tmp_path / "a.jsonl", rows)).text == "\n\n".join(["ten letter"] * 3)
