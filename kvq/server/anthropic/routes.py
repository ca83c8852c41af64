"""The routes."""

from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import Response

from kvq.server import answer_types
from kvq.server.anthropic.bodies import MessagesBody, PromptBody
from kvq.server.anthropic.errors import PATH
from kvq.server.anthropic.message import MessageCall
from kvq.server.anthropic.prompt import prompt_tokens
from kvq.server.openapi import ONE_OR_STREAM
from kvq.server.respond import admitted, note_fields, respond, tenant
from kvq.server.service import Service


def add_routes(app: FastAPI, service: Service) -> None:
    """Anthropic's Messages API."""

    @app.post(PATH, responses={200: ONE_OR_STREAM | {"model": answer_types.Message}})
    async def messages(request: Request, body: MessagesBody) -> Response:
        await note_fields(request, service, body)
        call = MessageCall(service, body, tenant(request))
        return await respond(request, service, call, stream=body.stream)

    @app.post(f"{PATH}/count_tokens", responses={200: {"model": answer_types.InputTokens}})
    async def count_tokens(request: Request, body: PromptBody) -> dict[str, Any]:
        await note_fields(request, service, body)
        service.check_model(body.model)
        asks = tenant(request)
        with admitted(request, service.aside(asks)):
            return {"input_tokens": len(await prompt_tokens(service.counting, body, asks))}
