"""End tokens are those that a model's files name, asked in the order of transformers and vLLM."""

import json

import pytest

from kvq.errors import ModelError
from kvq.models.describe.ends import read_end_ids

ABSENT = object()
CASES = [  # generation_config.json, config.json, the tokenizer, and what ends a text
    (2, 2, 2, {2}),
    (ABSENT, 2, None, {2}),
    (None, 2, None, {2}),
    ([], 2, None, {2}),
    (-1, 2, None, {2}),
    ([3, 4], 2, None, {3, 4}),
    ([3, 4], 2, 5, {3, 4, 5}),
    (3, ABSENT, 5, {3, 5}),
    (ABSENT, [7, 8], 5, {5, 7, 8}),
    (ABSENT, None, 5, {5}),
    (ABSENT, ABSENT, 5, {5}),
    (ABSENT, ABSENT, 99, set()),  # a token that was added beyond the embedding
    (ABSENT, ABSENT, None, set()),
    (-1, [-1], None, set()),
]


def named(value):
    return {} if value is ABSENT else {"eos_token_id": value}


@pytest.mark.parametrize(("generation", "config", "tokenizer", "ends"), CASES)
@pytest.mark.parametrize("is_there", [True, False])
def test_the_files_are_asked_in_turn(generation, config, tokenizer, ends, is_there, tmp_path):
    if is_there or generation is not ABSENT:
        file = {"temperature": 0.6, **named(generation)}
        (tmp_path / "generation_config.json").write_text(json.dumps(file))
    found = read_end_ids(tmp_path, named(config), tokenizer, 50)
    assert found == ends


def test_a_broken_file_is_named(tmp_path):
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(ModelError, match=r"generation_config\.json is not JSON"):
        read_end_ids(tmp_path, {}, 2, 50)
