"""The vectors of exact engines: what this machine gives is what the file says of its program."""

import json

import pytest

from tools.make_exact_vectors import LENGTHS, PATH, prompts, results

KNOWN = json.loads(PATH.read_text())


def test_this_machine_gives_the_bits_of_the_file():
    program, found = results()
    if program not in KNOWN["results"]:
        pytest.skip(f"the file has no results of {program}")
    assert found == KNOWN["results"][program]


def test_the_prompts_are_those_of_the_file_and_variants_differ():
    assert KNOWN["prompts"] == prompts()
    assert [len(prompt) for prompt in prompts()] == [*LENGTHS]
    digests = [json.dumps(found) for found in KNOWN["results"].values()]
    assert len({*digests}) == len(digests) >= 4, "each variant sums in another order"
