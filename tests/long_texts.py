"""A fixture for tests of commands and searches, which cut windows from the same long texts over and over."""

from collections.abc import Iterator
from importlib import import_module
from typing import Any

import pytest


@pytest.fixture(autouse=True, scope="session")
def long_texts() -> Iterator[None]:
    """A long text is tokenized once for all models whose tokenizers split its beginning alike."""
    names = ("kvq.evals.text", "kvq.calib.domain", "kvq.calib.observe", "kvq.calib.quantize.walk")
    modules = [import_module(name) for name in names]
    real, known = modules[0].text_ids, {}

    def text_ids(tokenizer: Any, said: str) -> list[int]:
        if len(said) < 50_000 or not hasattr(tokenizer, "__len__"):  # stand-ins have no vocabulary
            return real(tokenizer, said)
        key = said, len(tokenizer), tuple(real(tokenizer, said[:2000]))
        if key not in known:
            known[key] = real(tokenizer, said)
        return list(known[key])

    with pytest.MonkeyPatch.context() as patch:
        for module in modules:
            patch.setattr(module, "text_ids", text_ids)
        yield
