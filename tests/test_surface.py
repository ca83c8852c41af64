"""Nothing that users type or scripts read gets lost."""

import json

import pytest

from tools.surface import STORED, surface


@pytest.fixture(scope="module")
def found() -> dict[str, list[str]]:
    return surface()


@pytest.mark.parametrize("kind", json.loads(STORED.read_text(encoding="utf-8")))
def test_no_name_of_the_list_is_gone(found, kind):
    gone = set(json.loads(STORED.read_text(encoding="utf-8"))[kind]) - set(found[kind])

    assert not gone, f"{kind} that people use are gone: {sorted(gone)}"
    assert found[kind]
