"""`kvq bench vllm`: kvq's formats inside vLLM, compared with vLLM's own KV cache."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import click

from kvq.commands.shared.declare import gathered, option
from kvq.commands.shared.options import json_option, kv_option, model_argument
from kvq.commands.shared.results import FinishedRows, begin, result_of
from kvq.commands.shared.terminal import echo, print_columns
from kvq.errors import ConfigError
from kvq.evals.report.page import columns_of
from kvq.extras import VLLM, require, vllm_version
from kvq.sizes import parse_tokens

if TYPE_CHECKING:
    from kvq.models import Model

_RANDOM = "random"


@dataclass(frozen=True, kw_only=True, slots=True)
class _VllmOptions:
    model: str
    dtype: str = option("auto", "Type of the weights: auto (fp32), fp32, bf16, fp16.")
    burst: str = option("16x128x64", "Requests x prompt tokens x output tokens.")
    deep: str = option(
        "8x4096x8",
        "Requests x depth in tokens x decode steps of a sample; contexts grow from sample to sample.",
    )
    repeats: int = option(5, type=click.IntRange(1, 1000))


@click.command(name="vllm")
@kv_option("int8,int4,k8v4", many=True)
@model_argument(_RANDOM, "Folder, hub name, or 'random', a Llama of 28 million; the same as MODEL.")
@gathered(_VllmOptions, "options")
@json_option
def vllm(kv: list[str], options: _VllmOptions, json_path: str | None) -> None:
    """Compare kvq's formats with vLLM's own KV cache, inside vLLM on CPUs and under two loads.

    Greedy tokens are first compared with the tokens of kvq's own engine. All engines run alternately in this
    process. Milliseconds are per decode step, split into attention, writing KV, and everything else.
    """
    require("kvq bench vllm", VLLM)
    from kvq.bench.vllm.vllm import bench_vllm, make_loads

    begin(json_path)
    loads = make_loads(_numbers(options.burst, "--burst"), _numbers(options.deep, "--deep"), options.repeats)
    with _loaded(options) as model:
        facts: dict[str, Any] = {"model": model.description, "load": asdict(options), "vllm": vllm_version()}
        facts |= {"ld_preload": os.environ.get("LD_PRELOAD")}  # preloaded memory and OpenMP libraries
        finished = FinishedRows(json_path, partial(result_of, facts=facts), _print)
        finished.measure("vLLM", partial(bench_vllm, model, kv, loads, options.repeats))


@contextmanager
def _loaded(options: _VllmOptions) -> "Iterator[Model]":
    """Yield the model loaded by kvq; its files, which vLLM reads, exist until the end of the block."""
    from kvq.bench.vllm.vllm import make_model, read_model

    if options.model != _RANDOM:
        yield read_model(options.model, options.dtype)
        return
    with TemporaryDirectory() as folder:
        yield make_model(Path(folder) / _RANDOM, options.dtype)


def _numbers(text: str, name: str) -> tuple[int, int, int]:
    try:
        first, second, third = map(parse_tokens, text.split("x"))
        if min(first, second, third) >= 0:
            return first, second, third
    except ValueError:  # not three numbers; includes ConfigError
        pass
    raise ConfigError(f"{name} takes three whole numbers with x between, such as 8x4096x8, got {text!r}")


def _print(result: dict[str, Any]) -> None:
    rows = result["rows"]
    echo(f"model   {result['model']}")
    print_columns(rows, columns_of("bench vllm"), width=180)
    total, equal = (sum(row[key] for row in rows) for key in ("check_requests", "check_equal"))
    echo(
        f"checked {equal} of {total} requests give the tokens of kvq's own engine; others differ at near ties"
    )
