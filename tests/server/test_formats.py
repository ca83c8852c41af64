"""A server with several KV formats: requests, keys and the guard choose among them."""

import json
import socket
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from time import perf_counter

import pytest

from kvq import LLM, SamplingParams
from kvq.engine.build import build
from kvq.engine.config import EngineConfig
from kvq.engine.requests.request_options import RequestOptions
from kvq.errors import ConfigError, RequestError
from kvq.server.admission.config import ServerConfig
from kvq.server.check import check_config
from kvq.server.engine.formats import make_cores, other_recipes
from kvq.server.engine.frames import from_engine, read
from kvq.server.engine.memory import Memory
from kvq.server.engine.messages import Gauges, Hint, Start, Stepped, Submit, pack
from kvq.server.engine.remote import Remote
from kvq.server.engine.worker import _Worker
from tests.commands.conftest import kvq  # noqa: F401
from tests.server.kit import Server
from tests.waiting import HANG_S, wait_for

SNAPSHOT = {
    **dict.fromkeys(("running", "waiting", "preempted", "queued_tokens"), 0),
    **dict.fromkeys(("preemptions", "prompt_tokens", "cached_tokens"), 0),
    "pools": [],
}
TEXT = "A long story about the sea, a ship and the people on it, who wait for the wind. " * 6
SERVED = ("int2", "int3", "int8")
MANY = ("--kv", "int2", "--kv-also", "int3,int8", "--kv-also-share", "0.3", "--num-blocks", "200")


def post(server, path, body, key="none"):
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    request = urllib.request.Request(server.url + path, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=HANG_S) as answer:
        return json.loads(answer.read())


def metrics(server, key="none"):
    request = urllib.request.Request(server.url + "/metrics", headers={"Authorization": f"Bearer {key}"})
    with urllib.request.urlopen(request, timeout=HANG_S) as answer:
        return dict(line.rsplit(" ", 1) for line in answer.read().decode().splitlines())


@pytest.fixture(scope="module")
def alone():
    """What an engine of each format alone writes."""
    found = {}
    for kv in SERVED:
        with LLM("tiny", kv=kv, num_blocks=64, accept_divergence=True) as llm:
            found[kv] = llm.generate([TEXT], SamplingParams(max_tokens=48))[0].outputs[0].text
    assert len(set(found.values())) == 3
    return found


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A server whose second key has a format of its own, beside a guard."""
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text("first-key\nsecond-key kv_format=int8\n")
    keys.chmod(0o600)
    more = ("--api-key-file", str(keys), "--accept-divergence", "--guard", "1", "--guard-fallback", "int8")
    with Server(*MANY, *more, key="first-key") as server:
        yield server, keys


BODIES = {
    "/v1/completions": {"model": "tiny", "prompt": TEXT, "max_tokens": 48, "temperature": 0},
    "/api/generate": {"model": "tiny", "prompt": TEXT, "raw": True, "stream": False}
    | {"options": {"num_predict": 48, "temperature": 0}},
}
TEXTS = {
    "/v1/completions": lambda body: body["choices"][0]["text"],
    "/api/generate": lambda body: body["response"],
}


def test_requests_at_the_same_time_get_what_their_formats_write_alone(served, alone):
    server, _ = served
    asked = [(path, kv) for kv in (None, *SERVED) for path in BODIES] * 3

    def ask(case):
        path, kv = case
        body = BODIES[path] | ({} if kv is None else {"kv_format": kv})
        return TEXTS[path](post(server, path, body, "first-key"))

    with ThreadPoolExecutor(8) as threads:
        for (_, kv), text in zip(asked, threads.map(ask, asked), strict=True):
            assert text == alone[kv or "int2"]
    wait_for(lambda: all(f"kv_format={kv}" in server.log for kv in ("int2", *SERVED)), lambda: server.log)
    found = metrics(server, "first-key")
    assert float(found['kvq_format{kv_format="int3",what="requests"}']) >= 6
    blocks = [float(found[f'kvq_format{{kv_format="{kv}",what="blocks"}}']) for kv in SERVED]
    assert blocks[0] == 80  # 0.4 of 200
    assert blocks[1:] == [60, 60]


def test_a_key_has_a_format_of_its_own_and_gets_another_after_a_change(served, alone):
    server, keys = served
    path, body = "/v1/completions", BODIES["/v1/completions"]
    assert TEXTS[path](post(server, path, body, "second-key")) == alone["int8"]
    assert TEXTS[path](post(server, path, body | {"kv_format": "int3"}, "second-key")) == alone["int3"]
    keys.write_text("first-key\nsecond-key kv_format=int9\n")
    server.process.send_signal(1)
    wait_for(lambda: "kv_format must be one of" in server.log, lambda: server.log)
    assert TEXTS[path](post(server, path, body, "second-key")) == alone["int8"], "all stays as it was"
    keys.write_text("first-key\nsecond-key kv_format=int3\n")
    server.process.send_signal(1)
    wait_for(lambda: "reread" in server.log, lambda: server.log)
    assert TEXTS[path](post(server, path, body, "second-key")) == alone["int3"]


CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        *BODIES.items(),
        ("/v1/chat/completions", CHAT),
        ("/v1/messages", CHAT),
        ("/api/chat", {key: CHAT[key] for key in ("model", "messages")}),
    ],
)
def test_other_formats_are_refused_with_those_that_are_served(served, path, body):
    server, _ = served
    with pytest.raises(urllib.error.HTTPError, match="400") as refused:
        post(server, path, body | {"kv_format": "int5"}, "first-key")
    words = refused.value.read().decode()
    assert "kv_format must be one of int2, int3, int8, got 'int5'" in words


def test_kvq_guard_tells_what_was_found(served, kvq):  # noqa: F811
    server, _ = served

    def asked():
        return json.loads(kvq("guard", server.url, "--api-key", "first-key", "--json")[1])

    post(server, "/v1/completions", BODIES["/v1/completions"], "first-key")
    wait_for(lambda: asked()["requests"] > 0, lambda: server.log, every_s=0.3)
    found = asked()
    assert found["kv"] == "int2"
    assert found["alerts"] == found["earlier"] == 0
    assert not found["has_fallen_back"]
    assert 0 < found["same"] <= found["tokens"]
    assert list(found["kl_by_tenant"]) == ["key 1"], "other keys' are not told"
    code, told, _ = kvq("guard", server.url, "--api-key", "first-key")
    assert code == 0
    for words in ("computed again without quantized KV", "int8: ", "no alerts"):
        assert words in told


def test_kvq_guard_says_what_is_missing(kvq):  # noqa: F811
    with Server("--num-blocks", "32") as server:
        code, _, words = kvq("guard", server.url)
        assert code == 2
        assert "has no guard; start it with --guard 0.01" in words
        with pytest.raises(urllib.error.HTTPError, match="400") as refused:
            post(server, "/v1/completions", BODIES["/v1/completions"] | {"kv_format": "int8"})
        assert "its operator can allow more with --kv-also" in refused.value.read().decode()
    assert "can't be reached" in kvq("guard", server.url)[2]


def submit(worker, core, number, kv=None, tokens=range(5, 165)):
    options = RequestOptions(params=SamplingParams(max_tokens=8, ignore_eos=True), kv_format=kv)
    worker._do(core, Submit(number=number, prompt=pack([*tokens]), options=options), perf_counter())


def test_after_an_alert_new_requests_get_the_safer_format(caplog):
    model, config = build("tiny", "int4", {"num_blocks": 100, "guard": 1.0})
    start = Start(folder="", kv="int4", options={}, kv_also=("int8",), kv_also_share=0.25)
    cores = make_cores(model, config, start)
    core, safer = cores.values()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        worker = _Worker(theirs)
        worker._cores, worker._safer = cores, "int8"
        submit(worker, core, 1)
        submit(worker, core, 2, "int8")
        assert (len(core.jobs), len(safer.jobs)) == (1, 1)
        worker._do(core, 2, 0.0)
        assert (len(core.jobs), len(safer.jobs)) == (1, 0), "it was cancelled where it ran"
        while core.has_work:
            core.step()
        core.runner.cache.stores[2].blocks.k.codes.zero_()  # as if a part of the memory were lost
        while core.upkeep.when_idle():
            pass
        assert worker._has_news(core)
        assert "new requests get KV in int8 from now on" in caplog.text
        submit(worker, core, 3)
        submit(worker, core, 4, "int4")
        assert (len(core.jobs), len(safer.jobs)) == (1, 1), "one was asked for in int4"
        submit(worker, core, 5, tokens=[7] * 2000)
        assert (len(core.jobs), len(safer.jobs)) == (2, 1), "what is too long for the other pool stays"
        submit(worker, core, 6, "int8", tokens=[7] * 2000)
        assert worker._ended[-1].kind == "request"
        worker._do(core, Hint(tenant="", session="unknown", action="demote"), 0.0)
        worker._tell(core, Memory(model.weights.device))
        assert not worker._has_news(core), "it is told"
        told = read(ours, from_engine)
    assert told.gauges.guard_fallback
    assert told.gauges.formats["int8"]["requests"] == 2  # one was refused
    for one in cores.values():
        one.close()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"kv_also": ("int8", "int8")}, "each once"),
        ({"kv_also": ("auto",)}, "besides auto"),
        ({"kv_also": ("int8", "int4"), "kv_also_share": 0.5}, "leaves nothing for auto"),
        ({"guard_fallback": "int8"}, "name it in --kv-also"),
        ({"kv_also": ("int8",), "guard_fallback": "int8"}, "give --guard 0.01"),
    ],
)
def test_what_does_not_fit_together_is_refused(given, words):
    with pytest.raises(ConfigError, match=words):
        ServerConfig(**given)


def test_an_engine_that_is_started_again_stays_with_the_safer_format():
    remote = Remote(Start(folder="", kv="int4", options={}, kv_also=("int8",), guard_fallback="int8"))
    for has_fallen_back in (0, 1, 0):
        gauges = Gauges(**SNAPSHOT, generated_tokens=0, guard_fallback=has_fallen_back)
        remote._take(Stepped(pieces=[], ended=[], gauges=gauges))
    assert remote._start.has_fallen_back


def test_two_names_of_one_format_are_refused():
    *_, last = check_config(ServerConfig(kv="int8", kv_also=("int8/int8",), port=0))
    assert last.is_error
    assert "the same format as int8" in str(last)


def test_tokens_kept_unquantized_make_another_format():
    model, _ = build("tiny", "int4", {"num_blocks": 16})
    given = model.prepared, model.recipe
    assert list(other_recipes(*given, ("int4+sinks=4", "int8"), None)) == ["int4+sinks=4", "int8"]


@pytest.mark.parametrize("share", [0, 1.5, float("nan"), "half"])
def test_a_share_is_one(share):
    with pytest.raises(ConfigError, match="kv_share"):
        EngineConfig(kv_share=share)


def test_check_sizes_the_pools_of_every_format():
    engine = {"num_blocks": 200, "accept_divergence": True}
    found = [
        str(one) for one in check_config(ServerConfig(kv="int4", kv_also=("int8",), port=0, engine=engine))
    ]
    [own] = [one for one in found if one.split(maxsplit=1)[1].startswith("context: ")]
    [other] = [one for one in found if "int8: context: " in one]
    assert "1 requests of 4096 tokens" in own
    assert "the pool holds 1280 tokens" in other


def test_check_looks_at_every_format():
    *_, last = check_config(ServerConfig(kv="int8", kv_also=("int7",), port=0))
    assert last.is_error
    assert "int7" in str(last)


@pytest.mark.parametrize(("kv", "more"), [("fp32", {}), ("int8", {"kv_ladder": "int4"})])
def test_check_refuses_a_guard_that_the_engine_would_refuse(kv, more):
    *_, last = check_config(ServerConfig(kv=kv, port=0, engine={"guard": 0.01, **more}))
    assert last.is_error
    assert "guard (--guard)" in str(last)


def test_an_engine_has_one_format():
    with LLM("tiny", kv="int8", num_blocks=16) as llm:
        job = RequestOptions(kv_format="int8")
        with pytest.raises(RequestError, match="kv_format is for servers"):
            llm.core.intake.new_job([5, 6], job)
