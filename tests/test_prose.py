"""Figures that pages tell in prose are those of the committed results."""

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SHORT, DEFAULT, LONG = "tiny-wikitext2", "tiny-default", "eval-tiny-4096-wikitext2"
SIMULATED, NEEDLE, TUNED = (
    "eval-tiny-recipes-wikitext2",
    "needle-copy-model",
    "tune-smollm2-3.5bits-wikitext2",
)
TAIL = "+sinks=4+recent=128"


def result(name):
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}-cpu.json").read_text(encoding="utf-8"))


def real(part):
    path = ROOT / "benchmarks" / "results" / f"real-{part}.json"
    return json.loads(path.read_text(encoding="utf-8"))["rows"]


def row(name, kv):
    return next(one for one in result(name)["rows"] if one["kv"] == kv)


def kl(name, kv):
    return row(name, kv)["kl_mean"]


def change(name, kv):
    return f"{row(name, kv)['perplexity_change']:+.2%}"


def held(name, kv):
    return f"{row(name, kv)['bits_held']:.1f}"


def ratio(name, kv, other, digits=2):
    return f"{kl(name, kv) / kl(name, other):.{digits}f}"


def deepest(name, kv):
    return row(name, kv)["by_depth"][-1]


def span(name, kv):
    return " to ".join(f"{bound:.5f}" for bound in deepest(name, kv)["intervals"]["kl_mean"])


def needles(kv):
    """Percent found at depths between the ends."""
    some = [one for one in result(NEEDLE)["needle"] if one["kv"] == kv and 0 < one["depth"] < 1]
    return 100 * sum(one["hits"] for one in some) / sum(one["trials"] for one in some)


def fewer(kv):
    """Points less than unquantized KV."""
    return f"{needles('fp32') - needles(kv):.0f}"


def worst(kv):
    """Of the trained models."""
    rows = [one for one in real("wikitext") if one["kv"] == kv]
    assert len(rows) == 4
    top = min(one["top1_agreement"] for one in rows)
    kl_mean, change = (max(one[name] for one in rows) for name in ("kl_mean", "perplexity_change"))
    return (
        f"mean KL at most {kl_mean:.4f}, perplexity {change:+.1%}, the same top token for at least {top:.1%}"
    )


def told_in_choosing():
    for kv in ("int8", "int6", "int4", "int3"):
        yield worst(kv)
    for name, words in ((f"int3{TAIL}", "by {} at a mean KL of {:.3f}"), ("int3_mean", "by {} at {:.3f}")):
        yield words.format(change(LONG, name), kl(LONG, name))
    yield f"{ratio(SIMULATED, 'recipe-2.5625bits.json', 'kvarn-k2v2')} times that of `kvarn-k2v2`"
    yield f"{ratio(SIMULATED, 'recipe-3.0bits.json', 'kivi-k2v2')} times that of `kivi-k2v2`"
    yield f"{ratio(SIMULATED, 'recipe-5.0bits.json', 'kivi-k4v4')} times that of `kivi-k4v4`"
    small, theirs = "recipe-4.5625bits.json", "kvarn-k4v4"
    late = deepest(SIMULATED, small)["kl_mean"] / deepest(SIMULATED, theirs)["kl_mean"]
    yield f"It is {ratio(SIMULATED, small, theirs)} times that of `kvarn-k4v4`, but these intervals overlap"
    yield f"it is {late:.2f} times that of `kvarn-k4v4`, and the intervals do not overlap"
    yield f"{span(SIMULATED, small)}, and {span(SIMULATED, theirs)}"
    yield f"takes {held(SIMULATED, theirs)} bits per element with `kvarn-k4v4`, and {held(SIMULATED, small)}"
    plain, means, base = f"int3{TAIL}", f"int3_mean{TAIL}", "int4_g64_rot"
    late = deepest(LONG, plain)["kl_mean"] / deepest(LONG, base)["kl_mean"]
    yield f"{ratio(LONG, plain, base, 1)} times that of `int4_g64_rot` ({late:.1f} times among the"
    yield f"With block means as well, it is {ratio(LONG, means, base)} times"
    yield f"holds {held(LONG, means)} bits per element instead of {held(LONG, base)}"
    yield f"`int3` finds {fewer('int3')} percentage points fewer than unquantized KV, and {fewer(plain)}"
    yield f"`int2` finds {needles('fp32') - needles('int2'):.1f} points fewer, and"
    yield f"{fewer(f'int2_mean{TAIL}')} points fewer with such tokens and block means"
    yield from told_of_tuning()


def told_of_tasks():
    exact, *rows = real("humaneval")
    assert [one["kv"] for one in rows] == ["int4", "int3"]
    yield f"solves {exact['hits']} of the 164 HumanEval problems with KV in fp32"
    for one in rows:
        yield f"With `{one['kv']}`, it solves {one['hits']}"
        found = one["against_baseline"]
        low, high = found["interval"]
        yield f"({found['gained']} gained, {found['lost']} lost; "
        yield f"{found['difference']:+.1%}, {low:+.1%} to {high:+.1%})"
    same = [f"{one['canonical_top1_agreement']:.1%}" for one in rows]
    yield f"for {same[0]} of 8,712 tokens with `int4`, and for {same[1]} with `int3`"
    found = {(one["model"], one["kv"]): one["hits"] for one in real("retrieval")}
    for model, words in (("qwen15", "this model"), ("qwen05", "The 0.5B model")):
        yield f"{words} retrieves {found[model, 'fp32']} with KV in fp32 and {found[model, 'int4']} with"


def told_of_rivals():
    rows = {one["kv"]: one["bits_held_1024"] for one in real("rivals") if one["model"] == "smollm2"}
    assert rows["quanto-4"] == rows["hqq-4"]
    yield f"{rows['int4']:.1f} bits per element with `int4`, {rows['quanto-4']:.1f} with the 4-bit"
    kivi, kvarn = (f"{rows[kv]:.1f} with that of" for kv in ("kivi-k4v4+recent=128", "kvarn-k4v4"))
    yield f"{kivi} KIVI and {kvarn} KVarN"
    yield f"`int5` takes {rows['int5']:.1f} bits"
    assert f"{rows['int4+recent=96']:.1f}" == f"{rows['kvarn-k4v4']:.1f}"


def told_in_quality():
    yield from told_of_tasks()
    yield from told_of_rivals()
    for name in (DEFAULT, SHORT):
        check = result(name)["instrument"]
        assert check["passed"]
        yield " and ".join(f"{check[key]:.1%}" for key in ("window_change", "int2_change"))
    yield f"the divergence of `int4_mean` is {ratio(LONG, 'int4_mean', 'int4')} times that of `int4`"
    yield f"here, it is {ratio(SHORT, 'int4_mean', 'int4')} times"
    yield f"it is {ratio(LONG, f'int3{TAIL}', 'int4', 1)} times that of `int4` there, and"
    yield f"{ratio(SHORT, f'int3{TAIL}', 'int4')} times here"

    rows = {
        (one["kv"], one["depth"]): one
        for one in result("real-speed")["rows"]
        if one["model"] == "qwen05" and one["sequences"] == 1
    }
    now, before = (
        (rows[kv, 32_600]["between_ms"] - rows[kv, 512]["between_ms"]) / rows[kv, 512]["kv_bytes_per_token"]
        for kv in ("int4", "int4_g32_s8_rot")
    )
    yield f"the time per step grows {now / before:.2f} times as much per byte of KV as with the former format"


def told_of_tuning():
    best = result(TUNED)["rival"]
    low, high = result(TUNED)["ratio_to_rival"]
    yield f"{ratio(TUNED, 'chosen', best)} times ({low:.2f} to {high:.2f}) the divergence of the best uniform"
    yield f"the size of `int3` had {ratio(TUNED, 'tuned, as int3', 'int3')} times the divergence of `int3`"
    yield f"{ratio(TUNED, 'tuned, as int2', 'int2')} times that of `int2`"


def best(name, part, engine, weights, kv=None):
    """Return the most tokens/s in an engine's rows."""
    path = ROOT / "benchmarks" / "results" / f"peers-{name}.json"
    return max(
        one["tokens_per_s_median"]
        for one in json.loads(path.read_text(encoding="utf-8"))["rows"]
        if (one["part"], one["engine"], one["weights"]) == (part, engine, weights)
        and one["reason"] is None
        and kv in (None, one["kv"])
    )


def told_of_peers():
    loads = (  # file, part, weights of kvq, its KV, rival, its weights
        ("batch", "batch", "fp32", None, "openvino", "fp32"),
        ("batch", "batch", "int8", None, "openvino", "int8"),
        ("decode", "decode-128", "fp32", None, "llama.cpp", "f32"),
        ("decode", "decode-128", "int8", None, "llama.cpp", "q8_0"),
        ("decode", "decode-128", "int4", None, "llama.cpp", "q4_0"),
        ("decode-4096", "decode-4096", "fp32", "int8", "openvino", "fp32"),
        ("prefill", "prefill", "fp32", "int8", "openvino", "fp32"),
        ("prefill", "prefill", "int8", None, "openvino", "int8"),
        ("beside-1", "batch", "fp32", "int8", "openvino", "fp32"),
    )
    for file, part, weights, kv, rival, theirs in loads:
        ratios = [
            best(f"{file}-{cpu}", part, "kvq", weights, kv) / best(f"{file}-{cpu}", part, rival, theirs)
            for cpu in ("cpu", "amd")
        ]
        name = {"openvino": "OpenVINO"}.get(rival, rival)
        yield f"| {name} | {' | '.join(f'{ratio:.2f}' for ratio in ratios)} |"


PAGES = {
    "docs/choosing.md": told_in_choosing,
    "docs/quality.md": told_in_quality,
    "docs/peers.md": told_of_peers,
}


@pytest.mark.parametrize("page", PAGES)
def test_what_a_page_tells_is_what_was_measured(page):
    text = re.sub(r"\s+", " ", (ROOT / page).read_text(encoding="utf-8"))
    assert [told for told in PAGES[page]() if told not in text] == []


def test_a_smaller_format_of_kvq_diverges_less_than_each_format_of_another_engine():
    rows = real("rivals")
    others = [one for one in rows if re.match(r"llama|kivi|kvarn|quanto|hqq", one["kv"])]
    assert len(others) >= 20
    for other in others:
        assert [
            one
            for one in rows
            if one["model"] == other["model"] and re.fullmatch(r"int\d", one["kv"])
            if one["bits_held_1024"] < other["bits_held_1024"] and one["kl_mean"] < other["kl_mean"]
        ], (other["model"], other["kv"])


def test_intervals_overlap_where_the_page_says_so():
    low = row(SIMULATED, "kvarn-k4v4")["intervals"]["kl_mean"][0]
    assert row(SIMULATED, "recipe-4.5625bits.json")["intervals"]["kl_mean"][1] > low
    theirs, own = (deepest(SIMULATED, kv) for kv in ("kvarn-k4v4", "recipe-4.5625bits.json"))
    assert own["intervals"]["kl_mean"][1] < theirs["intervals"]["kl_mean"][0]
    assert own["first_depth"] == 512


def test_the_load_check_refuses_all_that_is_broken_and_nothing_that_is_harmless():
    rows = [one for one in real("checks") if "said" in one]
    assert len(rows) == 4 * 15  # models, formats
    assert all(one["said"] == "broken" for one in rows if one["measured"] == "broken")
    assert not [one for one in rows if one["measured"] == "harmless" and one["said"] == "broken"]


def test_every_result_is_shown_or_read_by_something():
    """None is left of which no page has a table and no code makes anything."""
    pages = [*(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks" / "results").glob("*.md")]
    texts = [path.read_text(encoding="utf-8") for path in pages]
    texts.append((ROOT / "README.md").read_text(encoding="utf-8"))
    for folder in ("tools", "benchmarks", "tests", "kvq"):
        texts += [path.read_text(encoding="utf-8") for path in (ROOT / folder).rglob("*.py")]
    whole = "".join(texts)
    unread = [
        path.name for path in (ROOT / "benchmarks" / "results").glob("*.json") if path.name not in whole
    ]
    assert unread == []
