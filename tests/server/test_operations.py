"""What whoever runs a server relies on: its configuration, limits, logs, and its end."""

import contextlib
import http.client
import json
import os
import re
import signal
import socket
import threading
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import trustme

from kvq.cli import main
from tests.server.kit import Server
from tests.waiting import HANG_S, wait_for

CANARY = "xylophonicus-4711"
KEYS = ("secret-1", "secret-2")
ACTIVE, RUNNING = "kvq_active_requests", 'kvq_engine_requests{state="running"}'


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("server")
    keys = folder / "keys"
    keys.write_text("# two keys\n" + "\n".join(KEYS))
    keys.chmod(0o600)
    config = folder / "kvq.yaml"
    config.write_text(
        f"kv: int4\nnum-blocks: 128\nmax_num_seqs: 2\nmax-queue: 2\nserved-model-name: mine\n"
        f"metrics-names: vllm\nlog-format: json\napi-key-file: {keys}\n"
        f"request-timeout: {HANG_S:.0f}\ngrace: 1\nmax-concurrency-per-key: 3\n"
    )
    with Server("--config", str(config), "--max-num-seqs", "1", key=KEYS[0]) as running:
        yield running


def ask(server, path="/v1/completions", key=KEYS[0], **body):
    """Status, headers, body."""
    raw = json.dumps({"prompt": "The sea", "max_tokens": 4} | body).encode() if path != "/tokenize" else b"{}"
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    request = urllib.request.Request(server.url + path, raw, headers)
    try:
        with urllib.request.urlopen(request, timeout=HANG_S) as answer:
            return answer.status, answer.headers, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.headers, error.read()


@pytest.mark.long
def test_processes_share_a_session_and_no_ctrl_c(server):
    """Linux weighs niceness within a session only (autogroup, sched(7)); Ctrl-C is for a process group."""
    status, *_ = ask(server, guided_choice=["yes", "no"], max_tokens=1)
    assert status == 200
    pids = [server.engine_pid, server.reading_pid]
    for thread in os.listdir(f"/proc/{server.engine_pid}/task"):
        with open(f"/proc/{server.engine_pid}/task/{thread}/children", encoding="ascii") as file:
            pids += map(int, file.read().split())
    assert len(pids) == 3, "the engine has a process that compiles grammars"
    assert {os.getsid(pid) for pid in pids} == {os.getsid(server.process.pid)}
    assert len({os.getpgid(pid) for pid in (*pids, server.process.pid)}) == 4


def test_torch_is_loaded_by_the_engine_alone(server):
    pids = {"engine": server.engine_pid, "HTTP": server.process.pid, "prompts": server.reading_pid}
    mapped = {name: Path(f"/proc/{pid}/maps").read_text() for name, pid in pids.items()}
    assert [name for name, maps in mapped.items() if "libtorch_cpu" in maps] == ["engine"]
    assert not [name for name, maps in mapped.items() if "/scipy/" in maps]


def test_options_come_from_the_file_and_the_command_line_goes_before_it(server):
    models = json.loads(get(server, "/v1/models"))
    assert models["data"][0]["id"] == "mine"
    metrics = get(server, "/metrics")
    assert re.search(r'kvq_engine_info\{[^}]*max_num_seqs="1"', metrics)


def get(server, path):
    request = urllib.request.Request(server.url + path, headers={"Authorization": f"Bearer {KEYS[0]}"})
    with urllib.request.urlopen(request, timeout=HANG_S) as answer:
        return answer.read().decode()


def test_every_route_but_live_refuses_without_a_key(server):
    paths = json.loads(get(server, "/openapi.json"))["paths"]
    assert {"/v1/completions", "/v1/chat/completions", "/metrics", "/health/live"} <= set(paths)
    for path, methods in {**paths, "/openapi.json": ["get"], "/": ["get"]}.items():
        for method in methods:
            request = urllib.request.Request(
                server.url + path.replace("{model}", "mine").replace("{name}", "x"), method=method.upper()
            )
            if path == "/health/live":
                assert urllib.request.urlopen(request, timeout=HANG_S).status == 200
                continue
            for key in (None, "secret", KEYS[0] + "x"):
                if key is not None:
                    request.add_header("Authorization", f"Bearer {key}")
                with pytest.raises(urllib.error.HTTPError) as refused:
                    urllib.request.urlopen(request, timeout=HANG_S)
                assert refused.value.code == 401, path
    for path in ("/v1/completions", "/nothing"):
        assert json.loads(ask(server, path, key="secret")[2])["error"]["code"] == "invalid_api_key"
    assert ask(server, key=KEYS[1], max_tokens=1)[0] == 200


def test_exactly_one_socket_listens(server):
    inodes = set()
    for table in ("tcp", "tcp6", "udp", "udp6"):
        with open(f"/proc/net/{table}", encoding="ascii") as file:
            for line in file.readlines()[1:]:
                words = line.split()
                if words[3] == "0A" or table.startswith("udp"):
                    inodes.add(f"socket:[{words[9]}]")
    listening = []
    for pid in (server.process.pid, server.engine_pid):
        for name in os.listdir(f"/proc/{pid}/fd"):
            try:
                target = os.readlink(f"/proc/{pid}/fd/{name}")
            except OSError:
                continue
            if target in inodes:
                listening.append((pid, target))
    assert len(listening) == 1
    assert listening[0][0] == server.process.pid


def gauge(server, name):
    """A value of /metrics, by its name and labels as they are written there."""
    [line] = [line for line in get(server, "/metrics").splitlines() if line.startswith(name + " ")]
    return float(line.rpartition(" ")[2])


@contextlib.contextmanager
def endless(server, number=1):
    """A request of the first key, the only one or the second or third, that does not end within the block."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=HANG_S)
    body = json.dumps({"prompt": "The sea", "max_tokens": 3900, "ignore_eos": True, "stream": True})
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEYS[0]}"}
    connection.request("POST", "/v1/completions", body, headers)
    wait_for(lambda: gauge(server, ACTIVE) == number and gauge(server, RUNNING) == 1, "the request to run")
    try:
        yield
    finally:
        connection.close()
        wait_for(lambda: gauge(server, ACTIVE) < number, "the request to be gone")


def test_a_key_may_have_so_many_requests_at_once_and_others_go_on(server):
    with endless(server, 1), endless(server, 2), endless(server, 3):  # one runs, and two may wait
        status, headers, body = ask(server)
        assert status == 429
        assert int(headers["Retry-After"]) >= 1
        assert json.loads(body)["error"]["code"] == "rate_limit_exceeded"
        assert ask(server, "/tokenize", prompt="a")[0] != 429
        assert ask(server, key=KEYS[1], max_tokens=1)[0] == 503
    assert ask(server)[0] == 200


def test_too_many_requests_are_refused_at_once_and_the_rest_is_served(server):
    served = []
    threads = [threading.Thread(target=lambda: served.append(ask(server)[0])) for _ in range(2)]

    def num_waiting():
        return gauge(server, "kvq_requests_waiting")

    with endless(server):
        for count, thread in enumerate(threads, 1):
            thread.start()
            wait_for(lambda count=count: num_waiting() == count, "a request that waits")
        for _ in range(2):
            status, headers, body = ask(server, key=KEYS[1])
            assert status == 503
            assert int(headers["Retry-After"]) >= 1
            assert "overloaded" in json.loads(body)["error"]["message"]
    for thread in threads:
        thread.join()
    assert served == [200, 200]
    assert gauge(server, 'kvq_requests_total{status="refused"}') >= 2


def test_the_deep_check_generates(server):
    first = json.loads(get(server, "/health/deep"))
    assert first["status"] == "generating"
    assert json.loads(get(server, "/health/deep")) == first, "asked again at once it tells the same"
    assert json.loads(get(server, "/health/ready")) == {"status": "ready"}


def test_logs_are_lines_of_json_and_never_quote_what_people_wrote(server):
    messages = [{"role": "user", "content": CANARY}]
    tools = [{"type": "function", "function": {"name": "f", "description": CANARY}}]
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": CANARY}}}
    for path, body in (
        ("/v1/completions", {"prompt": CANARY}),
        ("/v1/completions", {"prompt": CANARY, "stream": True, "echo": True}),
        ("/v1/completions", {"prompt": CANARY, "stop": CANARY, "guided_regex": CANARY + "("}),
        ("/v1/completions", {"prompt": CANARY, "n": CANARY}),
        ("/v1/completions", {"prompt": CANARY * 3000}),
        ("/v1/completions", {"prompt": CANARY, "model": CANARY}),
        ("/v1/completions", {"prompt": CANARY, "guided_grammar": CANARY}),
        ("/v1/chat/completions", {"messages": messages, "stream": True}),
        ("/v1/chat/completions", {"messages": messages, "response_format": schema}),
        ("/v1/chat/completions", {"messages": messages, "tools": tools}),
        ("/v1/chat/completions", {"messages": [{"role": CANARY, "content": {CANARY: 1}}]}),
        ("/v1/messages", {"messages": messages, "max_tokens": 3}),
        (f"/v1/{CANARY}?q={CANARY}", {"prompt": CANARY}),
    ):
        _, headers, _ = ask(server, path, **body)
        assert headers["x-request-id"].startswith("req-")
    wait_for(lambda: headers["x-request-id"] in server.log, "the last request in the log")
    log = server.log
    assert CANARY not in log
    assert not any(key in log for key in KEYS)
    events = [json.loads(line) for line in log.splitlines()]
    assert all({"time", "level", "event"} <= set(event) for event in events)
    answered = [event for event in events if event["event"] == "request"]
    assert {event["status"] for event in answered} >= {200, 400, 404}
    assert all("reason" in event for event in answered if event["status"] in (400, 404))
    assert not any("reason" in event for event in answered if event["status"] == 200)
    assert all("method" in event for event in answered)
    assert {event["route"] for event in answered} >= {"/v1/completions", "unknown"}
    probes = {event["route"] for event in answered if event["status"] == 200}
    assert not probes & {"/health", "/health/live", "/health/ready", "/health/deep", "/metrics"}
    end = next(i for i, event in enumerate(events) if event["event"].startswith("kvq serves mine on "))
    start = events[: end + 1]
    assert {event["level"] for event in start} == {"info"}
    assert "request" not in {event["event"] for event in start}, "nor probes, which were refused till then"
    # Of two processes: the engine's lines may come after the other's.
    told = [event["event"].partition(",")[0].partition(":")[0] for event in events]
    assert {"tool calls", "loading weights", "memory"} < set(told)
    [model] = [event for event in start if event["event"] == "model"]
    assert (model["served"], model["source"]) == ("mine", "tiny, the embedded model")
    assert re.fullmatch("[0-9a-f]{32}", model["digest"])
    served = [event for event in events if event["event"] == "generated"]
    assert 4 in {event["generated_tokens"] for event in served}
    assert {event["request_id"] for event in served} <= {event["request_id"] for event in answered}


def half_a_request(server):
    """A connection that has sent the head of a request, and some of its body."""
    sock = socket.create_connection(("127.0.0.1", server.port), HANG_S)
    sock.sendall(
        f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {KEYS[0]}\r\n"
        'Content-Type: application/json\r\nContent-Length: 100\r\n\r\n{"prompt": '.encode()
    )
    return sock


def test_the_end_does_not_wait_for_ever(server):
    """Last of all: the server ends in it."""
    answers = []
    body = {"max_tokens": 3900, "ignore_eos": True, "stream": True}
    fields = {f"field_{i}": {"type": "string", "minLength": i % 7} for i in range(2500)}
    schema = {"type": "object", "properties": fields}
    statuses = []  # of another key's bodies that wait to be read, and are wrong

    def read():
        statuses.append(ask(server, key=KEYS[1], guided_json=schema, max_tokens="4")[0])

    readings = [threading.Thread(target=read) for _ in range(40)]
    for reading in readings:
        reading.start()
    wait_for(lambda: statuses, "the first of many bodies to be answered")
    thread = threading.Thread(target=lambda: answers.append(ask(server, **body)))
    thread.start()
    wait_for(lambda: gauge(server, RUNNING), "the request to run")
    asking = half_a_request(server)  # as late as can be: a body has half a minute to arrive
    assert gauge(server, RUNNING), "answered after the half was accepted"
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(HANG_S) == 0
    for one in (thread, *readings):
        one.join()
    assert len(statuses) == len(readings), "each had an answer"
    assert set(statuses) == {400, 503}
    assert json.loads(server.log.splitlines()[-1])["event"] == "ended"
    assert '"level": "error"' not in server.log
    with asking:
        told = asking.recv(1 << 16)
    assert told.startswith(b"HTTP/1.1 503 ")
    assert b"shutting down" in told
    [(status, _, raw)] = answers
    assert status == 200
    last = json.loads(raw.decode().strip().split("\n\n")[-1].removeprefix("data: "))
    assert "shutting down" in last["error"]["message"]


@pytest.fixture
def check(capsys):
    def run(*options):
        with pytest.raises(SystemExit) as ended:
            main(["serve", "--check", "--port", "0", *options])
        said = capsys.readouterr()
        return ended.value.code or 0, said.out + said.err

    return run


@pytest.fixture
def untried(monkeypatch):
    """A function from which on no check starts a process to try a template in: test_check.py has those."""
    return lambda: monkeypatch.setattr("kvq.server.check._template", lambda *_: ())


def test_a_configuration_is_checked_before_anything_is_loaded(check, untried):
    status, said = check("--kv", "int4")
    assert status == 0
    assert not re.search("warning|error", said)
    untried()
    status, said = check("--kv", "int4", "--num-blocks", "4")
    assert status == 0
    assert "the pool holds 128 tokens, the context is 4096" in said
    status, said = check("--max-num-batched-tokens", "100", "--max-num-seqs", "90")
    assert "a step has 10 tokens left for new prompts" in said
    status, said = check("--kv-memory", "100TiB")
    assert status == 0, "it takes no more than could be used"
    assert "128 sequences can use no more of --kv-memory" in said
    status, said = check("--max-model-len", "99999")
    assert "a context of 99999 tokens was asked for; this model takes 1 to 4096" in said
    status, said = check("--model", "/nowhere")
    assert status == 2
    assert "/nowhere" in said


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max-num-sqs: 3", "did you mean 'max-num-seqs'"),
        ("- a", "must map options to values"),
        ("a: [", "is no YAML"),
        ("kv: {a: 1}", "kv is a text; put it in quotes, got a mapping"),
        ("max-queue: 0", "max-queue: 0 is not in the range x>=1"),
        ("max-queue: many", "max-queue"),
        ("max-queued-tokens: 0", "max-queued-tokens: 0 is not in the range x>=1"),
        ("max-wait: 0", "max-wait: 0.0 is not in the range x>0"),
        ("max-kv-pressure: 0", "max-kv-pressure: 0.0 is not in the range 0<x<=1"),
        ("max-kv-pressure: 1.1", "max-kv-pressure: 1.1 is not in the range 0<x<=1"),
        ("max-restarts: -1", "max-restarts: -1 is not in the range x>=0"),
        ("grace: -1", "grace: -1.0 is not in the range x>=0"),
        ("grace: .inf", "grace: numbers must be finite"),
        ("requests-per-minute: 0", "requests-per-minute: 0 is not in the range x>=1"),
        ("tokens-per-minute: 0", "tokens-per-minute: 0 is not in the range x>=1"),
        ("port: abc", "c.yaml: port is a whole number in plain digits, got 'abc'"),
        ("allow-origin: https://a.org/path", "is no origin"),
        ("host: 0.0.0.0", "--api-key-file"),
        ("ssl-certfile: a.pem", "can't read a.pem"),
        (f"ssl-certfile: {__file__}\nssl-keyfile: {__file__}", "no PEM certificate"),
        ("kv-memory: lots", "kv-memory: it must be a size such as '2GiB' or a number of bytes, got 'lots'"),
        ("num-blocks: 0", "num-blocks: 0 is not in the range"),
        ("gpu-memory-utilization: 2", "gpu-memory-utilization: 2.0 is not in the range"),
        ("metrics-names: vlm", "did you mean"),
        ("max-concurrency-per-key: 0", "not in the range x>=1"),
        ("request-timeout: -3", "request-timeout: -3.0 is not in the range x>=0"),
    ],
)
def test_configurations_that_are_wrong_say_why(check, tmp_path, text, message):
    path = tmp_path / "c.yaml"
    path.write_text(text)
    status, said = check("--config", str(path))
    assert status == 2
    assert message in said


@pytest.mark.parametrize("is_one_file", [True, False])
def test_a_key_that_others_can_read_is_refused_at_the_check_and_at_the_start(
    check, untried, capsys, tmp_path, is_one_file
):
    """In a file of its own, and in the certificate's."""
    untried()
    issued = trustme.CA().issue_cert("localhost")
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    issued.private_key_and_cert_chain_pem.write_to_path(str(key))
    issued.cert_chain_pems[0].write_to_path(str(certificate))
    options = ["--ssl-certfile", str(key)]
    if not is_one_file:
        options = ["--ssl-certfile", str(certificate), "--ssl-keyfile", str(key)]
    key.chmod(0o640)
    refusal = f"{key} can be read by others; run chmod 600 {key}"
    status, said = check(*options)
    assert (status, refusal in said) == (2, True), said
    with pytest.raises(SystemExit) as stop:
        main(["serve", *options])
    assert stop.value.code == 2
    assert refusal in capsys.readouterr().err
    key.chmod(0o600)
    status, said = check("--port", "0", *options)
    assert status == 0, said
