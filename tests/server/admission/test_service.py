"""What the HTTP process does by itself when an engine takes its time."""

import asyncio
import http.client
import json
import socket
from types import SimpleNamespace

import pytest

from kvq.engine.requests.outputs import Piece
from kvq.models.describe.resolve import EMBEDDED
from kvq.scheduler import PoolShape, Reach, SchedulerConfig
from kvq.server.admission.config import ServerConfig
from kvq.server.app import create_app
from kvq.server.assembly import make_service
from kvq.server.engine.messages import Ended, Ready, Start
from kvq.server.engine.process import EngineProcess
from kvq.server.engine.remote import Remote, State
from kvq.server.health import _DeepCheck
from kvq.server.http.problems import Problem
from kvq.server.run import _HttpServer
from tests.waiting import HANG_S


def post(port, body):
    """Status and body of an answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=HANG_S)
    raw = json.dumps({"prompt": "The sea"} | body)
    connection.request("POST", "/v1/completions", raw, {"Content-Type": "application/json"})
    answer = connection.getresponse()
    return answer.status, answer.read().decode()


class Mute:
    """The writer to an engine that gives every request its first token, and then never says a word."""

    def __init__(self, remote, *, first):
        self.remote, self.first = remote, first

    def is_closing(self):
        return False

    def write(self, _):
        for number, stream in self.remote._streams.items():
            if self.first:
                stream.put(Piece(request_id=str(number), index=0, text="a", token_ids=[5]))

    async def drain(self):
        pass


@pytest.fixture
def ask(tiny):
    """Asks a server whose requests get 0.1 s and never end."""

    async def main(body):
        config = ServerConfig(timeout_s=0.1)
        remote = Remote(Start(folder="tiny", kv="int4", options={}))
        remote.info = Ready(
            model_digest="0" * 16,
            vocab_size=4096,
            block_bytes=[1],
            kv=["int4"],
            shape=PoolShape(num_blocks=[8], reaches=[Reach()], block_size=16),
            scheduler=SchedulerConfig(max_context=64),
        )
        remote.state = State.READY
        remote._process = EngineProcess(popen=None, reader=None, writer=Mute(remote, first="stream" in body))
        made = make_service(config, "tiny", EMBEDDED["tiny"], remote, tiny.tokenizer)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            server = _HttpServer(create_app(made))
            serving = asyncio.create_task(server.serve(sockets=[listener]))
            answer = await asyncio.to_thread(post, listener.getsockname()[1], body)
            server.should_exit = True
            await serving
            made.prompts.close()
        return answer

    return lambda **body: asyncio.run(main(body))


def test_requests_have_their_time(ask):
    status, body = ask()
    assert status == 504
    error = json.loads(body)["error"]
    assert error["code"] == "timeout"
    assert "did not end within 0.1 s" in error["message"]


def test_streams_have_their_time(ask):
    status, body = ask(stream=True)
    assert status == 200
    last = body.strip().split("\n\n")[-1]
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "timeout"


def test_the_deep_check_is_not_done_again_within_five_seconds():
    clock, generated = SimpleNamespace(seconds=1000.0), []

    async def stream(*_, **__):
        generated.append(clock.seconds)
        clock.seconds += 0.5
        yield Ended(number=1)

    async def tokenize(text, tenant):
        return [5]

    broken = None

    async def probe():
        return broken

    service = SimpleNamespace(
        check_ready=lambda: None,
        remote=SimpleNamespace(info=None, stream=stream),
        prompts=SimpleNamespace(tokenize=tokenize, probe=probe),
    )

    async def check_thrice():
        check = _DeepCheck(service, clock=lambda: clock.seconds)
        assert await asyncio.gather(check.run(), check.run()) == [0.5, 0.5]
        clock.seconds = 1004.9
        assert await check.run() == 0.5
        clock.seconds = 1005.1
        assert await check.run() == 0.5
        nonlocal broken
        clock.seconds, broken = 1020.0, "the model's chat template is broken"
        with pytest.raises(Problem, match="template is broken"):  # a chat is read, too
            await check.run()

    asyncio.run(check_thrice())
    assert generated == [1000.0, 1005.1]
