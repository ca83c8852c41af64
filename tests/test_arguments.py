"""Arguments of other types than those named are refused by their names, before any work."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvq
from kvq.arguments import checked
from kvq.errors import ConfigError


@checked
def example(
    model: str | Path,
    kv: str | list[str],
    *rest: int,
    count: int = 1,
    share: float | None = None,
    lengths: Sequence[int] | None = None,
    flag: bool = False,
    table: Mapping[str, Any] | None = None,
    **options: Any,
) -> str:
    return "done"


@pytest.mark.parametrize(
    ("given", "options"),
    [
        (("a", "b"), {}),
        ((Path("a"), ["b", "c"], 1, 2), {"count": np.int64(3), "share": 1, "other": object()}),
        (("a", ("b",)), {"share": np.float32(0.5), "lengths": (1, 2), "flag": True, "table": {"a": 1}}),
        (("a", []), {"lengths": range(3)}),
    ],
)
def test_what_is_named_passes(given, options):
    assert example(*given, **options) == "done"


@pytest.mark.parametrize(
    ("given", "options", "named"),
    [
        ((7, "b"), {}, "example: model must be str or Path, got int 7"),
        ((b"a", "b"), {}, "example: model"),
        (("a", 7), {}, "example: kv"),
        (("a", ["b", 7]), {}, "example: kv"),
        (("a", "b"), {"count": "3"}, "example: count must be int, got str '3'"),
        (("a", "b"), {"count": True}, "example: count"),
        (("a", "b"), {"count": 1.5}, "example: count"),
        (("a", "b"), {"share": "1"}, "example: share must be float or None"),
        (("a", "b"), {"lengths": "123"}, "example: lengths"),
        (("a", "b"), {"lengths": 3}, "example: lengths"),
        (("a", "b"), {"flag": 1}, "example: flag"),
        (("a", "b"), {"table": [1]}, "example: table"),
    ],
)
def test_other_types_are_refused_by_name(given, options, named):
    with pytest.raises(ConfigError) as refused:
        example(*given, **options)
    assert str(refused.value).startswith(named)


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: kvq.perplexity("tiny", kv=7), "kv"),
        (lambda: kvq.perplexity("tiny", kv="int4", text=b"abc"), "text"),
        (lambda: kvq.load(7), "path_or_name"),
        (lambda: kvq.load("tiny", dtype=7), "dtype"),
        (lambda: kvq.load("tiny", device=["cpu"]), "device"),
        (lambda: kvq.load("tiny", backend=None), "backend"),
        (lambda: kvq.LLM("tiny", dtype=7), "dtype"),
        (lambda: kvq.tune("tiny", budget=4.5), "budget"),
        (lambda: kvq.tune("tiny", max_kl="0.1"), "max_kl"),
        (lambda: kvq.tune("tiny", recent="64"), "recent"),
        (lambda: kvq.quantize("tiny", out=None), "out"),
        (lambda: kvq.quantize("tiny", "out", bits={}), "bits"),
        (lambda: kvq.plan("llama-3.1-8b", gpu=7), "gpu"),
        (lambda: kvq.plan("llama-3.1-8b", gpu="h100", context="8192"), "context"),
    ],
)
def test_public_functions_name_what_they_refuse(call, named):
    with pytest.raises(ConfigError, match=f"{named} must be .*, got "):
        call()
