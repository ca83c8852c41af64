"""Ollama's routes: generation, and what its clients ask of a server before."""

from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from kvq.server.admission.service import Service
from kvq.server.ollama.answer import OllamaCall, answer_object, timestamp
from kvq.server.ollama.bodies import GenerateBody, OllamaBody, OllamaChatBody
from kvq.server.openai.openapi import Responses, stream_or
from kvq.server.openai.respond import note_fields, respond, tenant_of, text_request
from kvq.version import __version__

GENERATING = ("/api/generate", "/api/chat")
READING = ("/api/show",)
_ANSWER = stream_or("OllamaAnswer", "application/x-ndjson")
_SINCE = timestamp()
_OBJECT: Responses = {200: {"model": dict[str, Any]}}


def add_routes(app: FastAPI, service: Service) -> None:
    """Add the routes for generation and for descriptions of the model."""

    @app.post("/api/generate", responses=_ANSWER)
    async def generate(request: Request, body: GenerateBody) -> Response:
        return await _respond(request, service, body)

    @app.post("/api/chat", responses=_ANSWER)
    async def chat(request: Request, body: OllamaChatBody) -> Response:
        return await _respond(request, service, body)

    @app.get("/api/tags", responses=_OBJECT)
    @app.get("/api/ps", responses=_OBJECT)
    async def models() -> dict[str, Any]:
        return {"models": [_model(service, name) for name in service.names]}

    @app.post("/api/show", responses=_OBJECT)
    async def show(request: Request, body: OllamaBody) -> dict[str, Any]:
        async with text_request(request, service, body, _known(service, body.model)):
            return _model(service, body.model)

    @app.get("/api/version", responses=_OBJECT)
    async def version() -> dict[str, Any]:
        return {"version": __version__}


async def _respond(request: Request, service: Service, body: GenerateBody | OllamaChatBody) -> Response:
    if not (body.prompt if isinstance(body, GenerateBody) else body.messages):
        async with text_request(request, service, body, _known(service, body.model)):
            service.check_ready()  # all that a request to load the model can ask of a server
            return JSONResponse(answer_object(body) | {"done": True, "done_reason": "load"})
    await note_fields(request, service, body)
    service.check_model(_known(service, body.model))
    return await respond(request, service, OllamaCall(service, body, tenant_of(request)), stream=body.stream)


def _known(service: Service, name: str) -> str:
    """Return a model's name without the tag that Ollama's clients add."""
    return name if name in service.names else name.removesuffix(":latest")


def _model(service: Service, name: str) -> dict[str, Any]:
    info, tools = service.remote.info, service.tools
    can = {"completion": True, "tools": tools.format, "thinking": tools.thinking}
    found = {"name": name, "model": name, "modified_at": _SINCE, "details": {}, "model_info": {}}
    if info is not None:
        sizes = {"general.architecture": "kvq", "kvq.context_length": info.max_context}
        found |= {"digest": info.model_digest, "model_info": sizes}
    return found | {"capabilities": [what for what in can if can[what]]}
