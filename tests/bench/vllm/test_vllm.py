"""`kvq bench vllm` without vLLM: loads as asked for, rows that add up, nothing wrong is timed."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

import kvq
from kvq.bench.engine.load import LoadRequest
from kvq.bench.vllm import vllm
from kvq.bench.vllm.engine import OWN
from kvq.bench.vllm.vllm import CLOCKED, WARM_UP, make_loads, require_context
from kvq.commands.bench.vllm import _numbers
from kvq.errors import ConfigError, EngineError
from kvq.models import Model

LOADS = BURST, DEEP = make_loads((3, 9, 4), (2, 33, 2), repeats=2)


@pytest.fixture(scope="module")
def model() -> Model:
    return kvq.load("tiny", dtype="fp32")


class Engine:
    """Says what kvq's own engine says, or not; takes a second for a step of `kvq`, two for vLLM's own."""

    def __init__(self, kv: str, model: Model, limits: dict[str, Any], *, wrong: bool = False) -> None:
        self.name, self.kv, self.num_blocks = ("vLLM" if kv == OWN else "kvq in vLLM"), kv, 7
        self.model, self.limits, self.wrong = model, limits, wrong
        self.added: list[LoadRequest] = []
        self.dropped: list[str] = []

    def add(self, requests: Sequence[LoadRequest]) -> list[str]:
        self.added = list(requests)
        return [str(one.index) for one in requests]

    def finish(self, names: Sequence[str]) -> list[list[int]]:
        said = vllm.kvq_outputs(self.model, "auto" if self.kv == OWN else self.kv, self.added)
        tokens = [list(one.token_ids) for one in said]
        if self.wrong:
            tokens[-1][1] = (tokens[-1][1] + 1) % 4096
        return tokens

    def fill(self, requests: Sequence[LoadRequest]) -> list[str]:
        return self.add(requests)

    def steps_s(self, count: int, requests: int) -> float:
        assert len(self.added) == requests
        return count * (2.0 if self.kv == OWN else 1.0)

    def drop(self, names: Sequence[str]) -> None:
        self.dropped += names

    @contextmanager
    def clocks(self) -> Iterator[dict[str, float]]:
        yield {"attention": 0.25 * CLOCKED, "write": 0.125 * CLOCKED}

    def close(self) -> None:
        pass


def run(
    monkeypatch: pytest.MonkeyPatch, model: Model, **more: Any
) -> tuple[list[dict[str, Any]], list[Engine]]:
    engines: list[Engine] = []

    def make(kv: str, folder: object, limits: dict[str, Any]) -> Engine:
        engines.append(Engine(kv, model, limits, **more))
        return engines[-1]

    monkeypatch.setattr(vllm, "VllmServer", make)
    return vllm.bench_vllm(model, ["int8"], LOADS, 2), engines


def test_loads_hold_what_a_measurement_needs() -> None:
    assert DEEP.lasting_tokens > 2 + WARM_UP + 2 * 2 + CLOCKED  # none ends while steps are measured
    _, long = make_loads(
        (3, 9, 4), (8, 4096, 8), 3
    )  # its first request goes on while 15 steps compute others
    assert long.lasting_tokens > 15 + WARM_UP + 3 * 8 + CLOCKED
    assert BURST.sample_tokens == 12
    assert DEEP.sample_tokens == 4
    assert BURST.cache_tokens >= 3 * 128
    assert BURST.name == "3 x 9/4"
    assert _numbers("8x4096x8", "--deep") == (8, 4096, 8)
    for text in ("8x4096", "8x-1x8", "axbxc"):
        with pytest.raises(ConfigError, match="three whole numbers"):
            _numbers(text, "--deep")
    with pytest.raises(ConfigError, match="got"):
        make_loads((0, 9, 4), (2, 33, 2), 1)


def test_requests_that_outgrow_the_model_are_refused_by_the_option_that_asks_for_them() -> None:
    loads = make_loads((3, 9, 4), (2, 60, 8), repeats=5)
    require_context(loads, loads[1].tokens)
    with pytest.raises(ConfigError, match=r"--deep .* smaller --deep"):
        require_context(loads, loads[1].tokens - 1)
    with pytest.raises(ConfigError, match="--burst"):
        require_context(loads, 9)


def test_rows_add_up(monkeypatch: pytest.MonkeyPatch, model: Model) -> None:
    rows, engines = run(monkeypatch, model)
    assert [(row["load"], row["kv"]) for row in rows] == [
        (shape.name, kv) for shape in LOADS for kv in (OWN, "int8")
    ]
    own, mine = rows[2:]
    assert (own["output_tokens_per_s"], mine["output_tokens_per_s"]) == (1.0, 2.0)  # 2 requests a step
    assert (own["times_own"], mine["times_own"]) == (1.0, 2.0)
    assert (mine["attention_ms"], mine["write_ms"], mine["other_ms"]) == (250.0, 125.0, 625.0)
    assert all(row["samples"] == 2 and row["check_equal"] == row["check_requests"] for row in rows)
    held = BURST.cache_tokens * model.geometry.elements_per_token * 4
    assert all(one.limits["kv_cache_memory_bytes"] == held and one.dropped for one in engines)


def test_other_tokens_end_it_before_anything_is_timed(monkeypatch: pytest.MonkeyPatch, model: Model) -> None:
    monkeypatch.setattr(vllm, "_burst_s", SimpleNamespace())  # not callable
    with pytest.raises(EngineError, match="something else"):
        run(monkeypatch, model, wrong=True)
