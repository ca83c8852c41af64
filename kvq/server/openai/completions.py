"""`POST /v1/completions`."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from kvq.engine.requests.outputs import Piece
from kvq.server.admission.bodies import CompletionBody
from kvq.server.admission.service import Service
from kvq.server.http.problems import Problem
from kvq.server.openai.answers import Answer, reason_of
from kvq.server.openai.sampling import completion_params


class Completions(Answer):
    """Completions request with one or several prompts."""

    OBJECT = CHUNK = "text_completion"
    ID = "cmpl"

    def __init__(self, service: Service, body: CompletionBody, tenant: str) -> None:
        """Raise Problem if the body requests something that this server does not support."""
        service.check_model(body.model, body.kv_format)
        if body.suffix is not None:
            raise Problem(400, "suffix is not supported: no text is inserted before it", param="suffix")
        params = completion_params(body, service.defaults)
        if body.stream and (params.prompt_logprobs is not None or params.best_of is not None):
            raise Problem(
                400, "best_of, and echo with logprobs, are known only at the end; don't stream them"
            )
        if body.max_tokens == 0 and (body.stream or not body.echo):
            raise Problem(400, "max_tokens 0 only scores: with echo, not streamed", param="max_tokens")
        given: Any = body.prompt
        self._given = [given] if isinstance(given, str) or isinstance(given[0], int) else given
        self._body = body
        self._echoed: list[str] = []  # texts to return before the results, keyed by the prompt's index
        self._num_characters = Counter[int]()  # characters sent so far, keyed by the result's index
        super().__init__(service, body, params, tenant, num_prompts=len(self._given))

    async def _read(self) -> list[Sequence[int]]:
        reader, tenant = self._service.prompts, self._request.tenant
        prompts = [
            await reader.tokenize(given, tenant=tenant) if isinstance(given, str) else given
            for given in self._given
        ]
        for i, tokens in enumerate(prompts):
            where = "prompt" if len(prompts) == 1 else f"prompt.{i}"
            self._service.check_prompt(tokens, self._request, where)
        if self._body.echo:
            self._echoed = [
                given if isinstance(given, str) else await reader.detokenize(given, tenant=tenant)
                for given in self._given
            ]
        return prompts

    async def _results(self) -> list[Piece]:
        """Return the results; if `max_tokens` is 0, omit the token that the engine generated anyway."""
        results = await super()._results()
        if self._body.max_tokens == 0:
            self._receipts = [replace(used, generated_tokens=0) for used in self._receipts]
            for result in results:
                result.text, result.token_ids, result.logprobs, result.finish_reason = "", [], [], "length"
        return results

    def _choice(self, index: int, piece: Piece) -> dict[str, Any]:
        """Return a result, or one piece of a streamed result, in OpenAI's form."""
        logprobs, i = None, index // self._n
        echoed = self._echoed[i] if self._echoed and index not in self._num_characters else ""
        if piece.logprobs is not None and self.is_heavy:
            texts, scores = self._service.prompts.texts, self._scores.get(i, [])
            start = self._num_characters[index] + len(echoed)
            logprobs = texts.completion_logprobs(piece.token_ids, piece.logprobs, start)
            if scores:
                known = texts.completion_logprobs(self._prompts[i], scores, 0, within=echoed)
                logprobs = {name: known[name] + values for name, values in logprobs.items()}
        self._num_characters[index] += len(echoed + piece.text)
        return {
            "index": index,
            "text": echoed + piece.text,
            "logprobs": logprobs,
            "finish_reason": reason_of(piece),
        }

    _delta = _choice
