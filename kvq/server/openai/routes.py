"""OpenAI routes (completions, chat, models), and `/tokenize` and `/detokenize` as in vLLM."""

from time import time
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import Response

from kvq.server.admission.bodies import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    HintBody,
    LoadAdapterBody,
    TokenizeBody,
    UnloadAdapterBody,
)
from kvq.server.admission.prompts import Prompts
from kvq.server.admission.service import Service, describe
from kvq.server.http.problems import Problem
from kvq.server.openai.chat import Chat
from kvq.server.openai.completions import Completions
from kvq.server.openai.openapi import answer, stream_or
from kvq.server.openai.recorded import recorded
from kvq.server.openai.respond import note_fields, respond, tenant_of, text_request

GENERATING = ("/v1/completions", "/v1/chat/completions")
READING = ("/tokenize", "/detokenize")  # these routes use only the tokenizer, not the engine


def add_routes(app: FastAPI, service: Service) -> None:
    created = int(time())

    @app.post("/v1/completions", responses=stream_or("Completion"))
    async def completions(request: Request, body: CompletionBody) -> Response:
        await note_fields(request, service, body)
        call = Completions(service, body, tenant_of(request))
        return await respond(request, service, call, stream=body.stream)

    @app.post("/v1/chat/completions", responses=stream_or("ChatCompletion"))
    async def chat(request: Request, body: ChatBody) -> Response:
        await note_fields(request, service, body)
        call = recorded(Chat(service, body, tenant_of(request)), body, service.recorder)
        return await respond(request, service, call, stream=body.stream)

    @app.get("/v1/models", responses=answer("Models"))
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [describe(service, created, name) for name in service.models]}

    @app.get("/v1/models/{model:path}", responses=answer("Model"))
    async def model(model: str) -> dict[str, Any]:
        service.check_model(model)
        return describe(service, created, model)

    @app.post("/v1/load_lora_adapter", responses=answer("Model"))
    async def load_adapter(request: Request, body: LoadAdapterBody) -> dict[str, Any]:
        await note_fields(request, service, body)
        service.check_model(body.model)
        await service.change_adapter(body.lora_name, body.lora_path)
        return describe(service, int(time()), body.lora_name)

    @app.post("/v1/unload_lora_adapter", responses=answer("Unloaded"))
    async def unload_adapter(request: Request, body: UnloadAdapterBody) -> dict[str, Any]:
        await note_fields(request, service, body)
        service.check_model(body.model)
        await service.change_adapter(body.lora_name, None)
        return {"id": body.lora_name, "object": "model", "deleted": True}

    @app.post("/v1/kv/hint", responses=answer("Hint"))
    async def hint(request: Request, body: HintBody) -> dict[str, Any]:
        await note_fields(request, service, body)
        service.check_arrival(tenant_of(request))
        service.hint(tenant_of(request), body)
        return {"accepted": True}

    @app.post("/tokenize", responses=answer("Tokens"))
    async def tokenize(request: Request, body: TokenizeBody) -> dict[str, Any]:
        async with text_request(request, service, body, body.model) as prompts:
            tokens = await _tokens(prompts, body, tenant_of(request))
        info = service.remote.info
        most = info.max_context if info else None
        return {"tokens": list(tokens), "count": len(tokens), "max_model_len": most}

    @app.post("/detokenize", responses=answer("Prompt"))
    async def detokenize(request: Request, body: DetokenizeBody) -> dict[str, Any]:
        async with text_request(request, service, body, body.model) as prompts:
            info = service.remote.info
            if info is not None and body.tokens and max(body.tokens) >= info.vocab_size:
                raise Problem(400, f"token ids go up to {info.vocab_size - 1}", param="tokens")
            return {"prompt": await prompts.detokenize(body.tokens, tenant=tenant_of(request))}


async def _tokens(prompts: Prompts, body: TokenizeBody, tenant: str) -> list[int]:
    if body.messages is None:
        special = body.add_special_tokens
        return list(await prompts.tokenize(body.prompt or "", special=special, tenant=tenant))
    options = {"add_generation_prompt": body.add_generation_prompt}
    return list(await prompts.chat((body.messages, options), tenant=tenant))
