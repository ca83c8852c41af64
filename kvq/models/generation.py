"""Generating text from one prompt, streamed."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvq.errors import RequestError
from kvq.models.session import Session
from kvq.models.weights import LoadedWeights

_INCOMPLETE = "\ufffd"  # what a decoder shows for a character whose bytes are not all there yet


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How the next token is chosen. Temperature 0 takes the likeliest."""

    max_tokens: int = 64
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise RequestError(f"max_tokens must be at least 1, got {self.max_tokens}")
        if not 0 <= self.temperature <= 10:
            raise RequestError(f"temperature must be 0 to 10, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise RequestError(f"top_p must be above 0 and at most 1, got {self.top_p}")
        if self.seed is not None and not -(1 << 63) <= self.seed < 1 << 64:
            raise RequestError(f"seed must fit into 64 bits, got {self.seed}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """One step of a stream: a token and the text that became complete with it, maybe none."""

    token_id: int
    text: str


class Detokenizer:
    """Turns tokens into text as they come, holding back characters that are not complete."""

    def __init__(self, tokenizer: Any, prompt_ids: list[int]) -> None:
        self._decode: Callable[..., str] = tokenizer.decode
        self._ids = list(prompt_ids[-8:])  # context, so that leading spaces come out right
        self._start = 0
        self._shown = len(self._text(self._ids))

    def push(self, token_id: int) -> str:
        """Add a token; return the text that is complete now."""
        self._ids.append(token_id)
        text = self._text(self._ids[self._start :])
        if text.endswith(_INCOMPLETE):
            return ""
        fresh = text[self._shown :]
        if len(self._ids) - self._start > 32:  # a window keeps each step's work constant
            self._start = len(self._ids) - 8
            self._shown = len(self._text(self._ids[self._start :]))
        else:
            self._shown = len(text)
        return fresh

    def flush(self) -> str:
        """Return what was held back when the stream ends inside a character."""
        return self._text(self._ids[self._start :])[self._shown :]

    def _text(self, ids: list[int]) -> str:
        return self._decode(ids, skip_special_tokens=True)


def check_unicode(text: str, what: str) -> None:
    """Raise RequestError if `text` holds lone surrogates, as bytes that were not UTF-8 leave them."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RequestError(
            f"{what} is not valid Unicode at character {error.start}; give UTF-8 text"
        ) from error


def stream(
    tokenizer: Any,
    open_session: Callable[..., Session],
    prompt: str,
    options: SamplingParams,
    weights: LoadedWeights,
) -> Iterator[Piece]:
    """Prefill the prompt, then decode token by token until an end token or max_tokens."""
    check_unicode(prompt, "the prompt")
    prompt_ids: list[int] = tokenizer(prompt, return_attention_mask=False)["input_ids"]
    if not prompt_ids:
        raise RequestError("the prompt is empty; give some text to go on from")
    total = len(prompt_ids) + options.max_tokens
    if total > weights.max_context:
        raise RequestError(
            f"{len(prompt_ids)} prompt tokens and max_tokens={options.max_tokens} are {total}, more than "
            f"this model's context of {weights.max_context}; shorten one of them"
        )
    session = open_session(max_tokens=total, batch_invariant=False)  # nobody else is in these steps
    return _decode_loop(session, prompt_ids, options, weights, tokenizer)


def _decode_loop(
    session: Session, prompt_ids: list[int], options: SamplingParams, weights: LoadedWeights, tokenizer: Any
) -> Iterator[Piece]:
    end_ids = set() if options.ignore_eos else _end_ids(weights)
    generator = torch.Generator()
    if options.seed is not None:
        generator.manual_seed(options.seed)
    else:
        generator.seed()
    detokenizer = Detokenizer(tokenizer, prompt_ids)
    sequence = session.new_sequence()
    step = prompt_ids
    for left in range(options.max_tokens - 1, -1, -1):
        result = session.forward([(sequence, step)])[0]
        token = sample(result.trusted_logits()[0], options, generator)
        if token in end_ids:
            if held_back := detokenizer.flush():
                yield Piece(token_id=token, text=held_back)
            break
        text = detokenizer.push(token)
        yield Piece(token_id=token, text=text if left else text + detokenizer.flush())
        step = [token]
    session.free(sequence)


def sample(logits: Tensor, options: SamplingParams, generator: torch.Generator) -> int:
    """Choose a token from logits [vocab]: temperature, then nucleus (top_p)."""
    if options.temperature == 0:
        return int(logits.argmax())
    logits = logits.double().cpu()
    weights = torch.softmax((logits - logits.max()) / options.temperature, dim=-1)
    ordered, ids = weights.sort(descending=True)
    before = ordered.cumsum(0) - ordered
    ordered[before >= options.top_p] = 0.0
    return int(ids[torch.multinomial(ordered, 1, generator=generator)])


def _end_ids(weights: LoadedWeights) -> set[int]:
    config = getattr(weights.model, "generation_config", None) or weights.model.config
    end = getattr(config, "eos_token_id", None)
    if end is None:
        return set()
    return set(end) if isinstance(end, list) else {int(end)}
