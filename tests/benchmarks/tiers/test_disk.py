"""Trials of the folder of segments: they pass, and they find an index that believes what it reads."""

import pytest

pytest.importorskip("kvq.tiers")

from benchmarks.tiers import disk, engine
from kvq.tiers import disk as tier_disk


@pytest.mark.parametrize(
    ("part", "scale"), [("flips", 0.004), ("damage", 0.02), ("kills", 0.03), ("budget", 0.02)]
)
def test_nothing_wrong_is_read(part, scale, tmp_path):
    rows = disk.PARTS[part](scale, 3, tmp_path)
    assert [row for row in rows if not row["holds"] and "share of" not in row["what"]] == []


@pytest.mark.parametrize("part", ["flips", "damage"])
def test_an_index_that_does_not_check_digests_is_found(part, tmp_path, monkeypatch):
    monkeypatch.setattr(tier_disk, "content_digest", lambda *_: bytes(16))
    rows = disk.PARTS[part](0.01, 3, tmp_path)
    (wrong,) = (row for row in rows if row["what"] == "wrong blocks")
    assert wrong["found"] > 0


def test_a_disk_that_fails_fails_no_request(tmp_path):
    setting = engine.Setting(model="tiny", kv="int8", scale=0.01, seed=1, tokens=100, folder=tmp_path)
    rows = engine.failing(setting)
    assert [row for row in rows if not row["holds"]] == []


def test_damage_is_no_hit_at_the_engine_either(tmp_path):
    setting = engine.Setting(model="tiny", kv="int8", scale=0.01, seed=1, tokens=100, folder=tmp_path)
    rows = engine.crafted(setting)
    assert [row for row in rows if not row["holds"]] == []
