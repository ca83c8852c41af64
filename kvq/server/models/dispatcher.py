"""Dispatcher: gives every request to the application of the model that its body names."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from kvq.server.admission.transcript import transcript
from kvq.server.app import READING, check_arrival
from kvq.server.http.guard import VERSION
from kvq.server.http.loop_budget import LoopBudget
from kvq.server.http.problems import RESPONSES_PATH, Problem, unavailable
from kvq.server.http.strict_json import DECODED, check_type, read_json
from kvq.server.models.hosted import Hosted
from kvq.server.models.inner import ask
from kvq.server.models.rollouts import LiveRollout, Rollouts
from kvq.server.models.shadow import Shadows
from kvq.server.models.versions import session_key
from kvq.server.openai.respond import while_connected

_HINT_PATH = "/v1/kv/hint"  # about a session of any models
_LATEST = ":latest"  # Ollama's clients add it to names


@dataclass(eq=False)
class Dispatcher:  # D425: decoded once, in front of the applications as they are
    """ASGI application over those of several models; a guard in front of it has admitted the request.

    A body is decoded here, within the limits of every body, and passed on decoded. Requests that name no
    model and need none go to the first model's application, whose routes are the same as those of others.
    """

    models: Mapping[str, Hosted]
    rollouts: Rollouts
    shadows: Shadows
    loop_budget: LoopBudget

    def __post_init__(self) -> None:
        self._first = next(iter(self.models.values()))
        routes = [route for route in self._first.app.routes if isinstance(route, Route)]
        self._posts = {route.path for route in routes if "POST" in (route.methods or ())}

    @property
    def names(self) -> list[str]:
        """Names that requests may give: those of roll-outs, and of each service as it has them now."""
        return [
            *self.rollouts.by_name,
            *(name for one in self.models.values() for name in one.service.models),
        ]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        if path.startswith(f"{RESPONSES_PATH}/"):
            owner = await self._owner(path.removeprefix(f"{RESPONSES_PATH}/"), scope, self.models)
            await (owner or self._first).app(scope, receive, send)
        elif scope["method"] == "POST" and path in self._posts:
            check_type(Headers(scope=scope))
            message = await receive()
            scope[DECODED] = await read_json(message.get("body", b""), self.loop_budget, scope["kvq_tenant"])
            await self._post(scope, message, receive, send)
        else:
            await self._first.app(scope, receive, send)

    async def _post(self, scope: Scope, message: Message, receive: Receive, send: Send) -> None:
        """Pass on a request with a decoded body. Raise Problem if it names no model that is here."""
        given, body = [message], scope[DECODED]

        async def again() -> Message:
            return given.pop() if given else await receive()

        name = body.get("model") if isinstance(body, dict) else 0
        if scope["path"] == _HINT_PATH:
            last, *others = [one for one in self.models.values() if one.has_engine] or [self._first]
            for one in others:
                await ask(one.app, scope, {DECODED: dict(body) if isinstance(body, dict) else body})
            await last.app(scope, again, send)
            return
        if not isinstance(name, str | None):
            await self._first.app(scope, again, send)  # which tells what is wrong with the body
            return
        hosted, live = await self._find(name, scope)
        on_answered: Callable[[], object] = lambda: None  # noqa: E731
        if hosted.is_stopped:
            raise unavailable(f"{hosted.entry.name} was stopped by its operator", retry_after_s=30)
        with hosted.using():
            if scope["path"] not in READING:
                if hosted.is_to_start and not await while_connected(receive, hosted.wait_for_engine()):
                    await Response(status_code=499)(scope, receive, send)  # the client has disconnected
                    return
                check_arrival(hosted.service, scope["path"], scope["kvq_tenant"])
                if live is not None:
                    on_answered = await self._copy(live, scope, message)
            try:
                await hosted.app(scope, again, send)
            finally:
                on_answered()

    async def _find(self, name: str | None, scope: Scope) -> tuple[Hosted, LiveRollout | None]:
        """Return the model for a name, and the roll-out if the name is one, whose version is noted."""
        names = () if name is None else (name, name.removesuffix(_LATEST))
        body, tenant = scope[DECODED], scope["kvq_tenant"]
        for live in filter(None, map(self.rollouts.by_name.get, names)):
            owner, previous = None, body.get("previous_response_id")
            if isinstance(previous, str):
                owner = await self._owner(previous, scope, {one: self.models[one] for one in live.weights})
            if owner is None or owner.is_stopped:
                owner = self.models[live.choose(session_key(tenant, dict(scope["headers"]), body))]
            version = scope[VERSION] = owner.entry.name
            body["model"] = owner.service.name
            self.rollouts.requests.labels(live.name, version).inc()
            return owner, live
        for called in names:
            for hosted in self.models.values():
                if called in hosted.service.models:
                    return hosted, None
        known = f"this server has {', '.join(map(repr, self.names))}"
        if name is None:
            raise Problem(400, f"the request names no model; {known}", param="model")
        raise Problem(404, f"no model {name!r:.99} here; {known}", code="model_not_found", param="model")

    async def _copy(self, live: LiveRollout, scope: Scope, message: Message) -> Callable[[], object]:
        """Copy a request to the shadow version if it is drawn; return a function to call once it ends."""
        shadow = live.rollout.shadow
        if shadow is None or shadow.model == scope[VERSION]:
            return lambda: None
        if (shown := self.shadows.draw(shadow.share)) is None:
            return lambda: None
        body: dict[str, Any] = await read_json(message["body"], self.loop_budget, scope["kvq_tenant"])
        transcript.set(shown)
        return self.shadows.copy(live.name, shown, self.models[shadow.model], scope, body)

    async def _owner(self, response_id: str, scope: Scope, models: Mapping[str, Hosted]) -> Hosted | None:
        """Return the model among `models` that keeps a response of the Responses API."""
        for hosted in models.values():
            found = {"method": "GET", "path": f"{RESPONSES_PATH}/{response_id}"}
            status, _ = await ask(hosted.app, scope, found)
            if status == 200:
                return hosted
        return None
