"""The checker takes a kvq.json if kvq does, with the same digest, and both refuse it otherwise."""

import json
import math
import random
from contextlib import suppress
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from kvq.errors import ConfigError
from kvq.formats import KVRecipe
from kvq.formats.calibrated import field_digest
from tests.spec.test_check import run
from tools.make_vectors import FOLDER, layout_of

MUTATIONS = 3000  # D82: checker and kvq refuse the same files
ODD: list[Any] = [
    *(
        None,
        True,
        False,
        0,
        1,
        -1,
        2,
        2.0,
        0.5,
        1.0,
        0.05,
        -64,
        64,
        65537,
        1e39,
        1 << 63,
        1 << 64,
        -(1 << 64),
    ),
    *(
        math.nan,
        math.inf,
        "",
        "int8",
        "int4_g7",
        "int2",
        "fp8_per_head",
        "\ud800",
        [],
        {},
        [1.5],
        [[1.5]],
        {"k": 1},
    ),
]
TEXTS = {
    "": "no JSON",
    "[1, 2": "no JSON",
    "[]": "no JSON object",
    "[" * 100_000: "nested deeper than 64 levels",
    '{"layers": ' + "[" * 65 + "]" * 65 + "}": "nested deeper than 64 levels",
    '{"format_version": 2, "format_version": 2}': "the name 'format_version' is twice",
    '{"format_version": NaN}': "is no finite number",
    '{"format_version": 1e999}': "is no finite number",
    '{"format_version": %s}' % ("9" * 30): "an integer of more than 64 bits",
    '{"format_version": %s}' % ("9" * 5000): "no JSON",
    '{"format_version": "\\ud800"}': "half of a surrogate pair",
}


def both(spec, path: Path) -> tuple[str | None, str | None]:
    """The digest of a kvq.json as kvq and as the checker read it; None where it is refused."""
    try:
        ours = KVRecipe.load(path).digest()
    except ConfigError:
        ours = None
    try:
        checked = spec["check"].check_recipe(path).rpartition(" ")[2]
    except spec["findings"].Wrong:
        checked = None
    return ours, checked


def places(value: Any) -> list[tuple[Any, Any]]:
    """Everything in a value that can be replaced: (container, key); of lists of numbers one."""
    if isinstance(value, dict):
        return [(value, k) for k in value] + [at for x in value.values() for at in places(x)]
    if isinstance(value, list) and value:
        some = value if isinstance(value[0], dict) else value[:1]
        return [(value, 0)] + [at for x in some for at in places(x)]
    return []


def mutate(data: Any, source: random.Random) -> None:
    """Change one thing."""
    container, key = source.choice(places(data))
    match source.randrange(4):
        case 0:
            del container[key]
        case 1 if isinstance(container, dict):
            container[source.choice(["k_clip", "v_clip", "centers", "sinks", "recent", "x"])] = source.choice(
                ODD
            )
        case 1 | 2 if isinstance(container, list):
            container.append(deepcopy(container[key]))
        case _:
            container[key] = source.choice(ODD)


def reseal(data: Any) -> None:
    """Give all lists and layers the digests that they should have, as far as they have any."""
    for name in ("static_scales", "centers"):
        own = data.get(name)
        for i, layer in enumerate(own["layers"] if own else []):
            for field in layer["digests"]:
                layer["digests"][field] = field_digest(own["model_digest"], i, field, layer[field])
    if data["model_digest"]:
        exact = "".join(f"+{name}={data[name]}" for name in ("sinks", "recent") if data.get(name))
        for i, x in enumerate(data["layers"]):
            values = [
                x["k"],
                x["v"],
                x["k_head_dim"],
                x["v_head_dim"],
                x.get("k_clip", 1.0),
                x.get("v_clip", 1.0),
            ]
            values += [
                bool(data.get("centers")) and data["centers"]["layers"][i][part] is not None for part in "kv"
            ]
            field = f"layer of {len(data['layers'])}{exact}"
            x["digest"] = field_digest(data["model_digest"], i, field, values)


@pytest.mark.parametrize("base", ["full", "static", "plain"])
def test_kvq_and_the_checker_agree_on_damaged_files(spec, base: str, tmp_path: Path) -> None:
    kv = {"static": "fp8_per_head/int8_rot", "plain": "int2/int4_mean+recent=3"}
    if base == "full":
        data = json.loads((FOLDER / "kvq.json").read_bytes())
    else:
        data = layout_of(kv[base]).recipe.to_json()
    source, path, taken = random.Random(base), tmp_path / "kvq.json", 0
    for _ in range(MUTATIONS // 3):
        changed = json.loads(json.dumps(data))
        mutate(changed, source)
        if source.random() < 0.8:
            with suppress(KeyError, TypeError, IndexError, AttributeError):
                reseal(changed)
        path.write_text(json.dumps(changed))
        ours, checked = both(spec, path)
        assert ours == checked, path.read_text()
        taken += ours is not None
    assert MUTATIONS / 100 < taken < MUTATIONS / 6


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_what_is_no_clean_json_is_refused_in_one_line(spec, text: str, tmp_path: Path) -> None:
    path = tmp_path / "kvq.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"recipe .*kvq\.json"):
        KVRecipe.load(path)
    found = run(path)
    assert (found.returncode, len(found.stderr.splitlines())) == (1, 1)
    assert found.stderr.startswith("wrong: ")
    assert TEXTS[text] in found.stderr


@pytest.mark.parametrize(
    ("place", "value", "said"),
    [
        (("format_version",), 2.0, "format_version: 2.0 is no whole number"),
        (("format_version",), True, "format_version: True is no whole number"),
        (("layers",), 3, "layers: no list"),
        (("layers", 0), 3, "layers[0]: no JSON object"),
        (("layers", 0, "k_head_dim"), 0, "layers[0].k_head_dim: 0 is not 1 to 65536"),
        (("layers", 0, "k_head_dim"), -64, "layers[0].k_head_dim: -64 is not 1 to 65536"),
        (("layers", 0, "k_head_dim"), True, "layers[0].k_head_dim: True is no whole number"),
        (("layers", 0, "v_head_dim"), 48.0, "layers[0].v_head_dim: 48.0 is no whole number"),
        (("layers", 0, "k"), 4, "layers[0].k: 4 is no text"),
        (("layers", 0, "k_clip"), True, "layers[0].k_clip: True is no number"),
        (("layers", 0, "k_clip"), 0, "layers[0].k_clip: 0 is out of range"),
        (("model_digest",), 5, "model_digest: 5 is no text"),
        (("sinks",), 1.0, "sinks: 1.0 is no whole number"),
        (("static_scales", "tokens"), True, "static_scales.tokens: True is no whole number"),
        (("static_scales", "text_digest"), None, "static_scales.text_digest: None is no text"),
        (("static_scales", "layers"), {}, "static_scales.layers: no list"),
        (("static_scales", "layers", 0, "k"), None, "static_scales.layers[0].k: no list"),
        (("static_scales", "layers", 0, "v"), [1.0], "static_scales.layers[0].v: 1 items, expected 3"),
        (
            ("static_scales", "layers", 0, "digests", "x"),
            "",
            "static_scales.layers[0].digests: unknown key 'x'",
        ),
        (("centers", "layers", 0, "k"), 1.5, "centers.layers[0].k: no list"),
        (("centers", "layers", 0, "k"), [1.5], "centers.layers[0].k[0]: no list"),
        (("centers", "layers", 0, "v"), [[1.5]], "centers.layers[0].v: its digest is"),
    ],
)
def test_a_value_of_another_kind_is_named_and_refused_by_kvq_too(
    spec, place: tuple[str | int, ...], value: object, said: str, tmp_path: Path
) -> None:
    data, path = json.loads((FOLDER / "kvq.json").read_bytes()), tmp_path / "kvq.json"
    *way, last = place
    container = data
    for step in way:
        container = container[step]
    container[last] = value
    path.write_text(json.dumps(data))
    with pytest.raises(spec["findings"].Wrong) as wrong:
        spec["check"].check_recipe(path)
    assert str(wrong.value).startswith(said)
    with pytest.raises(ConfigError, match=r"recipe .*kvq\.json: "):
        KVRecipe.load(path)
