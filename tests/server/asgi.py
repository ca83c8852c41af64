"""Requests to an application in this process, for what needs no engine."""

import asyncio
import json

from prometheus_client.parser import text_string_to_metric_families

from kvq.models.describe.resolve import resolve_model
from kvq.models.loading.tokenizer import load_tokenizer
from kvq.server.admission.config import ServerConfig
from kvq.server.admission.prompts import Prompts
from kvq.server.admission.rate_limits import TenantLimits
from kvq.server.admission.service import Service
from kvq.server.app import create_app
from kvq.server.engine.messages import Start
from kvq.server.engine.remote import Remote
from kvq.server.http.guard import Access
from kvq.server.reading import Readers, Setup


def tinys_prompts():
    """With the embedded model's tokenizer."""
    folder = resolve_model("tiny").folder
    return Prompts(Readers(Setup(folder=str(folder))), load_tokenizer(folder))


def service(*, is_strict=False, limits=None, prompts=None):
    """With the embedded model's tokenizer, or `prompts` of others, and an engine that is never started."""
    remote = Remote(Start(folder="tiny", kv="int4", options={}))
    prompts = prompts or tinys_prompts()
    config = ServerConfig(strict_requests=is_strict, tenants=limits or TenantLimits())
    return Service("tiny", remote, prompts, config)


class Client:
    """Asks the application over a service."""

    def __init__(self, service, access=None):
        self.service = service
        service.check_arrival = lambda tenant, **_: None  # an engine that is not there refuses nothing
        self.app = create_app(service, access or Access())

    def post(self, path, body, **headers):
        """(status, headers, body) of an answer; a body may be bytes."""
        return asyncio.run(self._post(path, body, headers))

    async def exchange(self, path, body, headers, method="POST", query=""):
        """(status, headers, bytes) of an answer to a client that stays until its end."""
        sent, given = [], [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]
        is_over = asyncio.Event()

        async def receive():
            if not given:
                await is_over.wait()
                return {"type": "http.disconnect"}
            return given.pop()

        async def send(message):
            sent.append(message)

        named = {"host": "127.0.0.1", "content-type": "application/json", **headers}
        scope = {"type": "http", "method": method, "path": path, "query_string": query.encode()}
        scope["root_path"] = ""
        scope["headers"] = [(name.encode(), value.encode()) for name, value in named.items()]
        await self.app(scope, receive, send)
        is_over.set()
        head, *rest = sent
        found = {name.decode(): value.decode("latin-1") for name, value in head["headers"]}
        return head["status"], found, b"".join(message.get("body", b"") for message in rest)

    def metrics(self):
        """What Prometheus would see, by name and values of labels."""

        async def read():
            return self.service.metrics.text().decode()

        families = text_string_to_metric_families(asyncio.run(read()))
        return {(s.name, *s.labels.values()): s.value for family in families for s in family.samples}

    async def _post(self, path, body, headers):
        sent = []
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        given = [{"type": "http.request", "body": raw, "more_body": False}]

        async def receive():
            return given.pop() if given else {"type": "http.disconnect"}

        async def send(message):
            sent.append(message)

        named = {"host": "127.0.0.1", "content-type": "application/json", **headers}
        scope = {"type": "http", "method": "POST", "path": path, "query_string": b"", "root_path": ""}
        scope["headers"] = [(name.encode(), value.encode()) for name, value in named.items()]
        await self.app(scope, receive, send)
        head, *rest = sent
        found = {name.decode(): value.decode("latin-1") for name, value in head["headers"]}
        return head["status"], found, json.loads(b"".join(message.get("body", b"") for message in rest))
