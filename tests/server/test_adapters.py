"""A server with LoRA adapters: chosen by model name, loaded by clients, kept by the next engine."""

import json
import os
import signal
import urllib.error
import urllib.request

import pytest

from kvq import LLM, SamplingParams
from kvq.errors import ConfigError
from kvq.models import load
from kvq.models.adapters.place import adaptable
from kvq.server.admission.config import ServerConfig
from tests.helpers_adapters import CONFIG, save_adapter
from tests.server.kit import Server
from tests.waiting import HANG_S, wait_for

TEXT = "Once upon a time"


def ask(server, path, body=None):
    """The status and the JSON that a request is answered with."""
    headers = {"Content-Type": "application/json", "Authorization": "Bearer none"}
    data = None if body is None else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(
            urllib.request.Request(server.url + path, data, headers), timeout=HANG_S
        ) as found:
            return found.status, json.loads(found.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def text_of(server, model):
    body = {"model": model, "prompt": TEXT, "max_tokens": 12, "temperature": 0}
    status, found = ask(server, "/v1/completions", body)
    assert status == 200, found
    assert found["model"] == model
    return found["choices"][0]["text"]


def names_of(server):
    return {model["id"]: model.get("parent") for model in ask(server, "/v1/models")[1]["data"]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Adapters below a folder, and one beside it."""
    model, root = load("tiny", kv="bf16"), tmp_path_factory.mktemp("adapters")
    shapes = adaptable(model.weights.model)
    for i, name in enumerate(("allowed/a", "allowed/b", "allowed/c", "outside")):
        save_adapter(root / name, shapes, seed=i)
    (root / "allowed" / "link").symlink_to(root / "outside")
    bad = save_adapter(root / "allowed" / "bad", shapes)
    (bad / CONFIG).write_text("{}")
    return root / "allowed"


@pytest.fixture(scope="module")
def texts(folder):
    """What an engine alone writes, by adapter."""
    with LLM("tiny", kv="bf16", num_blocks=64, adapters={name: folder / name for name in "abc"}) as llm:
        params = SamplingParams(max_tokens=12)
        found = {
            name: llm.generate(TEXT, params, adapter=name)[0].outputs[0].text
            for name in (None, "a", "b", "c")
        }
    assert len(set(found.values())) == 4
    return found


@pytest.fixture(scope="module")
def server(folder):
    given = ("--kv", "bf16", "--kv-also", "int8", "--num-blocks", "200", "--served-model-name", "base")
    own = ("--adapter", f"a={folder / 'a'}", "--adapter", f"b={folder / 'b'}", "--max-adapters", "1")
    with Server(*given, *own, "--adapter-folder", str(folder)) as found:
        yield found


def test_the_model_name_chooses_the_adapter(server, texts):
    assert names_of(server) == {"base": None, "a": "base", "b": "base"}
    for name in ("a", "base", "b", "a"):
        assert text_of(server, name) == texts[None if name == "base" else name]
    chat = {"model": "b", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 3}
    assert ask(server, "/v1/chat/completions", chat)[1]["model"] == "b"
    assert ask(server, "/v1/messages", chat)[1]["model"] == "b"
    assert (
        ask(server, "/v1/responses", {"model": "b", "input": "Hi", "max_output_tokens": 3})[1]["model"] == "b"
    )
    status, found = ask(server, "/v1/completions", {"model": "c", "prompt": TEXT})
    assert status == 404
    assert "'base', 'a', 'b'" in found["error"]["message"]


def test_adapters_serve_every_kv_format(server):
    body = {"model": "a", "prompt": TEXT, "max_tokens": 4, "temperature": 0, "kv_format": "int8"}
    assert ask(server, "/v1/completions", body)[0] == 200


def test_clients_load_and_unload_adapters_and_the_next_engine_has_them(server, texts, folder):
    status, found = ask(server, "/v1/load_lora_adapter", {"lora_name": "c", "lora_path": "c"})
    assert (status, found["id"], found["parent"]) == (200, "c", "base")
    assert text_of(server, "c") == texts["c"]
    killed = server.engine_pid
    os.kill(killed, signal.SIGKILL)
    wait_for(lambda: server.is_gone(killed), "it ended")
    server.wait_ready()
    wait_for(lambda: ask(server, "/v1/completions", {"model": "c", "prompt": TEXT})[0] == 200, "it is back")
    assert text_of(server, "c") == texts["c"]
    status, found = ask(server, "/v1/unload_lora_adapter", {"lora_name": "c"})
    assert (status, found) == (200, {"id": "c", "object": "model", "deleted": True})
    assert "c" not in names_of(server)
    assert ask(server, "/v1/completions", {"model": "c", "prompt": TEXT})[0] == 404
    assert ask(server, "/v1/unload_lora_adapter", {"lora_name": "c"})[0] == 404


@pytest.mark.parametrize(
    ("name", "path", "status", "word"),
    [
        ("d", "../outside", 403, "folder"), ("d", "/etc", 403, "folder"), ("d", "link", 403, "folder"),
        ("d", "bad", 400, CONFIG), ("d", "none", 400, CONFIG), ("d", "a\0b", 400, "lora_path"),
        ("a", "c", 400, "'a'"), ("base", "c", 400, "'base'"), ("", "c", 400, "lora_name"),
    ],
)  # fmt: skip
def test_what_can_not_be_loaded_is_refused(server, name, path, status, word):
    before = names_of(server)
    code, found = ask(server, "/v1/load_lora_adapter", {"lora_name": name, "lora_path": path})
    assert code == status, found
    assert word in found["error"]["message"] + str(found["error"].get("param"))
    assert names_of(server) == before


def test_without_a_folder_of_the_operator_nothing_is_loaded(folder):
    with Server("--kv", "bf16", "--num-blocks", "50") as server:
        for path, body in (
            ("load", {"lora_name": "a", "lora_path": str(folder / "a")}),
            ("unload", {"lora_name": "a"}),
        ):
            code, found = ask(server, f"/v1/{path}_lora_adapter", body)
            assert code == 403
            assert "--adapter-folder" in found["error"]["message"]


def test_a_folder_that_is_not_there_is_refused_at_once(tmp_path):
    with pytest.raises(ConfigError, match="no folder"):
        ServerConfig(adapter_folder=tmp_path / "none")
