"""Damage to a model folder, one kind at a time, chosen at random."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

ODD_VALUES = (
    *(-1, 0, 1, 3, 7, 2**31, 2**63, 10**30, 0.5, 1e308, float("nan"), float("inf")),
    *("", "x", "gptq_v2", "../x", "\u0000", None, True, False),
    *([], {}, [1, 2], {"a": 1}, [[[]]]),
)
Pairs = list[tuple[str, Any]]


class Objects(list[tuple[str, Any]]):
    """A JSON object as pairs, in which a key may be there twice."""


def mutate(folder: Path, chance: random.Random) -> str:
    """Change the folder by one mutation; returns what was done."""
    path = chance.choice(sorted(folder.iterdir()))
    kind = chance.choice(KINDS)
    kind(path, chance)
    return f"{kind.__name__} in {path.name}"


def flip_bit(path: Path, chance: random.Random) -> None:
    content = bytearray(path.read_bytes())
    at = chance.randrange(len(content) * 8)
    content[at // 8] ^= 1 << at % 8
    path.write_bytes(content)


def flip_bit_near_the_start(path: Path, chance: random.Random) -> None:
    content = bytearray(path.read_bytes())
    at = chance.randrange(min(len(content), 400) * 8)
    content[at // 8] ^= 1 << at % 8
    path.write_bytes(content)


def truncate(path: Path, chance: random.Random) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: chance.randrange(len(content))])


def append(path: Path, chance: random.Random) -> None:
    path.write_bytes(path.read_bytes() + chance.randbytes(chance.randint(1, 100)))


def swap_with_another(path: Path, chance: random.Random) -> None:
    """Of the same kind where there is one: shards for shards."""
    others = [other for other in sorted(path.parent.glob(f"*{path.suffix}")) if other != path]
    if others:
        other = chance.choice(others)
        content = path.read_bytes()
        path.write_bytes(other.read_bytes())
        other.write_bytes(content)
    else:
        truncate(path, chance)


def remove(path: Path, chance: random.Random) -> None:
    path.unlink()


def replace_value(path: Path, chance: random.Random) -> None:
    def change(pairs: Pairs, at: int) -> None:
        pairs[at] = (pairs[at][0], chance.choice(ODD_VALUES))

    _change_json(path, chance, change)


def replace_element(path: Path, chance: random.Random) -> None:
    """A number in a list; a shape or an offset, in a header."""

    def change(pairs: Pairs, at: int) -> None:
        key, value = pairs[at]
        if isinstance(value, list) and not isinstance(value, Objects) and value:
            value = [*value]
            value[chance.randrange(len(value))] = chance.choice(ODD_VALUES)
            pairs[at] = (key, value)
        else:
            pairs[at] = (key, chance.choice(ODD_VALUES))

    _change_json(path, chance, change)


def delete_key(path: Path, chance: random.Random) -> None:
    _change_json(path, chance, lambda pairs, at: pairs.pop(at))


def duplicate_key(path: Path, chance: random.Random) -> None:
    def change(pairs: Pairs, at: int) -> None:
        pairs.append((pairs[at][0], chance.choice([pairs[chance.randrange(len(pairs))][1], *ODD_VALUES])))

    _change_json(path, chance, change)


def rename_key(path: Path, chance: random.Random) -> None:
    def change(pairs: Pairs, at: int) -> None:
        key, value = pairs[at]
        cut = chance.randrange(len(key) + 1)
        pairs[at] = (key[:cut] + chance.choice(["", "x", "\u00e9"]) + key[cut + 1 :], value)

    _change_json(path, chance, change)


def swap_values(path: Path, chance: random.Random) -> None:
    def change(pairs: Pairs, at: int) -> None:
        other = chance.randrange(len(pairs))
        pairs[at], pairs[other] = (pairs[at][0], pairs[other][1]), (pairs[other][0], pairs[at][1])

    _change_json(path, chance, change)


KINDS: tuple[Callable[[Path, random.Random], None], ...] = (
    flip_bit,
    flip_bit_near_the_start,
    truncate,
    append,
    swap_with_another,
    remove,
    replace_value,
    replace_element,
    delete_key,
    duplicate_key,
    rename_key,
    swap_values,
)

IN_PLACE = tuple(kind for kind in KINDS if kind not in (swap_with_another, remove))  # of one file alone


def _change_json(path: Path, chance: random.Random, change: Callable[[Pairs, int], Any]) -> None:
    """Apply a change to one place of the JSON in a file, which may be the header of safetensors."""
    content = path.read_bytes()
    is_weights = path.suffix == ".safetensors"
    end = 8 + int.from_bytes(content[:8], "little") if is_weights else len(content)
    data = json.loads(content[8 if is_weights else 0 : end], object_pairs_hook=Objects)
    pairs = chance.choice([found for found in _objects(data) if found])
    change(pairs, chance.randrange(len(pairs)))
    text = _dumps(data).encode("utf-8", "surrogatepass")
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[end:] if is_weights else text)


def _objects(data: Any) -> list[Pairs]:
    if isinstance(data, Objects):
        return [data, *(found for _, value in data for found in _objects(value))]
    return [found for value in data for found in _objects(value)] if isinstance(data, list) else []


def _dumps(data: Any) -> str:
    if isinstance(data, Objects):
        return "{" + ", ".join(f"{json.dumps(key)}: {_dumps(value)}" for key, value in data) + "}"
    if isinstance(data, list):
        return "[" + ", ".join(map(_dumps, data)) + "]"
    return json.dumps(data)
