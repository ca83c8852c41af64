"""What a file of options may hold: what it says is taken as it is, or refused in words."""

import pytest

from kvq.errors import ConfigError
from tests.commands.every_option import command


def run(path, text):
    path.write_text(text)
    command.main(["--config", str(path)], standalone_mode=False)
    return command.seen


@pytest.fixture
def path(tmp_path):
    return tmp_path / "a.yaml"


def test_values_are_taken_as_they_are(path):
    text = "port: 80\nwait: 2\nmodel: '12'\nhost: [a, b]\nfast: true\nfolder:\n"
    assert run(path, text) == {
        "port": 80,
        "wait": 2.0,
        "model": "12",
        "folder": None,
        "host": ("a", "b"),
        "fast": True,
        "max_num_seqs": None,
        "drafts": None,
    }
    assert run(path, "drafts: {method: ngram, k: 4}")["drafts"] == '{"method": "ngram", "k": 4}'
    assert run(path, "drafts: ngram")["drafts"] == "ngram"
    assert run(path, "port: '81'\nhost: a")["port"] == 81  # as the command line would spell it
    assert run(path, "port: +82")["port"] == 82
    assert [run(path, f"wait: {text}")["wait"] for text in ("-2", "-2.50", ".5", "1e3", "1.5e3", "'7'")] == [
        *(-2.0, -2.5, 0.5, 1000.0, 1500.0, 7.0)
    ]
    assert run(path, "model: 1e5")["model"] == "1e5"
    assert run(path, "") == run(path, "{}")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("port: 80.5", "port is a whole number in plain digits, got 80.5"),
        ("port: true", "port is a whole number in plain digits, got true"),
        ("port: [80]", "port takes one value, got a list"),
        ("port: {a: 1}", "port is a whole number in plain digits, got a mapping"),
        ("port: 2024-01-01", "port is a whole number in plain digits, got datetime"),
        ("port: 8:30", "port is a whole number in plain digits, got '8:30'"),
        ("port: 0x50", "port is a whole number in plain digits, got '0x50'"),
        ("port: 0b1", "port is a whole number in plain digits, got '0b1'"),
        ("port: 1_0", "port is a whole number in plain digits, got '1_0'"),
        ("port: 010", "port is a whole number in plain digits, got '010'"),
        ("port: '1_0'", "port is a whole number in plain digits, got '1_0'"),
        ("port: 1_0.0", "port is a whole number in plain digits, got '1_0.0'"),
        ("wait: 8:30", "wait is a number in plain digits, got '8:30'"),
        ("wait: 8:30.5", "wait is a number in plain digits, got '8:30.5'"),
        ("wait: 1_0.5", "wait is a number in plain digits, got '1_0.5'"),
        ("wait: 010", "wait is a number in plain digits, got '010'"),
        ("wait: 'nan'", "wait is a number in plain digits, got 'nan'"),
        ("max-num-seqs: 8\nmax_num_seqs: 9", "max-num-seqs and max_num_seqs are one option; give it once"),
        ("max_num_seqs: 8\nmax_num-seqs:", "max_num_seqs and max_num-seqs are one option; give it once"),
        ("port: 70000", "port: 70000 is not in the range"),
        ("wait: true", "wait is a number in plain digits, got true"),
        ("wait: 2024-01-01", "wait is a number in plain digits, got datetime"),
        ("model: 12", "model is a text; put it in quotes, got 12"),
        ("model: no", "model is a text; put it in quotes, got false"),
        ("host: [a, 5]", "host is a text; put it in quotes, got 5"),
        ("host: [[a]]", "host is a text; put it in quotes, got a list"),
        ("fast: 1", "fast is true or false, got 1"),
        ("fast: 'yes'", "fast is true or false, got 'yes'"),
        ("port: 1\nport: 2", "port is given twice"),
        ("port: &a 80\nwait: *a", r"aliases such as \*a are not read"),
        ("port: " + "[" * 5000 + "]" * 5000, "nested 8 levels deep"),
        ("{a: " * 5000, "nested 8 levels deep"),
        ("- " * 5000, "nested 8 levels deep"),
        ("port: !!python/object/apply:os.system [id]", "tags such as .* are not read"),
        ("port: !!bool 3", "tags such as tag:yaml.org,2002:bool are not read"),
        ("port: !!timestamp x", "tags such as"),
        ("<<: {port: 1}", "merges .* are not read"),
        ('folder: "\\ud800"', "folder: texts must be Unicode"),
        ("wait: .nan", "wait: numbers must be finite"),
        ("port: 2024-99-99", "is no YAML"),
        ("\x00", "is no YAML"),
        ("a" * (1 << 20) + "a", "may have 1048576 bytes"),
        ("5", "must map options to values, got a int"),
        ("prot: 5", "did you mean 'port'"),
    ],
)
def test_what_an_option_does_not_take_is_refused_in_words(path, text, said):
    with pytest.raises(ConfigError, match=said) as refused:
        run(path, text)
    assert str(path) in str(refused.value)
