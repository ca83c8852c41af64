"""Intake: validates each request once, before the request waits for anything, and creates its job."""

import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from kvq.engine.params import MAX_PINS, check_params
from kvq.engine.requests.beam import BeamSearch
from kvq.engine.requests.marking import Marking, marked
from kvq.engine.requests.named_adapter import NamedAdapter
from kvq.engine.requests.outputs import Timing
from kvq.engine.requests.request_options import (
    DEFAULT_OPTIONS,
    Prompt,
    RequestOptions,
    as_priority,
    prompt_tokens,
)
from kvq.engine.requests.request_state import Job, Listener
from kvq.errors import RequestError
from kvq.models import Model
from kvq.models.describe.ends import NO_END
from kvq.models.describe.pooling import Pooling
from kvq.models.parts.fork_guard import Home
from kvq.models.run.prompts import check_length, longest_token
from kvq.scheduler import Scheduler

_MADE_FOR = (
    "models with a modules.json of sentence-transformers, with one score per text "
    "(...ForSequenceClassification), or any model with pooling (--pooling last, mean or yes-no)"
)
_PROMPT_LOGPROB_BYTES = 64 << 20  # maximum bytes of logits per step for prompt log-probabilities


@dataclass(eq=False)
class Intake:
    """Factory that creates jobs for one engine. May be used from any thread."""

    model: Model
    scheduler: Scheduler
    marking: Marking | None
    home: Home
    clock: Callable[[], float]
    find_adapter: Callable[[str], NamedAdapter]
    pooling: Pooling | None = None
    _ids: Iterator[int] = field(default_factory=itertools.count, init=False)
    _random: random.Random = field(default_factory=random.SystemRandom, init=False)

    def new_job(
        self, prompt: Prompt, options: RequestOptions = DEFAULT_OPTIONS, *, listener: Listener | None = None
    ) -> Job:
        """Check a request and prepare its job; `EngineCore.submit` starts it.

        Raises:
            RequestError: the request can't be served, or it can never fit in memory.
            EngineError: this process was forked from the process that made the engine.
        """
        self.home.check()
        tokens = self._tokens(prompt)
        self._check(options, len(tokens))
        adapter = None if options.adapter is None else self.find_adapter(options.adapter)
        params = marked(options.params, self.marking)
        seed = int(params.seed or 0)
        if params.seed is None and params.temperature:
            seed = self._random.getrandbits(53)  # as many bits as most readers of JSON keep
        if self.model.prepared.exact and params.beam_width is None:
            params = replace(params, seed=seed)  # also with drafts, the same tokens
        start, eos = params.prompt_logprobs_start, frozenset() if params.ignore_eos else self.model.end_ids
        job = Job(
            id=options.request_id or f"request-{next(self._ids)}",
            tokens=tokens,
            max_tokens=params.max_tokens,
            most_tokens=params.most_tokens,
            num_branches=params.num_sequences,
            priority=as_priority(options.priority),
            tenant=options.tenant,
            shared_salt=options.shared_salt,
            cache_salt=options.cache_salt,
            adapter=adapter,
            tag=0 if adapter is None else self.scheduler.manager.tag(adapter.digest),
            adapted_from=0 if adapter is None else adapter.start_in(tokens),
            texts=options.texts,
            **self._limits(options, len(tokens)),
            pools=options.pools,
            dimensions=options.dimensions,
            params=params,
            prompt=prompt if isinstance(prompt, str) else None,
            seed=seed,
            end_ids=eos | frozenset(params.stop_token_ids),
            listener=listener,
            timing=Timing(arrival_s=self.clock()),
            prompt_logprobs=None if params.prompt_logprobs is None else [None] * max(1, start),
            session=options.session,
            retain_s=options.retain_s,
            pins=sorted(options.pins, key=lambda pin: pin.length),
        )
        max_tokens = self.scheduler.check(job)
        if params.echo and job.prompt is None:
            job.prompt = self.model.tokenizer.decode(tokens)
        if params.beam_width is not None:
            job.beams = BeamSearch(params, max_tokens=max_tokens, end_ids=job.end_ids)
        return job

    def _tokens(self, prompt: Prompt) -> Any:
        most = self.scheduler.config.max_context
        if isinstance(prompt, str) and len(prompt) > most:
            check_length(prompt, most, self._longest_token)
        return prompt_tokens(prompt, self.model.tokenizer, self.model.geometry.vocab_size)

    def _check(self, options: RequestOptions, num_tokens: int) -> None:
        params, pins = options.params, options.pins
        self._check_pooling(options)
        if options.kv_format is not None:
            raise RequestError("kv_format is for servers with several KV formats; leave it out")
        check_params(params, self.model.geometry.vocab_size)
        start = params.prompt_logprobs_start
        if start and (params.prompt_logprobs is None or start >= num_tokens):
            raise RequestError(
                f"prompt_logprobs_start must be below the {num_tokens} prompt tokens, and needs "
                f"prompt_logprobs, got {start} and {params.prompt_logprobs}"
            )
        if len(pins) > MAX_PINS or any(pin.length > num_tokens for pin in pins):
            raise RequestError(f"a request may pin {MAX_PINS} prefixes of its {num_tokens} prompt tokens")
        if params.structured is not None and params.ignore_eos:
            raise RequestError("structured output ends by the end token; leave ignore_eos out")
        if params.structured is not None and not self.model.end_ids:
            raise RequestError(f"structured output ends by the end token, but {NO_END}")

    def _check_pooling(self, options: RequestOptions) -> None:
        """Raise RequestError unless the model can do what a request asks for: generate, or pool."""
        if (pooling := self.pooling) is None and options.pools:
            raise RequestError(
                f"this model generates text, and makes no embeddings or scores; take {_MADE_FOR}"
            )
        if pooling is not None and not options.pools and not pooling.generates:
            made = "scores pairs of texts" if pooling.scores else "makes embeddings"
            raise RequestError(f"this model {made}, and generates no text; take another model for that")
        if pooling is not None and options.dimensions is not None:
            pooling.check_dimensions(options.dimensions, self.model.geometry.hidden_size)

    @cached_property
    def _longest_token(self) -> int:
        return longest_token(self.model.tokenizer)

    def _limits(self, options: RequestOptions, num_tokens: int) -> dict[str, Any]:
        """Return limits on prefix reuse and chunk size for a prompt of which more than the end is needed."""
        if options.pools and self.pooling is not None and self.pooling.needs_all:
            return {"max_reuse": 0}
        params = options.params
        if params.prompt_logprobs is None:
            return {}
        reused = max(
            0, params.prompt_logprobs_start - 1
        )  # the first token needs the logits of the previous one
        rows = max(16, _PROMPT_LOGPROB_BYTES // (4 * self.model.geometry.vocab_size))
        return {"max_reuse": reused, "max_chunk": rows if num_tokens - reused > rows else None}
