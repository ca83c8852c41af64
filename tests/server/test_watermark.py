"""A server marks every text though clients decline, and the command finds the mark in what they got."""

import json

import openai
import pytest
from click.testing import CliRunner

from kvq.commands.use.detect_watermark import command
from kvq.watermark import make_key
from tests.server.kit import Server
from tests.waiting import HANG_S

PROMPT = "The history of the city"


@pytest.fixture(scope="module")
def key_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("secret") / "key"
    make_key(path)
    return path


@pytest.fixture(scope="module")
def client(key_file):
    options = ("--num-blocks", "128", "--watermark", "always", "--watermark-key-file", str(key_file))
    with Server(*options) as server:
        yield openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=HANG_S)


def test_every_text_is_marked_and_found(client, key_file, tmp_path):
    completion = client.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=200, extra_body={"ignore_eos": True}
    )
    chat = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": PROMPT}],
        max_tokens=200,
        extra_body={"ignore_eos": True, "watermark": True},
    )
    for name, text in (("completion", completion.choices[0].text), ("chat", chat.choices[0].message.content)):
        (tmp_path / name).write_text(text, encoding="utf-8")
    files = [str(tmp_path / "completion"), str(tmp_path / "chat")]
    found = CliRunner().invoke(
        command, [*files, "--key-file", str(key_file), "--json", str(tmp_path / "found.json")]
    )
    assert found.exit_code == 0
    assert found.output.count(": marked; z ") == 2
    rows = json.loads((tmp_path / "found.json").read_text(encoding="utf-8"))["rows"]
    assert [row["is_marked"] for row in rows] == [True, True]
    assert max(row["p"] for row in rows) < 1e-6


def test_declining_is_a_bad_request(client):
    with pytest.raises(openai.BadRequestError, match="marks every text"):
        client.completions.create(model="tiny", prompt=PROMPT, extra_body={"watermark": False})
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model="tiny", prompt=PROMPT, extra_body={"watermark": "yes"})


def test_a_server_without_a_key_refuses_who_asks(common_server):
    client = openai.OpenAI(base_url=common_server.url + "/v1", api_key="none", max_retries=0, timeout=HANG_S)
    with pytest.raises(openai.BadRequestError, match="no key"):
        client.completions.create(model="tiny", prompt=PROMPT, extra_body={"watermark": True})
    answer = client.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=2, extra_body={"watermark": False}
    )
    assert answer.usage.completion_tokens == 2
