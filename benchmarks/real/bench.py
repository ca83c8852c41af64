"""One model of the lab, loaded once for all that is measured on it."""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import kvq
from benchmarks.real.hidden import BASELINE, Baseline
from benchmarks.real.lab import Lab
from kvq.evals.text import EvalText, token_windows
from kvq.models import Model
from kvq.models.loading.prepared import PreparedModel, prepare

AS_STORED = "auto"
_LONGEST = 12  # characters of a token, on average, of any text here


@dataclass(frozen=True)
class Bench:
    """A model by its name; weights are read when they are first needed."""

    lab: Lab
    name: str
    weights: str = AS_STORED  # or what they are rounded to on load
    found_together: dict[str, Any] = field(default_factory=dict, init=False)  # that one run measured at once
    _windows: dict[tuple[str, int, int], list[list[int]]] = field(default_factory=dict, init=False)

    @cached_property
    def prepared(self) -> PreparedModel:
        """The model without its weights."""
        return prepare(self.lab.model(self.name))

    @cached_property
    def model(self) -> Model:
        """The model over unquantized KV."""
        return kvq.load(self.lab.model(self.name), kv=BASELINE, weights=self.weights)

    @property
    def baseline(self) -> Baseline:
        """Return the baseline's results for texts, over unquantized KV."""
        folder = self.lab.baselines
        return Baseline(self.model, folder if self.weights == AS_STORED else folder / self.weights)

    def windows(self, text: EvalText, *, context: int, tokens: int) -> list[list[int]]:
        """The first windows of a text, of about so many tokens together, one at least.

        Raises:
            RequestError: the text is shorter than a window.
        """
        count = max(1, round(tokens / context))
        key = text.digest, context, count
        if key not in self._windows:
            begin = text.text[: _LONGEST * context * count]
            self._windows[key] = token_windows(
                self.prepared.tokenizer, begin, context=context, max_windows=count
            )
        return self._windows[key]
