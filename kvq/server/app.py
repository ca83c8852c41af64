"""The routes."""

import secrets
from time import time
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvq.server.bodies import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from kvq.server.chat import Chat
from kvq.server.completions import Completion
from kvq.server.metrics import CONTENT_TYPE
from kvq.server.problems import Problem, unavailable
from kvq.server.respond import respond, tenant
from kvq.server.service import Service, describe
from kvq.version import __version__

MAX_BODY = 8 << 20  # bytes
_OPEN = ("/health/live",)  # needs no key


def create_app(service: Service, *, api_keys: frozenset[str] = frozenset()) -> FastAPI:
    """The application over a service. With `api_keys` every route but `/health/live` needs one of them."""
    app = FastAPI(title="kvq", version=__version__, docs_url=None, redoc_url=None)
    created = int(time())

    @app.post("/v1/completions")
    async def completions(request: Request, body: CompletionBody) -> Response:
        return await respond(request, service, Completion(service, body, tenant(request)), stream=body.stream)

    @app.post("/v1/chat/completions")
    async def chat(request: Request, body: ChatBody) -> Response:
        return await respond(request, service, Chat(service, body, tenant(request)), stream=body.stream)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [describe(service, created)]}

    @app.get("/v1/models/{model:path}")
    async def model(model: str) -> dict[str, Any]:
        service.check_model(model)
        return describe(service, created)

    @app.post("/tokenize")
    async def tokenize(body: TokenizeBody) -> dict[str, Any]:
        service.check_model(body.model)
        if body.messages is not None:
            tokens = await service.prompts.chat(body.messages, add_generation_prompt=True)
        else:
            tokens = await service.prompts.tokenize(body.prompt or "", special=body.add_special_tokens)
        info = service.remote.info
        return {"tokens": tokens, "count": len(tokens), "max_model_len": info.max_context if info else None}

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeBody) -> dict[str, Any]:
        service.check_model(body.model)
        info = service.remote.info
        if info is not None and body.tokens and max(body.tokens) >= info.vocab_size:
            raise Problem(400, f"token ids go up to {info.vocab_size - 1}", param="tokens")
        return {"prompt": await service.prompts.detokenize(body.tokens)}

    @app.get("/health/live")
    async def live() -> dict[str, str]:
        return {"status": "live"}

    @app.get("/health")
    @app.get("/health/ready")
    async def ready() -> dict[str, str]:
        if (reason := service.why_not_ready) is not None:
            raise unavailable(reason)
        return {"status": "ready"}

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(service.metrics.text(), media_type=CONTENT_TYPE)

    _answer_problems(app)
    app.add_middleware(_Guard, api_keys=api_keys)
    return app


def _answer_problems(app: FastAPI) -> None:
    """Every failure becomes an OpenAI error object."""

    @app.exception_handler(Problem)
    async def problem(_: Request, error: Problem) -> JSONResponse:
        return _as_response(error)

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"] if part != "body")
        return _as_response(Problem(400, f"{where or 'body'}: {first['msg']}", param=where or None))

    @app.exception_handler(HTTPException)
    async def http(_: Request, error: HTTPException) -> JSONResponse:
        return _as_response(Problem(error.status_code, str(error.detail)))

    @app.exception_handler(Exception)
    async def unexpected(_: Request, error: Exception) -> JSONResponse:
        return _as_response(Problem(500, f"the server failed: {type(error).__name__}", type="server_error"))


def _as_response(problem: Problem) -> JSONResponse:
    return JSONResponse(problem.body(), problem.status, problem.headers())


class _Guard:
    """Keys and sizes, before anything reads a request."""

    def __init__(self, app: ASGIApp, *, api_keys: frozenset[str]) -> None:
        self._app = app
        self._keys = [key.encode() for key in sorted(api_keys)]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        try:
            scope["kvq_tenant"] = self._tenant(scope["path"], headers)
            if int(headers.get(b"content-length", b"0") or 0) > MAX_BODY:
                raise _too_large()
        except ValueError:
            await _as_response(Problem(400, "content-length is no number"))(scope, receive, send)
            return
        except Problem as problem:
            await _as_response(problem)(scope, receive, send)
            return
        seen = 0

        async def counted() -> Message:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > MAX_BODY:
                raise _too_large()
            return message

        await self._app(scope, counted, send)

    def _tenant(self, path: str, headers: dict[bytes, bytes]) -> str:
        """Who asks, by the number of the key."""
        if not self._keys or path in _OPEN:
            return ""
        given = headers.get(b"x-api-key") or headers.get(b"authorization", b"").removeprefix(b"Bearer ")
        found = [i for i, key in enumerate(self._keys) if secrets.compare_digest(given, key)]
        if not found:
            raise Problem(
                401, "this server needs an API key: Authorization: Bearer KEY", code="invalid_api_key"
            )
        return f"key-{found[0]}"


def _too_large() -> Problem:
    return Problem(413, f"a request may have {MAX_BODY} bytes", code="request_too_large")
