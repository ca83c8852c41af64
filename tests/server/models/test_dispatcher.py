"""Every request reaches the model that it names, whole, and a wrong one is told which models there are."""

import asyncio
import json

import prometheus_client
import pytest
from starlette.exceptions import HTTPException

from kvq.server.admission.config import ServerConfig
from kvq.server.http.guard import VERSION
from kvq.server.http.loop_budget import LoopBudget
from kvq.server.http.problems import Problem
from kvq.server.models.config import ModelsConfig, read_rollouts
from kvq.server.models.dispatcher import Dispatcher
from kvq.server.models.rollouts import Rollouts
from kvq.server.models.shadow import Shadows
from kvq.server.models.state import StateFile
from kvq.server.models.versions import session_key
from tests.server.models.kit import hosted
from tests.waiting import HANG_S

CHAT = {"versions": [{"model": "a", "weight": 1}, {"model": "b", "weight": 1}]}


class World:
    """Three models, two of which are versions of chat, behind a dispatcher."""

    def __init__(self, folder, **rollout):
        path = folder / "serve.yaml"
        self.models = {name: hosted(name, names=(name, f"{name}-alias")) for name in "abc"}
        for one in self.models.values():
            one.service.remote.may_start.set()
        rollouts = read_rollouts(path, {"chat": CHAT | rollout}, [*self.models])
        self.file = StateFile(path, rollouts)
        config = ModelsConfig(path=path, server=ServerConfig(), models=(), rollouts=rollouts)
        registry = prometheus_client.CollectorRegistry()
        self.rollouts = Rollouts(config, self.models, registry)
        self.shadows = Shadows(registry)
        self.dispatcher = Dispatcher(self.models, self.rollouts, self.shadows, LoopBudget())

    async def send(self, path, body=None, *, method="POST", headers=(), left=None):
        """(status, answer, scope). `left`: an event after which the client has left."""
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        given, sent = [{"type": "http.request", "body": raw, "more_body": False}], []
        named = [(b"content-type", b"application/json"), *headers]
        scope = {"type": "http", "method": method, "path": path, "query_string": b"", "headers": named}
        scope |= {"kvq_tenant": "", "root_path": "", "http_version": "1.1", "scheme": "http", "state": {}}

        async def receive():
            if given:
                return given.pop()
            await (left or asyncio.Event()).wait()
            return {"type": "http.disconnect"}

        async def send(message):
            sent.append(message)

        await self.dispatcher(scope, receive, send)
        answer = b"".join(message.get("body", b"") for message in sent)
        return sent[0]["status"], json.loads(answer) if answer else None, scope


@pytest.fixture
def run(tmp_path):
    """Runs a test's coroutine function with a world."""

    def run(test, **rollout):
        async def main():
            await test(World(tmp_path, **rollout))

        asyncio.run(main())

    return run


@pytest.mark.parametrize("name", ["a", "b", "c", "b-alias", "c:latest"])
def test_a_request_reaches_the_model_that_it_names_as_it_was_sent(run, name):
    async def test(world):
        body = {"model": name, "prompt": "x" * 70_000, "n": 1.0}
        status, answer, scope = await world.send("/v1/completions", body)
        assert (status, answer["by"], answer["body"], answer["raw"]) == (200, name[0], body, body)
        assert VERSION not in scope
        assert scope["route"].path == "/v1/completions"  # for the log

    run(test)


def test_names_that_a_service_gets_later_are_found(run):
    async def test(world):
        world.models["c"].service.models = ("c", "adapter")
        assert (await world.send("/v1/completions", {"model": "adapter"}))[1]["by"] == "c"

    run(test)


@pytest.mark.parametrize(
    ("body", "status", "words"), [({"model": "d"}, 404, "no model 'd'"), ({}, 400, "names no model")]
)
def test_an_unknown_model_is_told_the_names(run, body, status, words):
    async def test(world):
        with pytest.raises(Problem, match=words) as found:
            await world.send("/v1/completions", body)
        assert found.value.status == status
        assert all(repr(name) in found.value.message for name in ("chat", "a", "b", "c", "a-alias"))

    run(test)


@pytest.mark.parametrize("body", [b"{", b'{"model": "a", "model": "b"}', b"\xff", b"", b'{"x": NaN}'])
def test_a_body_that_is_no_strict_json_is_refused_here(run, body):
    async def test(world):
        with pytest.raises(HTTPException) as found:
            await world.send("/v1/completions", body)
        assert found.value.status_code == 400

    run(test)


@pytest.mark.parametrize("body", [[1], 3, "a", None, {"model": 3}, {"model": ["a"]}])
def test_an_odd_body_goes_to_an_application_that_tells_why(run, body):
    async def test(world):
        status, answer, _ = await world.send("/v1/completions", body)
        assert (status, answer["by"], answer["body"]) == (200, "a", body)

    run(test)


def test_versions_are_chosen_by_session_and_named_to_the_guard(run):
    async def test(world):
        weights = {"a": 1.0, "b": 1.0}
        for i in range(40):
            headers = [(b"x-session-id", f"s{i}".encode())]
            status, answer, scope = await world.send("/v1/completions", {"model": "chat"}, headers=headers)
            key = session_key("", dict(headers), {})
            assert answer["by"] == scope[VERSION] == world.rollouts.by_name["chat"].choose(key)
            assert answer["body"]["model"] == answer["by"]
            assert status == 200
        assert world.rollouts.by_name["chat"].weights == weights

    run(test)


def test_a_stopped_version_gets_nothing_by_any_name(run):
    async def test(world):
        world.file.stop("b", "me", "")
        world.rollouts._apply()
        found = {
            (await world.send("/v1/completions", {"model": "chat", "user": str(i)}))[1]["by"]
            for i in range(20)
        }
        assert found == {"a"}
        with pytest.raises(Problem, match="stopped by its operator") as refusal:
            await world.send("/v1/completions", {"model": "b"})
        assert refusal.value.status == 503
        world.file.stop("a", "me", "")
        world.rollouts._apply()
        with pytest.raises(Problem, match="weight 0"):
            await world.send("/v1/completions", {"model": "chat"})

    run(test)


def test_a_lazy_model_starts_for_a_generation_and_not_for_its_tokenizer(run):
    async def test(world):
        await world.send("/tokenize", {"model": "c", "prompt": "x"})
        assert world.models["c"].service.remote.num_starts == 0
        await world.send("/v1/completions", {"model": "c"})
        assert world.models["c"].service.remote.num_starts == 1
        assert world.models["a"].service.remote.num_starts == 0

    run(test)


def test_a_client_that_leaves_while_it_waits_for_a_start_gets_no_engine(run):
    async def test(world):
        world.models["c"].service.remote.may_start.clear()
        left = asyncio.Event()
        sending = asyncio.create_task(world.send("/v1/completions", {"model": "c"}, left=left))
        await asyncio.sleep(0.01)
        assert world.models["c"].num_requests == 1
        left.set()
        assert (await sending)[0] == 499
        assert world.models["c"].num_requests == 0

    run(test)


def test_a_stored_response_is_found_where_it_was_made_and_continued_there(run):
    async def test(world):
        await world.send("/v1/responses", {"model": "b", "store": "resp_1"})
        status, answer, _ = await world.send("/v1/responses/resp_1", method="GET")
        assert (status, answer["by"]) == (200, "b")
        for i in range(20):
            body = {"model": "chat", "user": str(i), "previous_response_id": "resp_1"}
            assert (await world.send("/v1/responses", body))[1]["by"] == "b"
        assert (await world.send("/v1/responses/resp_2", method="GET"))[0] == 404

    run(test)


def test_a_hint_about_a_session_reaches_all_engines(run):
    async def test(world):
        seen = []
        for name, one in world.models.items():
            await one.wait_for_engine()
            one.app.add_middleware(_Seen, name=name, seen=seen)
        await world.send("/v1/kv/hint", {"session_id": "s", "action": "pin"})
        assert sorted(seen) == ["a", "b", "c"]

    run(test)


class _Seen:
    def __init__(self, app, name, seen):
        self.app, self.name, self.seen = app, name, seen

    async def __call__(self, scope, receive, send):
        if scope["type"] == "http":
            self.seen.append(self.name)
        await self.app(scope, receive, send)


def test_the_share_of_a_shadow_is_copied_with_its_own_body_and_tenant(run):
    async def test(world):
        seen = []
        world.models["c"].app.add_middleware(_Bodies, seen=seen)
        for i in range(10):
            body = {"model": "chat", "user": str(i), "stream": True, "stream_options": {}}
            assert (await world.send("/v1/completions", body))[1]["by"] in "ab"
            await asyncio.gather(*world.shadows._tasks)
        assert [body["user"] for body, _ in seen] == [str(i) for i in range(10)]
        assert all(body["model"] == "c" and body["stream"] is False for body, _ in seen)
        assert {tenant for _, tenant in seen} == {"shadow"}
        assert not any("stream_options" in body for body, _ in seen)

    run(test, shadow={"model": "c", "share": 1})


class _Bodies:
    def __init__(self, app, seen):
        self.app, self.seen = app, seen

    async def __call__(self, scope, receive, send):
        if scope["type"] == "http":
            self.seen.append((dict(scope["kvq_decoded"]), scope["kvq_tenant"]))
            assert (b"x-kvq-overflow", b"1") in scope["headers"], "a copy would leave this machine"
        await self.app(scope, receive, send)


def test_a_version_past_a_limit_loses_its_weight_and_the_file_tells_why(run):
    async def test(world):
        ended = world.models["b"].service.metrics.on_ending
        for _ in range(20):
            ended("error")
        watching = asyncio.create_task(world.rollouts.watch())
        async with asyncio.timeout(HANG_S):
            while not world.file.path.exists():
                await asyncio.sleep(0.01)
        watching.cancel()
        assert world.rollouts.by_name["chat"].weights == {"a": 1, "b": 0}
        [line] = map(json.loads, world.file.audit.read_text().splitlines())
        assert (line["by"], line["to"]) == ("server", {"chat": {"a": 1, "b": 0}})
        assert "20 of 20 requests failed" in line["reason"]
        for _ in range(40):
            world.models["a"].service.metrics.on_ending("error")
        await world.rollouts._judge(world.rollouts.by_name["chat"])
        assert world.rollouts.by_name["chat"].weights == {"a": 1, "b": 0}  # the last one stays

    run(test, fall_back={"errors": 0.5})
