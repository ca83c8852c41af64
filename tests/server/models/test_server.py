"""Two models in a real server: they start, stop and die apart, and versions change while it runs."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request

import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvq.models import load
from kvq.models.adapters.place import adaptable
from tests.helpers_adapters import save_adapter
from tests.server.kit import Server
from tests.waiting import HANG_S, wait_for

ENGINE = "kvq.server.engine.worker"
FILE = """
num-blocks: 128
max-restarts: 100
models:
  - {name: one, model: tiny, kv: int4, served-model-name: first}
  - {name: two, model: tiny, kv: int8, start: lazy, idle-s: 600, adapter: [sql=ADAPTER]}
rollouts:
  chat:
    versions: [{model: one, weight: 90}, {model: two, weight: 10}]
    shadow: {model: two, share: 1}
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "serve.yaml"
    shapes = adaptable(load("tiny", kv="bf16").weights.model)
    path.write_text(FILE.replace("ADAPTER", str(save_adapter(path.parent / "sql", shapes))))
    with Server("--config", str(path), model=None) as running:
        running.config = path
        yield running


def client(server):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=HANG_S)


def complete(server, model, **options):
    given = {"prompt": "Once upon a time", "max_tokens": 8, "temperature": 0} | options
    return client(server).completions.with_raw_response.create(model=model, **given)


def get(server, path):
    with urllib.request.urlopen(server.url + path, timeout=HANG_S) as answer:
        return answer.read().decode()


def metrics(server):
    families = text_string_to_metric_families(get(server, "/metrics"))
    return {
        (one.name, *sorted(one.labels.items())): one.value for family in families for one in family.samples
    }


def rollout(server, *words):
    command = [sys.executable, "-m", "kvq", "rollout", str(server.config), *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_only_what_is_eager_has_an_engine_until_a_request_comes(server):
    assert json.loads(get(server, "/health"))["models"] == {"one": "ready", "two": "stopped"}
    [first] = server.children(ENGINE)

    answers = [complete(server, name).parse() for name in ("first", "two", "sql")]

    assert [one.model for one in answers] == ["one", "two", "sql"]
    assert answers[1].choices[0].text != answers[2].choices[0].text
    assert len(server.children(ENGINE)) == 2
    assert first in server.children(ENGINE)


def test_models_versions_and_metrics_are_listed_together(server):
    assert [one.id for one in client(server).models.list()] == ["chat", "one", "first", "two", "sql"]
    assert client(server).models.retrieve("two").id == "two"
    with pytest.raises(openai.NotFoundError, match="this server has 'chat', 'one', 'first', 'two', 'sql'"):
        client(server).models.retrieve("three")
    assert client(server).models.retrieve("sql").parent == "two"
    names = {one["name"] for one in json.loads(get(server, "/api/tags"))["models"]}
    assert names == {"chat", "one", "first", "two", "sql"}
    found = metrics(server)
    assert found["kvq_rollout_weight", ("name", "chat"), ("version", "two")] == 10
    assert found["kvq_http_connections",] >= 1
    text = get(server, "/metrics")
    assert text.count("# TYPE kvq_requests_total counter") == 1
    assert json.loads(get(server, "/openapi.json"))["paths"].keys() >= {"/v1/completions", "/metrics"}


def test_an_unknown_model_is_a_404_with_the_names(server):
    with pytest.raises(openai.NotFoundError, match="'chat', 'one', 'first', 'two'"):
        complete(server, "three")


def test_an_answer_names_its_version_which_is_the_sessions(server):
    found = [
        complete(server, "chat", extra_headers={"x-session-id": session}).headers["x-kvq-version"]
        for session in ("a", "b", "c", "a", "b", "c")
    ]

    assert found[:3] == found[3:]
    assert set(found) <= {"one", "two"}
    wait_for(lambda: "version=" in server.log, "the log names versions")


def test_copies_are_compared_and_never_counted_as_the_clients(server):
    def ends():
        found = metrics(server)
        both = [(("end", end), ("name", "chat"), ("version", "two")) for end in ("equal", "different")]
        return sum(found.get(("kvq_shadow_requests_total", *labels), 0) for labels in both)

    before = ends()
    served = [complete(server, "chat", logprobs=3, user=str(i)).headers["x-kvq-version"] for i in range(6)]

    expected = before + served.count("one")
    wait_for(lambda: ends() >= expected, "copies are compared")
    assert ends() == expected
    kl = metrics(server)["kvq_shadow_kl_nats_count", ("name", "chat"), ("version", "two")]
    assert kl == served.count("one")


def test_an_engine_that_dies_does_not_touch_the_other_model(server):
    complete(server, "two")
    pids = server.children(ENGINE)
    [first] = [pid for pid in pids if pid == min(pids)]
    tokens = []

    def stream():
        for chunk in client(server).completions.create(
            model="two", prompt="Once", max_tokens=300, stream=True, extra_body={"ignore_eos": True}
        ):
            tokens.append(chunk.choices[0].text)

    reading = threading.Thread(target=stream)
    reading.start()
    wait_for(lambda: len(tokens) > 3, "the stream has begun")
    os.kill(first, signal.SIGKILL)
    wait_for(lambda: json.loads(get(server, "/health"))["models"]["one"] != "ready", "it is missed")
    with pytest.raises(openai.InternalServerError, match="restarting"):
        complete(server, "one")
    reading.join(HANG_S)

    assert len(tokens) == 300
    wait_for(lambda: json.loads(get(server, "/health"))["models"]["one"] == "ready", "it is back")
    assert complete(server, "one").parse().model == "one"


def test_a_stop_ends_new_requests_and_loses_no_running_one(server):
    complete(server, "two")
    stream = client(server).completions.create(
        model="two", prompt="Once", max_tokens=600, stream=True, extra_body={"ignore_eos": True}
    )
    first = next(iter(stream))
    assert first.choices[0].text is not None

    assert "chat: one=90 two=0" in rollout(server, "stop", "two", "--reason", "a test")

    def is_refused():
        with contextlib.suppress(openai.InternalServerError):
            complete(server, "two", max_tokens=1)
            return False
        return True

    wait_for(is_refused, "it is refused")
    versions = {complete(server, "chat", user=str(i)).headers["x-kvq-version"] for i in range(12)}
    assert versions == {"one"}
    assert sum(1 for _ in stream) == 599
    rollout(server, "set", "chat", "one=50", "two=50")
    wait_for(lambda: not is_refused(), "it is back")
    lines = [json.loads(line) for line in server.config.with_name("serve.yaml.audit.jsonl").open()]
    assert [line["what"] for line in lines] == ["stop two", "set chat"]
    assert lines[0]["reason"] == "a test"


def test_a_broken_state_file_changes_nothing(server):
    file = server.config.with_name("serve.yaml.rollout.json")
    before = file.read_text()
    file.write_text("{")
    wait_for(lambda: "roll-outs stay as they were" in server.log, "it is logged")

    assert complete(server, "chat").parse().model in ("one", "two")
    file.write_text(before)


def test_a_body_that_is_no_json_and_a_wrong_type_are_refused_as_by_one_model(server):
    for body, kind, status in ((b"{", "application/json", 400), (b"{}", "text/plain", 415)):
        request = urllib.request.Request(f"{server.url}/v1/completions", body, {"Content-Type": kind})
        with pytest.raises(urllib.error.HTTPError) as found:
            urllib.request.urlopen(request, timeout=HANG_S)
        assert found.value.code == status
        assert "x-request-id" in found.value.headers


def test_the_page_gets_the_model_that_it_names_and_an_overview_of_all(server):
    complete(server, "two")

    found = {name: json.loads(get(server, f"/pool?model={name}")) for name in ("one", "two", "other")}

    assert {name: one["model"] for name, one in found.items()} == {"one": "one", "two": "two", "other": "one"}
    assert [one["name"] for one in found["one"]["models"]] == ["one", "two"]
    assert all(one["bytes"] > 1e8 for one in found["one"]["models"])
    [rollout] = found["one"]["rollouts"]
    assert [one["name"] for one in rollout["versions"]] == ["one", "two"]
    assert rollout["shadow"]["version"] == "two"
    assert rollout["shadow"]["equal"] + rollout["shadow"]["different"] > 0
