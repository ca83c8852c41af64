"""Calls for vectors and scores: each prompt is computed up to its end, and nothing is generated."""

import asyncio
from array import array
from base64 import b64encode
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from functools import partial
from math import sqrt
from operator import mul
from time import time
from typing import Any
from uuid import uuid4

from kvq.engine.requests.request_options import RequestOptions
from kvq.models.templates.pairs import ROLES
from kvq.server.admission.bodies import ChatMessage
from kvq.server.admission.service import Service
from kvq.server.admission.slots import SequenceSlots
from kvq.server.engine.messages import Ended
from kvq.server.http.problems import Problem
from kvq.server.openai.respond import Call
from kvq.server.pooling.bodies import EmbeddingsBody, RerankBody, ScoreBody

_Read = Callable[[], Awaitable[Sequence[int]]]  # returns a prompt's token ids
_AT_ONCE = 64  # prompts of a request in the engine
_FEW = 16  # results that are encoded without a thread


class _Pooled(Call):
    """Request with a vector, or a score, for each of its prompts."""

    def __init__(
        self,
        service: Service,
        body: EmbeddingsBody | ScoreBody | RerankBody,
        tenant: str,
        *,
        num_prompts: int,
        dimensions: int | None = None,
    ) -> None:
        service.check_model(body.model)
        self._service = service
        self._options = RequestOptions(
            pools=True,
            dimensions=dimensions,
            priority=body.priority or "interactive",
            tenant=tenant,
            cache_salt=body.cache_salt,
        )
        self._num_tokens = 0
        self._turns = asyncio.Semaphore(_AT_ONCE)
        self.slots = SequenceSlots(prompts=num_prompts)
        self.is_heavy = num_prompts > _FEW

    def chunks(self) -> AsyncGenerator[dict[str, Any]]:
        raise AssertionError("results are complete at once, so none are streamed")

    async def _vectors(self, reading: Sequence[_Read], field: str) -> list["array[float]"]:
        """Return the results of prompts, in order. `field`: of the body, for errors about one of them.

        Raises:
            Problem: a prompt can't be served; the others are cancelled.
        """
        tasks = [
            asyncio.create_task(self._vector(one, field if len(reading) == 1 else f"{field}.{i}"))
            for i, one in enumerate(reading)
        ]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _vector(self, reading: _Read, where: str) -> "array[float]":
        async with self._turns:
            tokens = await reading()
            self._service.check_prompt(tokens, self._options, where)
            async with aclosing(self._service.stream(tokens, self._options, self.slots)) as messages:
                async for message in messages:
                    if isinstance(message, Ended):
                        self._num_tokens += len(tokens)
                        vector = array("f")
                        vector.frombytes(message.vector)
                        return vector
        raise AssertionError("a stream ends with Ended, or raises")

    async def _scores(self, pairs: Sequence[tuple[str, str]], fields: tuple[str, str]) -> list[float]:
        """Return the model's score of each pair or, with embeddings, their cosine similarity."""
        pooling, prompts = self._service.pooling, self._service.prompts
        if pooling is not None and not pooling.scores:
            sides = []
            for side, field in zip(zip(*pairs, strict=True), fields, strict=True):
                texts = list(dict.fromkeys(side))
                reading = [partial(prompts.tokenize, text, tenant=self._options.tenant) for text in texts]
                vectors = dict(zip(texts, await self._vectors(reading, field), strict=True))
                sides.append([vectors[text] for text in side])
            return await asyncio.to_thread(lambda: [*map(_cosine, *sides)])
        read = [partial(self._pair, *pair) for pair in pairs]
        return [score for (score,) in await self._vectors(read, fields[1])]

    async def _pair(self, query: str, document: str) -> Sequence[int]:
        prompts, tenant = self._service.prompts, self._options.tenant
        if not prompts.knows_pairs:
            return await prompts.tokenize(query, second=document, tenant=tenant)
        turns = [
            ChatMessage(role=role, content=text) for role, text in zip(ROLES, (query, document), strict=True)
        ]
        return await prompts.chat((turns, {"add_generation_prompt": True}), tenant=tenant)

    def _head(self, kind: str) -> dict[str, Any]:
        usage = {"prompt_tokens": self._num_tokens, "total_tokens": self._num_tokens}
        return {"id": f"{kind}-{uuid4().hex}", "model": self._service.name, "usage": usage}


class Embeddings(_Pooled):
    """`POST /v1/embeddings`."""

    def __init__(self, service: Service, body: EmbeddingsBody, tenant: str) -> None:
        """Raise Problem if the body requests something that this server does not support."""
        given: Any = body.input
        self._given = [given] if isinstance(given, str) or isinstance(given[0], int) else given
        self._is_binary = body.encoding_format == "base64"
        super().__init__(service, body, tenant, num_prompts=len(self._given), dimensions=body.dimensions)
        if service.pooling is not None and service.pooling.scores:
            raise Problem(400, "this model scores pairs of texts; use /v1/score or /v1/rerank", param="model")

    async def answer(self) -> dict[str, Any]:
        vectors = await self._vectors([partial(self._read, one) for one in self._given], "input")
        data = await asyncio.to_thread(lambda: [*map(self._entry, range(len(vectors)), vectors)])
        return {"object": "list", "data": data} | self._head("embd")

    async def _read(self, given: Any) -> Sequence[int]:
        tenant = self._options.tenant
        return await self._service.prompts.tokenize(given, tenant=tenant) if isinstance(given, str) else given

    def _entry(self, index: int, vector: "array[float]") -> dict[str, Any]:
        encoded = b64encode(vector.tobytes()).decode() if self._is_binary else list(vector)
        return {"object": "embedding", "index": index, "embedding": encoded}


class Score(_Pooled):
    """`POST /v1/score`."""

    def __init__(self, service: Service, body: ScoreBody, tenant: str) -> None:
        """Raise Problem if the body requests something that this server does not support."""
        self._pairs = body.pairs
        super().__init__(service, body, tenant, num_prompts=_num_prompts(service, self._pairs))

    async def answer(self) -> dict[str, Any]:
        scores = await self._scores(self._pairs, ("text_1", "text_2"))
        data = [{"index": i, "object": "score", "score": score} for i, score in enumerate(scores)]
        return {"object": "list", "created": int(time()), "data": data} | self._head("score")


class Rerank(_Pooled):
    """`POST /v1/rerank`."""

    def __init__(self, service: Service, body: RerankBody, tenant: str) -> None:
        """Raise Problem if the body requests something that this server does not support."""
        self._body = body
        self._pairs = [(body.query, text) for text in body.texts]
        super().__init__(service, body, tenant, num_prompts=_num_prompts(service, self._pairs))

    async def answer(self) -> dict[str, Any]:
        scores = await self._scores(self._pairs, ("query", "documents"))
        best = sorted(range(len(scores)), key=lambda i: -scores[i])[: self._body.top_n]
        results: list[dict[str, Any]] = [{"index": i, "relevance_score": scores[i]} for i in best]
        for one in results if self._body.return_documents else ():
            one["document"] = {"text": self._pairs[one["index"]][1]}
        return {"results": results} | self._head("rerank")


def _num_prompts(service: Service, pairs: Sequence[tuple[str, str]]) -> int:
    """Return the number of prompts that scores of pairs need: embeddings of every text, or one for each."""
    if service.pooling is None or service.pooling.scores:
        return len(pairs)
    return sum(len(set(side)) for side in zip(*pairs, strict=True))


def _cosine(a: "array[float]", b: "array[float]") -> float:
    lengths = sqrt(sum(map(mul, a, a)) * sum(map(mul, b, b)))
    return sum(map(mul, a, b)) / lengths if lengths else 0.0
