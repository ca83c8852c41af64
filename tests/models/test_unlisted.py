"""Families on no list are served if a small twin proves them, and refused with what is wrong if not."""

import logging
import re

import pytest

from kvq.errors import ModelError
from kvq.models import load
from kvq.models.proof import TOLERANCE
from tests.models.test_families import check_against_transformers
from tests.models.wrong_models import PLAIN, WRONG, plainly, save_wrong


@pytest.mark.parametrize("name", sorted(WRONG))
def test_a_model_that_attends_otherwise_is_refused_with_what_is_wrong(name, tmp_path):
    eager, attend, says = WRONG[name]
    folder = save_wrong(tmp_path, name, eager, attend)
    with pytest.raises(ModelError, match=f"wrong_{name}: .*{says}"):
        load(folder, "fp32", dtype="fp32")


def test_what_the_wrong_models_change_is_all_that_is_wrong_with_them(tmp_path, caplog):
    folder = save_wrong(tmp_path, "nothing", PLAIN, plainly)
    with caplog.at_level(logging.INFO, logger="kvq"):
        check_against_transformers(folder, decoded=24)
    [line] = [text for text in caplog.messages if "checked families" in text]
    found = re.fullmatch(
        r"wrong_nothing is not among the checked families; it agrees with its own attention to (\d+e-\d+)",
        line,
    )
    assert 0 < float(found[1]) <= TOLERANCE
