"""Routes of embeddings, scores and ranked documents."""

from fastapi import FastAPI, Request
from fastapi.responses import Response

from kvq.server.admission.service import Service
from kvq.server.openai.openapi import answer
from kvq.server.openai.respond import note_fields, respond, tenant_of
from kvq.server.pooling.bodies import EmbeddingsBody, RerankBody, ScoreBody
from kvq.server.pooling.calls import Embeddings, Rerank, Score

POOLING = ("/v1/embeddings", "/v1/score", "/v1/rerank", "/v2/rerank")


def add_routes(app: FastAPI, service: Service) -> None:
    @app.post("/v1/embeddings", responses=answer("Embeddings"))
    async def embeddings(request: Request, body: EmbeddingsBody) -> Response:
        await note_fields(request, service, body)
        return await respond(request, service, Embeddings(service, body, tenant_of(request)), stream=False)

    @app.post("/v1/score", responses=answer("Scores"))
    async def score(request: Request, body: ScoreBody) -> Response:
        await note_fields(request, service, body)
        return await respond(request, service, Score(service, body, tenant_of(request)), stream=False)

    @app.post("/v2/rerank", responses=answer("Ranking"))  # of Cohere's clients
    @app.post("/v1/rerank", responses=answer("Ranking"))
    async def rerank(request: Request, body: RerankBody) -> Response:
        await note_fields(request, service, body)
        return await respond(request, service, Rerank(service, body, tenant_of(request)), stream=False)
