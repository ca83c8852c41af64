"""The routes."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from time import time
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route

from kvq.errors import RequestError, nearest
from kvq.server import health
from kvq.server.admission.bodies import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from kvq.server.admission.metrics import CONTENT_TYPE
from kvq.server.admission.prompts import Conversation, Prompts
from kvq.server.admission.service import Service, describe
from kvq.server.anthropic.bodies import MessagesBody, PromptBody
from kvq.server.anthropic.message import MessageCall
from kvq.server.anthropic.prompt import conversation
from kvq.server.http.body_errors import of_body
from kvq.server.http.credentials import Access, Credentials
from kvq.server.http.guard import REASON, Guard, as_response
from kvq.server.http.ignored import HEADER
from kvq.server.http.problems import MESSAGES_PATH, Problem
from kvq.server.http.strict_json import JsonRoute
from kvq.server.openai import answer_types
from kvq.server.openai.chat import Chat
from kvq.server.openai.completions import Completion
from kvq.server.openai.openapi import ONE_OR_STREAM, describe_routes
from kvq.server.openai.respond import admitted, note_fields, respond, tenant
from kvq.server.viewers import add_routes as add_page
from kvq.version import __version__

_SHOWN = 100  # characters of a path that nobody knows
_ALIKE = 0.8  # as /v1/completion and /v1/completions are, and /v1/responses and /v1/messages are not
_ASIDE = ("/tokenize", "/detokenize", f"{MESSAGES_PATH}/count_tokens")
_GENERATING = ("/v1/completions", "/v1/chat/completions", MESSAGES_PATH)


def create_app(
    service: Service, access: Access | None = None, credentials: Credentials | None = None
) -> FastAPI:
    """The application over a service. With API keys every route but `/health/live` needs one of them, of
    those of `credentials`, if given."""
    access = access or Access()
    app = FastAPI(
        title="kvq",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        strict_content_type=False,
    )
    app.router.route_class = JsonRoute
    app.state.turns = service.turns
    created = int(time())

    @app.post("/v1/completions", responses={200: ONE_OR_STREAM | {"model": answer_types.Completion}})
    async def completions(request: Request, body: CompletionBody) -> Response:
        await note_fields(request, service, body)
        return await respond(request, service, Completion(service, body, tenant(request)), stream=body.stream)

    @app.post("/v1/chat/completions", responses={200: ONE_OR_STREAM | {"model": answer_types.ChatCompletion}})
    async def chat(request: Request, body: ChatBody) -> Response:
        await note_fields(request, service, body)
        return await respond(request, service, Chat(service, body, tenant(request)), stream=body.stream)

    @app.get("/v1/models", responses={200: {"model": answer_types.Models}})
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [describe(service, created, name) for name in service.names]}

    @app.get("/v1/models/{model:path}", responses={200: {"model": answer_types.Model}})
    async def model(model: str) -> dict[str, Any]:
        service.check_model(model)
        return describe(service, created, model)

    @asynccontextmanager
    async def aside(
        request: Request, body: TokenizeBody | DetokenizeBody | PromptBody
    ) -> AsyncIterator[tuple[Prompts, str]]:
        """A request that the engine does not see: who reads its texts, and who asks."""
        await note_fields(request, service, body)
        service.check_model(body.model)
        with admitted(request, service.aside(tenant(request))):
            yield service.counting, tenant(request)

    @app.post("/tokenize", responses={200: {"model": answer_types.Tokens}})
    async def tokenize(request: Request, body: TokenizeBody) -> dict[str, Any]:
        async with aside(request, body) as (prompts, asks):
            if body.messages is not None:
                options = {"add_generation_prompt": body.add_generation_prompt}
                asked = Conversation(messages=body.messages, options=options)
                tokens = await prompts.chat(asked, tenant=asks)
            else:
                special = body.add_special_tokens
                tokens = await prompts.tokenize(body.prompt or "", special=special, tenant=asks)
        info = service.remote.info
        return {"tokens": tokens, "count": len(tokens), "max_model_len": info.max_context if info else None}

    @app.post("/detokenize", responses={200: {"model": answer_types.Prompt}})
    async def detokenize(request: Request, body: DetokenizeBody) -> dict[str, Any]:
        async with aside(request, body) as (prompts, asks):
            info = service.remote.info
            if info is not None and body.tokens and max(body.tokens) >= info.vocab_size:
                raise Problem(400, f"token ids go up to {info.vocab_size - 1}", param="tokens")
            return {"prompt": await prompts.detokenize(body.tokens, tenant=asks)}

    @app.post(MESSAGES_PATH, responses={200: ONE_OR_STREAM | {"model": answer_types.Message}})
    async def messages(request: Request, body: MessagesBody) -> Response:
        await note_fields(request, service, body)
        call = MessageCall(service, body, tenant(request))
        return await respond(request, service, call, stream=body.stream)

    @app.post(f"{MESSAGES_PATH}/count_tokens", responses={200: {"model": answer_types.InputTokens}})
    async def count_tokens(request: Request, body: PromptBody) -> dict[str, Any]:
        async with aside(request, body) as (prompts, asks):
            return {"input_tokens": len(await prompts.chat(conversation(body), tenant=asks))}

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        return Response(service.metrics.text(), media_type=CONTENT_TYPE)

    health.add_routes(app, service)
    add_page(app, service, has_keys=bool(access.api_keys))
    _answer_problems(app, service)
    describe_routes(app, has_keys=bool(access.api_keys), is_strict=service.is_strict)
    app.add_middleware(
        Guard,
        access=access,
        credentials=credentials,
        check=partial(_check_arrival, service),
        charge=service.admission.charge_refused,
        count=partial(_count, service),
    )
    if access.origins:  # around the guard, since browsers send no key when they ask whether they may
        app.add_middleware(
            CORSMiddleware,
            allow_origins=sorted(access.origins),
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after", HEADER],
        )
    return app


def _check_arrival(service: Service, path: str, tenant: str) -> None:
    if path in _GENERATING:
        service.check_arrival(tenant)
    elif path in _ASIDE:
        service.admission.check_aside(tenant)


def _count(service: Service, path: str, problem: Problem) -> None:
    """Count a request for text that ended in a problem, unless it is counted already."""
    if path in _GENERATING and problem.status != 405 and not problem.is_counted:
        service.metrics.count(problem.counted().ending)


def _answer_problems(app: FastAPI, service: Service) -> None:
    """Every failure becomes an error object of the protocol that is spoken there, and is counted once."""

    @app.exception_handler(Problem)
    async def problem(request: Request, error: Problem) -> JSONResponse:
        path = request.url.path
        _count(service, path, error)
        request.scope[REASON] = error.code or error.type
        return as_response(error, path)

    @app.exception_handler(RequestError)
    async def refused(request: Request, error: RequestError) -> JSONResponse:
        return await problem(request, Problem(400, str(error)))

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        return await problem(request, of_body(error.errors(), error.body))

    @app.exception_handler(ValidationError)
    async def invalid_when_converted(request: Request, error: ValidationError) -> JSONResponse:
        """What was within its bounds in one protocol is not in the other: texts that are joined, say."""
        return await problem(request, of_body(error.errors(include_url=False), None))

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> JSONResponse:
        headers = error.headers or {}
        reason, path = str(error.detail), request.url.path
        if error.status_code == 404:
            paths = [route.path for route in app.routes if isinstance(route, Route)]
            hint = nearest(path, paths, cutoff=_ALIKE) or ";"
            reason = f"there is no {path[:_SHOWN]}{hint} /openapi.json tells what there is"
        elif error.status_code == 405:
            reason = f"{path} takes {headers.get('Allow', 'another method')}, not {request.method}"
        answer = await problem(request, Problem(error.status_code, reason))
        answer.headers.update(headers)
        return answer

    @app.exception_handler(Exception)
    async def unexpected(request: Request, error: Exception) -> JSONResponse:
        found = Problem(500, f"the server failed: {type(error).__name__}", type="server_error")
        return await problem(request, found)
