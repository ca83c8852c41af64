"""Anthropic routes: messages, and the number of their input tokens."""

from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import Response

from kvq.server.admission.service import Service
from kvq.server.anthropic.bodies import MessagesBody, PromptBody
from kvq.server.anthropic.message import MessageCall
from kvq.server.anthropic.prompt import conversation
from kvq.server.http.problems import MESSAGES_PATH
from kvq.server.openai.openapi import answer, stream_or
from kvq.server.openai.respond import note_fields, respond, tenant_of, text_request

COUNT_TOKENS_PATH = f"{MESSAGES_PATH}/count_tokens"


def add_routes(app: FastAPI, service: Service) -> None:
    """Add the routes to an application."""

    @app.post(MESSAGES_PATH, responses=stream_or("MessageAnswer"))
    async def messages(request: Request, body: MessagesBody) -> Response:
        await note_fields(request, service, body)
        call = MessageCall(service, body, tenant_of(request))
        return await respond(request, service, call, stream=body.stream)

    @app.post(COUNT_TOKENS_PATH, responses=answer("InputTokens"))
    async def count_tokens(request: Request, body: PromptBody) -> dict[str, Any]:
        async with text_request(request, service, body, body.model) as prompts:
            tokens = await prompts.chat(conversation(body), tenant=tenant_of(request))
        return {"input_tokens": len(tokens)}
