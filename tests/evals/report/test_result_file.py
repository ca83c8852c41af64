"""A result of others is read field by field: what is not as kvq writes it is refused by its name."""

import json

import pytest
from click.testing import CliRunner

from kvq.commands.quality.compare import command
from kvq.errors import ConfigError
from kvq.evals.report.result_file import read_result
from tests.evals.report.test_compare import result, row


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"model": None}, "model"),
        ({"text": 3}, "text"),
        ({"device": "x" * 20_000}, "device"),
        ({"context": "64"}, "context"),
        ({"commit": ["c"]}, "commit"),
        ({"seed": "1"}, "seed"),
        ({"complete": "no"}, "complete"),
        ({"rows": [{**row("int8", 0.1), "tokens": "\x1b[2J"}]}, r"rows\[0\]\.tokens"),
        ({"rows": [{**row("int8", "0.1")}]}, r"rows\[0\]\.kl_mean"),
        ({"rows": [{**row("int8", 0.1), "compression": True}]}, r"rows\[0\]\.compression"),
        ({"rows": [row("int8", 0.1, [0.1, 1e308])]}, r"rows\[0\]\.intervals\.kl_mean"),
        ({"tasks": [{"key": 3}]}, r"tasks\[0\]"),
        ({"tasks": [{"key": "model"}]}, "model"),
    ],
)
def test_a_field_of_another_type_is_named(tmp_path, change, field):
    path = tmp_path / "r.json"
    path.write_text(json.dumps({**result(row("int8", 0.1)), **change}))
    with pytest.raises(ConfigError, match=f"is damaged: {field} must be"):
        read_result(path)


def test_what_is_shown_of_a_result_cant_steer_the_terminal(tmp_path):
    paths = [tmp_path / f"{name}.json" for name in "ab"]
    for path, name in zip(paths, ("m\x1b[2J[red]\u202e", "n\n\r"), strict=True):
        content = result(row(name, 0.1, tokens=5), model=name, date="\x9b")
        del content["commit"]
        path.write_text(json.dumps(content))
    done = CliRunner().invoke(command, list(map(str, [*paths, "--json", tmp_path / "c.json"])))
    assert done.exit_code == 0, done.exception
    assert r"m\x1b[2J[red]\u202e" in done.stdout
    assert not set("\x1b\u202e\r\x9b") & set(done.output)
