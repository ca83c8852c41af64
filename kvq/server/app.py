"""HTTP application: all routes, behind the guard; every failure is returned as an error object."""

from collections.abc import Callable
from functools import partial
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route

from kvq.errors import RequestError, nearest
from kvq.server import health, viewers
from kvq.server.admission.metrics import CONTENT_TYPE
from kvq.server.admission.service import Service
from kvq.server.anthropic import message as anthropic
from kvq.server.http.body_errors import of_body
from kvq.server.http.credentials import Access, Credentials
from kvq.server.http.guard import REASON, VERSION_HEADER, Guard, as_response
from kvq.server.http.ignored import HEADER
from kvq.server.http.problems import MESSAGES_PATH, RESPONSES_PATH, Problem
from kvq.server.http.strict_json import JsonRoute
from kvq.server.ollama import routes as ollama
from kvq.server.openai import routes as openai
from kvq.server.openai.openapi import describe_routes
from kvq.server.pooling import routes as pooling
from kvq.server.responses import response as responses
from kvq.version import __version__

_SHOWN = 100  # maximum length of an unknown path in an error, in characters
_ALIKE = 0.8  # so that /v1/completion matches /v1/completions, and /v1/sessions does not match /v1/messages
GENERATING = (*openai.GENERATING, RESPONSES_PATH, MESSAGES_PATH, *ollama.GENERATING, *pooling.POOLING)
READING = (*openai.READING, anthropic.COUNT_TOKENS_PATH, *ollama.READING)
_PROBLEMS: dict[type[Exception], Callable[[Any], Problem]] = {
    Problem: lambda problem: problem,
    RequestError: lambda error: Problem(400, str(error)),
    RequestValidationError: lambda error: of_body(error.errors(), error.body),
    # A body within one protocol's bounds may exceed the other's, for example when its texts are joined
    ValidationError: lambda error: of_body(error.errors(include_url=False), None),
    Exception: lambda error: Problem(500, f"the server failed: {type(error).__name__}", type="server_error"),
}


def create_app(
    service: Service, access: Access | None = None, credentials: Credentials | None = None
) -> FastAPI:
    """Return the HTTP application for a service.

    If there are API keys, every route except `/health/live` requires a key from `credentials`, or from
    `access` if `credentials` is None.
    """
    access = access or Access()
    app = create_routes(service, has_keys=bool(access.api_keys))
    guard(
        app,
        access,
        credentials,
        check=partial(check_arrival, service),
        charge=lambda tenant: service.admission.tenants[tenant].charge_request(),
        count=partial(count, service),
    )
    return app


def empty_app() -> FastAPI:
    """Return an application without routes, for strict JSON bodies."""
    app = FastAPI(
        title="kvq",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        strict_content_type=False,
    )
    app.router.route_class = JsonRoute
    return app


def create_routes(service: Service, *, has_keys: bool) -> FastAPI:
    """Return the application with all routes of a service, and without the guard."""
    app = empty_app()
    app.state.loop_budget = service.loop_budget
    openai.add_routes(app, service)
    responses.add_routes(app, service)
    anthropic.add_routes(app, service)
    ollama.add_routes(app, service)
    pooling.add_routes(app, service)

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        return Response(service.metrics.text(), media_type=CONTENT_TYPE)

    health.add_routes(app, service)
    viewers.add_routes(app, service, has_keys=has_keys)
    answer_problems(app, partial(count, service))
    describe_routes(app, has_keys=has_keys, is_strict=service.is_strict)
    return app


def guard(
    app: FastAPI, access: Access, credentials: Credentials | None, **calls: Callable[..., object]
) -> None:
    """Put the guard in front of an application. `calls`: `check`, `charge` and `count` of `Guard`."""
    # D302: a refused request counts toward the limit per minute
    app.add_middleware(Guard, access=access, credentials=credentials, **calls)
    if access.origins:  # outside the guard: browsers send no key with a preflight request
        app.add_middleware(
            CORSMiddleware,
            allow_origins=sorted(access.origins),
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after", HEADER, VERSION_HEADER],
        )


def check_arrival(service: Service, path: str, tenant: str) -> None:
    """Raise Problem if a tenant's request to a path can't be accepted, regardless of its body."""
    if path in GENERATING:
        service.check_arrival(tenant, may_overflow=path in openai.GENERATING)
    elif path in READING:
        service.admission.tenants[tenant].check_rates()


def count(service: Service, path: str, problem: Problem) -> None:
    """Count a generation request that ended in a problem, unless it has already been counted."""
    if path in GENERATING and problem.status != 405 and not problem.is_counted:
        service.metrics.count(problem.counted().ending)


def answer_problems(app: FastAPI, count: Callable[[str, Problem], object]) -> None:
    """Turn every failure into an error object of the route's protocol, and pass it to `count`."""

    def answer(request: Request, problem: Problem) -> JSONResponse:
        path = request.url.path
        count(path, problem)
        request.scope[REASON] = problem.code or problem.type
        return as_response(problem, path)

    async def failed(problem_of: Callable[[Any], Problem], request: Request, error: Exception) -> Response:
        return answer(request, problem_of(error))

    for kind, problem_of in _PROBLEMS.items():
        app.add_exception_handler(kind, partial(failed, problem_of))

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
        response = answer(request, Problem(error.status_code, reason))
        response.headers.update(headers)
        return response
