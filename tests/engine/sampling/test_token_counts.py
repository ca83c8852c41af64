"""Promise: what is read is what was added and recorded, through moves, removals and reuse."""

import random
from collections import Counter

import torch

from kvq.engine.sampling.penalties import TokenCounts


def _check(counts: TokenCounts, mirror: dict[int, Counter], rows: list[int]) -> None:
    places, tokens, seen = counts.read(rows)
    found = [Counter() for _ in rows]
    for place, token, count in zip(places.tolist(), tokens.tolist(), seen.tolist(), strict=True):
        assert token not in found[place], "a token came twice"
        found[place][token] = int(count)
    assert [dict(c) for c in found] == [dict(mirror[row]) for row in rows]


def test_random_operations_agree_with_counters():
    pick = random.Random(3)
    counts, mirror = TokenCounts(torch.device("cpu")), {}
    for _ in range(3000):
        row = pick.randrange(12)
        if row not in mirror:
            prompt, generated = ([pick.randrange(500) for _ in range(pick.randrange(90))] for _ in "ab")
            counts.add(row, prompt, generated)
            mirror[row] = Counter(dict.fromkeys(prompt, 0))
            mirror[row].update(generated)
        elif pick.random() < 0.03:
            counts.remove(row)
            del mirror[row]
        else:
            token = pick.randrange(500)
            counts.record(row, token)
            mirror[row][token] += 1
        if pick.random() < 0.05:
            _check(counts, mirror, pick.sample(sorted(mirror), k=pick.randint(1, len(mirror))))
    assert len(counts._tokens) <= 12 * 2 * 1024, "spans given back aren't used again"


def test_a_row_without_tokens_reads_as_nothing():
    counts = TokenCounts(torch.device("cpu"))
    counts.add(4, (), ())
    assert [len(part) for part in counts.read([4])] == [0, 0, 0]
