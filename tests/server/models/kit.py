"""Models without engines: their services are stand-ins, and their applications tell what they were given."""

import asyncio
import json
from types import SimpleNamespace

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

from kvq.errors import EngineError
from kvq.server.admission.config import ServerConfig
from kvq.server.engine.remote import State
from kvq.server.http.strict_json import DECODED
from kvq.server.models.config import HostedModel, ModelEntry
from kvq.server.models.hosted import Hosted


class Remote:
    """An engine that starts when `may_start` is set, or fails with `error`."""

    def __init__(self):
        self.state, self.info = State.STARTING, None
        self.may_start, self.error, self.num_starts = asyncio.Event(), None, 0

    async def start(self):
        self.state = State.STARTING
        await self.may_start.wait()
        if self.error is not None:
            self.state = State.FAILED
            raise self.error
        self.num_starts += 1
        self.state = State.READY

    async def stop(self):
        self.state = State.STOPPED


class Prompts:
    num_stops = 0

    async def start(self):
        pass

    def stop(self):
        self.num_stops += 1


def app_of(name):
    """An application whose answers have the name and the body that it got."""
    app = FastAPI()
    kept = set()

    async def answer(request: Request):
        body = request.scope[DECODED]
        if isinstance(body, dict) and body.get("store"):
            kept.add(body["store"])
        again = json.loads(await request.body() or b"{}")
        return JSONResponse({"by": name, "body": body, "raw": again})

    for path in ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/tokenize", "/v1/kv/hint"):
        app.add_api_route(path, answer, methods=["POST"])

    @app.get("/v1/responses/{key}")
    async def find(key: str):
        return JSONResponse({"by": name}, 200 if key in kept else 404)

    return app


def hosted(name="a", *, names=None, max_queue=1024, timeout_s=60.0, **entry):
    remote = Remote()
    metrics = SimpleNamespace(on_ending=None, on_ttft=None, alerts=0)
    metrics.total = lambda what: metrics.alerts
    service = SimpleNamespace(
        name=name,
        names=names or (name,),
        models=names or (name,),
        remote=remote,
        prompts=Prompts(),
        counting=Prompts(),
        metrics=metrics,
        is_draining=False,
        why_not_ready=None,
        check_arrival=lambda tenant, **_: None,
    )
    config = ServerConfig(timeout_s=timeout_s)
    object.__setattr__(config.admission, "max_queue", max_queue)
    given = HostedModel(entry=ModelEntry(name=name, **entry), config=config)
    return Hosted(given, None, service, app_of(name))


def failing(one, words="no memory"):
    """Let the next start of a model fail."""
    one.service.remote.error = EngineError(words)
    one.service.remote.may_start.set()
    return one
