"""`POST /v1/chat/completions`."""

from typing import Any

from kvq.engine.outputs import Piece
from kvq.errors import RequestError
from kvq.server.answers import Answer
from kvq.server.bodies import ChatBody
from kvq.server.chat_tools import Reading, offer_of, template_tools
from kvq.server.problems import Problem
from kvq.server.prompts import Conversation
from kvq.server.sampling import chat_params
from kvq.server.service import Service


class Chat(Answer):
    """One request."""

    OBJECT, CHUNK, ID = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def __init__(self, service: Service, body: ChatBody, tenant: str) -> None:
        """Raises Problem: something in it that this server does not do."""
        service.check_model(body.model)
        params = chat_params(body)
        self._offer = offer_of(body, service.tools)
        if self._offer is not None:
            try:
                params = self._offer.params(params)
            except RequestError as error:
                raise Problem(400, str(error), param="tool_choice") from error
        self._body = body
        self._readings: dict[int, Reading] = {}  # by the result's index
        super().__init__(service, body, params, tenant)

    @property
    def is_heavy(self) -> bool:
        """With log-probabilities."""
        return self._body.logprobs

    async def _read(self) -> list[list[int]]:
        body = self._body
        options = (body.chat_template_kwargs or {}) | {"tools": template_tools(body)}
        options["add_generation_prompt"] = body.add_generation_prompt and not body.continue_final_message
        if body.continue_final_message:
            options["continue_final_message"] = True
        conversation = Conversation(messages=body.messages, options=options)
        return [await self._service.prompts.chat(conversation, tenant=self._terms.origin.tenant)]

    def _choice(self, index: int, whole: Piece) -> dict[str, Any]:
        reading = self._reading()
        return self._told(index, whole, reading, {"message": reading.message(whole)})

    def _delta(self, index: int, piece: Piece) -> dict[str, Any] | None:
        first: dict[str, Any] = {}
        if index not in self._readings:
            self._readings[index] = self._reading()
            first = {"role": "assistant", "content": None}
        reading = self._readings[index]
        told = self._told(index, piece, reading, {"delta": first | reading.delta(piece)})
        return told if told["delta"] or told["logprobs"] or told["finish_reason"] else None

    def _told(self, index: int, piece: Piece, reading: Reading, text: dict[str, Any]) -> dict[str, Any]:
        logprobs = None
        if piece.logprobs is not None and self.is_heavy:
            logprobs = self._service.prompts.texts.chat_logprobs(piece.logprobs)
        return {"index": index} | text | {"logprobs": logprobs, "finish_reason": reading.reason(piece)}

    def _reading(self) -> Reading:
        return Reading(None if self._offer is None else self._offer.parser())
