"""Pending grammars: jobs whose grammars are being compiled in another process while steps run."""

from concurrent.futures import Future
from typing import TYPE_CHECKING

from kvq.engine.requests.request_state import Job
from kvq.models import Model

if TYPE_CHECKING:  # imported with the first grammar: llguidance is not needed without one
    from kvq.engine.grammar.compiler import GrammarCompiler
    from kvq.engine.grammar.matcher import Matcher


class PendingGrammars:
    """Jobs that are waiting for their grammars, in order of arrival."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._futures: dict[Job, Future[Matcher]] = {}
        self._compiler: GrammarCompiler | None = None  # made with the first grammar

    def __len__(self) -> int:
        return len(self._futures)

    def has_room(self, job: Job) -> bool:
        """Return False if `add` might refuse a job because too many grammars are waiting."""
        if job.params.structured is None or self._compiler is None:
            return True
        return self._compiler.has_room(job.tenant)

    def add(self, job: Job) -> None:
        """Start compiling the grammar of a job, which must have one.

        Raises:
            RequestError: too many grammars are already waiting.
        """
        assert job.params.structured is not None, "it has a grammar"
        if self._compiler is None:
            from kvq.engine.grammar.compiler import GrammarCompiler

            self._compiler = GrammarCompiler(
                self._model.tokenizer, self._model.geometry.vocab_size, eos_ids=sorted(self._model.end_ids)
            )
        self._futures[job] = self._compiler.submit(job.params.structured, tenant=job.tenant)

    def remove(self, job: Job) -> bool:
        """Cancel the compilation of a job's grammar. Return False if the job is not waiting for a grammar."""
        future = self._futures.pop(job, None)
        if future is not None:
            future.cancel()
        return future is not None

    def take_done(self) -> "list[tuple[Job, Matcher | BaseException]]":
        """Remove and return the jobs whose grammars have compiled or failed to compile."""
        if not self._futures:
            return []
        done = [(job, future) for job, future in self._futures.items() if future.done()]
        for job, _ in done:
            del self._futures[job]
        return [(job, future.exception() or future.result()) for job, future in done]

    def close(self) -> list[Job]:
        """Close the compiler. Return the jobs that were still waiting."""
        jobs = list(self._futures)
        for job in jobs:
            self.remove(job)
        if self._compiler is not None:
            self._compiler.close()
        return jobs
