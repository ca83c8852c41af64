"""Labels of figures lie apart and inside, however crowded the data."""

import random
from math import hypot
from typing import Any

import pytest
from matplotlib.text import Text

from kvq.bench.figures import engine_figure, roofline_figure
from kvq.calib.tune_report import front_figure, sensitivity_figure
from kvq.commands.capacity import capacity_report
from kvq.errors import EngineError
from kvq.evals.report import plot
from kvq.evals.report.figure import drawing, new_figure, short, write_figure
from kvq.evals.report.labels import draw_literally, label_point, settle
from kvq.printable import printable
from tests.evals.drawn import check_labels

FORMATS = [
    *("fp32", "bf16", "fp8", "fp8_per_head", "int8", "int8_per_head", "k8v4", "int4", "int4_g32", "int4_g16"),
    *(
        "int4_g32_rot",
        "int4_g16_rot",
        "int8/int4_g32",
        "fp8/int4_g16",
        "int8/int2_g32_rot",
        "int2_g32",
        "int2",
    ),
    "/home/somebody/experiments/of/last/week/recipe-4.5bits.json",
]
GPUS = ["rtx-4090", "a100-80", "h100", "mi300x"]
RANDOM = random.Random(7)


def _row(kv: str) -> dict[str, Any]:
    """What `kvq perplexity` and `kvq tune` report of a format; bits and KL close to its neighbours'."""
    span = {"perplexity_change": (-0.01, 4e5)}
    return {
        "kv": kv,
        "instrument": None,
        "kv_bytes_per_token": RANDOM.choice([576, 816, 864, 1224, 3072]),
        "bits_per_element": RANDOM.choice([4.5, 4.51, 5, 6.375]),
        "kl_mean": 0.0 if kv == "fp32" else 0.02 * (1 + RANDOM.random() / 10),
        "perplexity_change": 12_345.678 if kv == "int2" else 0.01,
        "kind": RANDOM.choice(["uniform", "uniform", "tuned", "chosen"]),
        "is_on_front": RANDOM.random() < 0.5,
        "by_depth": [
            {"first_depth": 2**n, "last_depth": 2 ** (n + 1) - 1, "kl_mean": RANDOM.random()}
            for n in range(17)
        ],
        "by_difficulty": [
            {"quarter": n, "perplexity_change": 0.1 * n, "intervals": span} for n in (1, 2, 3, 4)
        ],
        "intervals": {"same_tokens_mean": (3, 9)},
        "same_tokens_mean": 5,
        "new_tokens": 64,
    }


ROWS = [_row(kv) for kv in FORMATS]
LONG = "a model with a name " * 12


def _halves() -> list[dict[str, Any]]:
    return [
        {"layer": layer, "part": part, "format": fmt, "kl": RANDOM.random()}
        for layer in range(40)
        for part in "kv"
        for fmt in ("int8", "int4_g64", "int2_g32")
    ]


def _attention() -> list[dict[str, Any]]:
    errors = {"error_mean": 0.1, "k_error_mean": 0.05, "v_error_mean": 0.02}
    return [{"kv": kv, "layer": layer, **errors} for kv in FORMATS for layer in range(36)]


def _needles(lengths: int) -> list[dict[str, Any]]:
    return [
        {"kv": kv, "length": 131_072 + n, "depth": d / 10, "retrieved": 1.0}
        for kv in FORMATS[:5]
        for n in range(lengths)
        for d in range(3)
    ]


def _timings() -> dict[str, Any]:
    names = ("kvq", "SDPA, folded", "dequantize, then SDPA")
    rows = [
        {
            **{"name": RANDOM.choice(names), "kv": kv, "operation": "decode", "batch": 1, "context": 32_768},
            **{"gb_per_s": 20 * (1 + RANDOM.random() / 9), "ms_median": 3 * (1 + RANDOM.random() / 9)},
        }
        for kv in FORMATS
    ]
    return {"rows": rows, "read_gb_per_s": 34.0, "device": LONG, "date": "2026-11-23T01:02:03"}


def _loads() -> dict[str, Any]:
    rows = [
        {
            **{"name": name, "kv": kv, "concurrency": n, "itl_ms_p50": 60 + n / 99, "ttft_ms_p99": 5e5 + n},
            **{"output_tokens_per_s": 340 + n / 9, "is_saturation": n == 4, "is_best_within_slo": n == 2},
        }
        for name in ("kvq", "hf-static")
        for kv in FORMATS[:8]
        for n in (1, 2, 4, 8, 16, 64)
    ]
    return {"rows": rows, "model": LONG, "device": "a device", "date": "2026-11-23T01:02:03"}


FIGURES = {
    "perplexity": lambda: plot.perplexity_figure({"rows": ROWS, "model": LONG, "text": "held out"}),
    "divergence": lambda: plot.divergence_plot(ROWS),
    "difficulty": lambda: plot.difficulty_plot(ROWS),
    "attention": lambda: plot.attention_plot(_attention()),
    "generation": lambda: plot.generation_plot(ROWS),
    "needle": lambda: plot.needle_plot(_needles(4)),
    "many needles": lambda: plot.needle_plot(_needles(20)),
    "front": lambda: front_figure(ROWS),
    "sensitivity": lambda: sensitivity_figure(_halves()),
    "roofline": lambda: roofline_figure(_timings()),
    "engine": lambda: engine_figure(_loads()),
}


@pytest.mark.daily(4)
@pytest.mark.parametrize("name", FIGURES)
def test_labels_of_crowded_figures_lie_apart(name: str) -> None:
    figure = FIGURES[name]()
    draw_literally(figure)
    settle(figure)
    check_labels(figure)


def test_names_are_drawn_letter_by_letter(tmp_path: Any) -> None:
    names = [r"$\frac{$", "$x^2$", "a\x1b[2J", "\u4e2d\U0001f600\ud800"]
    rows = [{**_row(name), "instrument": None} for name in names]
    figure = plot.perplexity_figure({"rows": rows, "model": names[0], "text": names[3]})
    write_figure(tmp_path / "a.svg", lambda: figure)
    shown = [printable(name).replace("$", r"\$") for name in names]
    assert figure._suptitle.get_text() == f"{shown[0]}, {shown[3]}"
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == shown


def test_what_cant_be_drawn_is_told_and_loses_nothing(tmp_path: Any) -> None:
    def fail(words: str) -> None:
        raise ValueError(words)

    assert "This plot can't be drawn: &lt;why&gt;" in drawing(fail, "<why>")
    with pytest.raises(EngineError, match=r"can't draw .*a\.png: why"):
        write_figure(tmp_path / "a.png", fail, "why")
    assert drawing(lambda: None) == ""


def _plans() -> list[dict[str, Any]]:
    terms = [
        {"name": name, "bytes": 10**10, "formula": "?"}
        for name in (
            "linear weights",
            "embeddings, head, norms",
            "activations",
            "runtime",
            "left free",
            "KV pool",
        )
    ]
    return [
        {
            **{"model": LONG, "gpu": gpu, "kv": kv, "context": 8192, "max_users": 9, "contiguous_users": 5},
            **{"mixed_lengths": False, "slot_tokens": 8192},
            **{"terms": terms, "kv_bytes_per_token": 864, "tokens_per_s": 1e6, "ttft_ms": 1.0, "itl_ms": 2.0},
            "usd_per_million_tokens": 0.01,
            "users_by_context": [(2**n, 2 ** (30 - n)) for n in range(8, 28)],
            "speed_by_users": [{"itl_ms": n, "usd_per_million_tokens": 20 / n} for n in (9, 10, 5000)],
        }
        for gpu in GPUS
        for kv in FORMATS[:5]
    ]


def _simulated() -> list[dict[str, Any]]:
    times = dict.fromkeys(("ttft_ms_p50", "ttft_ms_p99", "itl_ms_p50", "itl_ms_p99"), 9_876_543.21)
    return [
        {
            **{"model": LONG, "gpu": "h100", "kv": kv, "gpus": gpus, "routing": "least-loaded", **times},
            **{"max_num_batched_tokens": 512 * gpus, "requests": 9, "seconds": 1, "preemptions": 3},
            **{"output_tokens_per_s": 8e6, "slo_met": None, "usd_per_million_tokens": 1.0},
        }
        for kv in FORMATS
        for gpus in (1, 8)
    ]


@pytest.mark.daily(1)
@pytest.mark.parametrize("kind", ["plan", "one plan", "simulation"])
def test_labels_of_crowded_capacity_reports_lie_apart(
    kind: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures: list[Any] = []
    monkeypatch.setattr(capacity_report, "drawing", lambda make, *given: figures.append(make(*given)) or "")
    monkeypatch.setattr(capacity_report, "origin", lambda result: "")
    if kind == "simulation":
        capacity_report.write_simulation(tmp_path / "p.html", {"rows": _simulated()}, {"kv": ("KV", "")})
    else:
        plans = {"rows": _plans()[: 1 if kind == "one plan" else None]}
        capacity_report.write_plan(tmp_path / "p.html", plans, {"kv": ("KV", "")})
    assert figures
    for figure in figures:
        settle(figure)
        check_labels(figure)


def test_every_point_is_labelled_where_there_is_room() -> None:
    figure = new_figure(6, 4)
    axes = figure.subplots()
    for n in range(30):  # in one place
        axes.scatter(1 + n / 1000, 1)
        label_point(axes, f"point {n}", (1 + n / 1000, 1), fontsize=7)
    settle(figure)
    assert {f"point {n}" for n in range(30)} <= set(check_labels(figure))


def test_a_label_without_room_is_left_out() -> None:
    figure = new_figure(1, 1)
    axes = figure.subplots()
    label_point(axes, "far too long for a figure of an inch", (0.5, 0.5))
    settle(figure)
    assert not any("long" in text for text in check_labels(figure))


def test_labels_that_lie_apart_keep_next_to_their_points() -> None:
    figure = new_figure(6, 4)
    axes = figure.subplots()
    for x, y in ((0, 0), (1, 1), (0, 1)):
        axes.scatter(x, y)
        label_point(axes, f"{x} {y}", (x, y), fontsize=8)
    settle(figure)
    for label in axes.texts:
        right, up = label.get_position()
        assert max(abs(right), abs(up)) < 15  # points
        assert not label.arrow_patch.get_visible()


def test_names_that_touch_are_turned_and_figures_thinned_out() -> None:
    figure = new_figure(3, 3)
    axes = figure.subplots()
    axes.plot([0, 1])
    axes.set_xticks([n / 12 for n in range(12)], [f"name {n}" for n in range(12)])
    axes.set_yticks([n / 90 for n in range(90)])
    settle(figure)
    texts = check_labels(figure)
    assert {f"name {n}" for n in range(12)} <= set(texts)
    assert 5 < len(texts) - 12 < 45


def test_long_names_keep_both_ends() -> None:
    assert short("int4_g64") == "int4_g64"
    name = short("/home/somebody/experiments/recipe-4.5bits.json")
    assert len(name) <= 36
    assert name.startswith("/home/")
    assert name.endswith("recipe-4.5bits.json")


def test_a_label_is_nearest_to_its_own_point_or_led_to_it() -> None:
    figure = new_figure(6, 4)
    axes = figure.subplots()
    points = {f"point {n}": (RANDOM.random(), RANDOM.random()) for n in range(30)}
    for name, (x, y) in points.items():
        axes.scatter(x, y)
        label_point(axes, name, (x, y), fontsize=7)
    settle(figure)
    places = {name: axes.transData.transform(at) for name, at in points.items()}
    plain = [label for label in axes.texts if not label.arrow_patch.get_visible()]
    assert len(plain) > len(points) / 2
    for label in plain:
        left, bottom, right, top = Text.get_window_extent(label).extents
        away = {
            name: hypot(max(left - x, x - right, 0), max(bottom - y, y - top, 0))
            for name, (x, y) in places.items()
        }
        assert min(away, key=away.__getitem__) == label.get_text()
